"""The part of the contracts about adapters that are pushed alone: ``adapters``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import AdapterFacts, WeightPlan
from gcore_core.contract.trainer import SendsAdapter, TrainRecord
from gcore_testing.contracts.base import Contract, claims, closing
from gcore_testing.contracts.weights import digests, exported, load
from gcore_testing.safetensors_files import Tensors

#: peft's beginning of every name.
PREFIX = "base_model.model."
#: float32 sums of a few products, relative to a weight of size 1.
_ROUNDING = 1e-5


def exported_adapter(trainer: SendsAdapter) -> Tensors:
    """Returns a copy of the adapter that the trainer exports."""
    return [(spec, np.array(array, copy=True)) for spec, array in trainer.export_adapter()]


def push_adapter(receiver: Any, trainer: SendsAdapter, version: int) -> Tensors:
    """Pushes the trainer's adapter in two buckets, as the shell does; returns its tensors."""
    tensors = exported_adapter(trainer)
    plan = WeightPlan(version, trainer.adapter_specs(), trainer.adapter_facts())
    receiver.begin_weights(plan)
    half = (len(tensors) + 1) // 2
    for part in (tensors[:half], tensors[half:]):
        load(receiver, part)
    receiver.commit_weights(plan)
    return tensors


def _values(tensors: Tensors) -> dict[str, np.ndarray]:
    return {
        spec.name: array.view(np.float32).reshape(spec.shape)
        for spec, array in tensors
        if spec.dtype == "F32"
    }


class TrainsAdapters(Contract):
    """Tests of a trainer's adapters, which are mixed into ``TrainerContract``.

    adapter_config: settings under which it trains a new adapter, in float32.
    """

    adapter_config: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def adapter_trainer(self, trainer_context: WorkerContext) -> Iterator[Any]:
        """Gives a trainer that is like ``trainer`` but trains an adapter."""
        if not self.adapter_config:
            pytest.fail("adapters is claimed: name its settings in `adapter_config`")
        yield from closing(self.build(trainer_context, **self.adapter_config))

    @claims("adapters")
    def test_an_adapter_put_on_the_base_gives_the_exported_weights(
        self, adapter_trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """The base is what is exported before the first update; what has no adapter stays so."""
        sends = isinstance(adapter_trainer, SendsAdapter)
        assert sends, "it lacks a method of SendsAdapter"
        base = _values(exported(adapter_trainer))
        for step in range(2):
            adapter_trainer.prepare(records, frozenset())
            adapter_trainer.train(step, advantages, 1, 1)
        facts = adapter_trainer.adapter_facts()
        assert facts is not None and facts.targets, "it says that it trains no adapter"
        tensors = exported_adapter(adapter_trainer)
        assert [spec for spec, _ in tensors] == list(adapter_trainer.adapter_specs())
        names = [
            f"{PREFIX}{target}.lora_{half}.weight" for target in facts.targets for half in "AB"
        ]
        assert [spec.name for spec, _ in tensors] == names
        halves = _values(tensors)
        moved = 0.0
        for name, weight in _values(exported(adapter_trainer)).items():
            target = name.removesuffix(".weight")
            if target not in facts.targets:
                assert weight.tobytes() == base[name].tobytes(), f"{name} has no adapter, and moved"
                continue
            first, second = (halves[f"{PREFIX}{target}.lora_{half}.weight"] for half in "AB")
            assert first.shape[0] == second.shape[1] == facts.rank
            change = facts.scale * (second.astype(np.float64) @ first)
            np.testing.assert_allclose(weight, base[name] + change, atol=_ROUNDING, err_msg=name)
            moved = max(moved, float(np.abs(change).max()))
        assert moved > 10 * _ROUNDING, "two updates changed nothing"


class PairWithAdapters(Contract):
    """Tests of a trainer and a generator, mixed into ``TrainerWithGeneratorContract``.

    adapter_config: as of ``TrainsAdapters``.
    """

    adapter_config: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float]

    if TYPE_CHECKING:

        def sampled_by(
            self, generator: Any, requests: list[SampleRequest]
        ) -> list[TrainRecord]: ...
        def gap_of(self, trainer: Any, records: list[TrainRecord], *, step: int = 0) -> float: ...
        def objective(self) -> Any: ...

    @pytest.fixture
    def adapter_trainer(self, context: WorkerContext) -> Iterator[Any]:
        """Gives a trainer of an adapter, where both sides can push one."""
        if not self.adapter_config:
            self.not_claimed("adapters (name the trainer's settings in `adapter_config`)")
        parts = {"objective": self.objective()}
        trainer_context = replace(context, role="policy", parts=parts)
        yield from closing(self.build(trainer_context, **self.adapter_config))

    def test_after_each_push_of_an_adapter_they_agree(
        self, adapter_trainer: Any, generator: Any, requests: list[SampleRequest]
    ) -> None:
        """Each push puts it on the base anew; what the push before brought is gone."""
        for version in (1, 2, 3):
            self.gap_of(adapter_trainer, self.sampled_by(generator, requests), step=version - 1)
            pushed = push_adapter(generator, adapter_trainer, version)
            assert generator.version == version
            if hasattr(generator, "fingerprint"):
                assert digests(pushed).items() <= generator.fingerprint().items()
        records = self.sampled_by(generator, requests)
        assert self.gap_of(adapter_trainer, records, step=3) <= self.tolerance

    def test_an_adapter_for_another_base_is_refused(
        self, adapter_trainer: Any, generator: Any
    ) -> None:
        facts: AdapterFacts = adapter_trainer.adapter_facts()
        other = msgspec.structs.replace(facts, base="0" * 64)
        with pytest.raises(WeightMismatch):
            generator.begin_weights(WeightPlan(1, adapter_trainer.adapter_specs(), other))
