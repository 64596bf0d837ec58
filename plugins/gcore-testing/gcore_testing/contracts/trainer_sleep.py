"""The part of a trainer's contract about sleep: it frees memory and changes nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.trainer import SleepsInRollout, TrainRecord
from gcore_testing.contracts.base import Contract, claims, closing
from gcore_testing.contracts.weights import digests, exported


class TrainerSleepTests(Contract):
    """Tests of a trainer's sleep, which are mixed into ``TrainerContract``."""

    if TYPE_CHECKING:

        def build(self, context: WorkerContext, **settings: Any) -> Any: ...

    @pytest.fixture
    def memory_of(self) -> Callable[[Any], int]:
        """Gives a function from a trainer to the bytes of device memory that it holds.

        Override it where the device is not CUDA under torch.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_available():
            pytest.fail(
                "sleep is claimed: give the fixture `memory_of`, which says how many bytes a "
                "trainer holds"
            )
        return lambda trainer: int(cuda.memory_reserved())

    @pytest.fixture
    def restless(self, trainer_context: WorkerContext) -> Iterator[Any]:
        """Gives a trainer like ``trainer``, which never sleeps."""
        yield from closing(self.build(trainer_context))

    def test_sleep_is_claimed_where_it_is_there(self, trainer: Any) -> None:
        """A claim needs the methods. A trainer may have them, as by inheritance, and not claim."""
        claimed = self.claimed().sleeps
        assert isinstance(trainer, SleepsInRollout) >= claimed, f"sleep claimed: {claimed}"

    @claims("sleeps")
    def test_a_trainer_that_sleeps_gives_memory_back(
        self,
        trainer: Any,
        records: list[TrainRecord],
        advantages: np.ndarray,
        memory_of: Callable[[Any], int],
    ) -> None:
        _train(trainer, records, advantages, 0)
        awake = memory_of(trainer)
        trainer.sleep()
        asleep = memory_of(trainer)
        trainer.wake()
        assert asleep < awake / 2, f"{awake} bytes were held before, {asleep} are held asleep"

    @claims("sleeps")
    def test_a_run_with_sleep_has_the_bits_of_one_without(
        self,
        trainer: Any,
        restless: Any,
        records: list[TrainRecord],
        advantages: np.ndarray,
    ) -> None:
        """It sleeps before every step, also between two updates of a schedule or of moments."""
        for step in range(3):
            trainer.sleep()
            trainer.sleep()  # again: nothing
            trainer.wake()
            trainer.wake()
            assert digests(exported(trainer)) == digests(exported(restless))
            found = _train(trainer, records, advantages, step)
            expected = _train(restless, records, advantages, step)
            assert found["loss"] == expected["loss"]
            assert found["grad_norm"] == expected["grad_norm"]
        assert digests(exported(trainer)) == digests(exported(restless))

    @claims("sleeps")
    def test_a_trainer_that_sleeps_does_not_train(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        trainer.prepare(records, frozenset())
        trainer.sleep()
        version = trainer.version
        with pytest.raises(GcoreError, match="(?i)sleep"):
            trainer.train(0, advantages, 1, 1)
        assert trainer.version == version
        trainer.wake()


def _train(
    trainer: Any, records: list[TrainRecord], advantages: np.ndarray, step: int
) -> dict[str, float]:
    trainer.prepare(records, frozenset())
    metrics: dict[str, float] = trainer.train(step, advantages, 1, 1)
    return metrics
