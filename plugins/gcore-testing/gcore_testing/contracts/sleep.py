"""The part of a generator's contract about sleep: it frees memory and changes nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from gcore_core.contract.errors import GcoreError
from gcore_core.contract.generator import SampleRequest
from gcore_testing.contracts.base import claims
from gcore_testing.contracts.draining import Drains


class SleepTests(Drains):
    """Tests of sleep, which are mixed into ``GeneratorContract``."""

    if TYPE_CHECKING:

        def _same(self, one: Any, other: Any) -> bool: ...

    @pytest.fixture
    def memory(self) -> Callable[[], int]:
        """Gives a function that returns how many bytes of device memory are in use.

        Override it where the device is not CUDA under torch.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_available():
            pytest.fail(
                "sleep is claimed: give the fixture `memory`, which says how many bytes the "
                "engine holds"
            )
        return lambda: int(cuda.memory_reserved())

    @claims("sleeps")
    def test_sleep_gives_memory_back(
        self, generator: Any, requests: list[SampleRequest], memory: Callable[[], int]
    ) -> None:
        self.run(generator, requests)
        awake = memory()
        generator.sleep()
        asleep = memory()
        generator.wake()
        assert asleep < awake, f"{awake} bytes were held before, {asleep} are held asleep"

    @claims("sleeps")
    def test_sleep_keeps_the_version_and_the_weights(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        """The same seeds give the same samples; under determinism, every action is the same."""
        # A generator without fingerprints gets empty ones: another test checks that claim.
        hashes: Callable[[], Any] = getattr(generator, "fingerprint", None) or dict
        before = self.run(generator, requests)
        version = generator.version
        hashes_before = hashes()
        for _ in range(2):
            generator.sleep()
            assert generator.version == version
            generator.wake()
            assert (generator.version, hashes()) == (version, hashes_before)
            after = self.run(generator, requests)
            assert self._same(before, after)
        if self.claimed().determinism:
            for key in before:
                assert (
                    before[key].columns["action_ids"].tobytes()
                    == after[key].columns["action_ids"].tobytes()
                ), key

    @claims("sleeps")
    def test_who_sleeps_does_not_sample(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        generator.submit(requests)
        ended = generator.step()
        generator.sleep()
        with pytest.raises(GcoreError, match="(?i)sleep"):
            generator.step()
        generator.sleep()  # again: nothing
        generator.wake()
        generator.wake()
        self.drain(generator, requests, ended)
