"""A plugin of a local file whose backends say what they need in whole GiB; they never start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.memory import ASLEEP, PHASES, MemoryNeed, WorkerShape
from gcore_core.contract.traits import Traits

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class SizedConfig:
    """Settings of a backend, in GiB.

    weights: held in every phase, shared out over the slots.
    activations: at most, in a full step.
    kept: held while it sleeps; below 0: it does not say.
    fault: what its answer is, in place of needs.
    """

    weights: int = 8
    activations: int = 0
    kept: int = 0
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class SizedTrainerConfig(SizedConfig):
    def traits(self) -> Traits:
        return Traits(sharding=True, sleeps=True)


@dataclass(frozen=True, kw_only=True)
class SizedGeneratorConfig(SizedConfig):
    def traits(self) -> Traits:
        return Traits(abort=True, receives_weights=True, scores_logprobs=True, sleeps=True)


def needs(config: SizedConfig, worker: WorkerShape) -> Iterator[MemoryNeed]:
    if config.fault == "raises":
        raise KeyError("hidden")
    if config.fault == "phase":
        yield MemoryNeed(phase="lunch", what="weights", nbytes=1)
    if config.fault == "word":
        yield "much"  # type: ignore[misc]
    if config.fault == "unknown":
        yield MemoryNeed(phase="training", what="cache", nbytes=None, note="takes what is free")
    if config.fault == "pushes":
        yield MemoryNeed(phase="push", what="push buckets", nbytes=worker.push_bytes)
    if "make" in worker.model and "path" not in worker.model:
        yield MemoryNeed(phase="training", what="model", nbytes=None, note="it is made first")
    for phase in PHASES:
        share = config.weights * GIB // worker.slots
        more = f"slots={2 * worker.slots}"
        yield MemoryNeed(phase=phase, what="weights", nbytes=share, setting=more, note="rows")
    yield MemoryNeed(
        phase="training",
        what="activations",
        nbytes=config.activations * GIB,
        at_most=True,
        setting=f"config.activations={config.activations // 2}",
    )
    if config.kept >= 0:
        yield MemoryNeed(phase=ASLEEP, what="weights", nbytes=config.kept * GIB, on="host")


@hookimpl
def gcore_trainers() -> Iterable[p.TrainerProvider]:
    yield p.TrainerProvider(
        summary="sized",
        factory="gcore_testing.fake:FakeTrainer",
        config=SizedTrainerConfig,
        memory="tests.support.sized:needs",
    )


@hookimpl
def gcore_generators() -> Iterable[p.GeneratorProvider]:
    yield p.GeneratorProvider(
        summary="sized",
        factory="gcore_testing.fake:FakeGenerator",
        config=SizedGeneratorConfig,
        memory="tests.support.sized:needs",
    )
