"""Defines what looks at each step besides the step program, and may end the run.

A step check lives in the lead's controller. The step program calls it at three places of a step:

    before_update   after the step's records are prepared, before the trainer changes its weights,
                    and before a checkpoint is made
    updated         after the trainers' updates, with the evidence of the step's log-probs
    pushed          after generators and trainer have got the same weights

What it raises ends the run. The kernel has one that asks the job's sentinel and does no more. One
that a plugin brings (``SentinelProvider.check``) may also have workers score records again, and
ask them what they know of an alarm (``CheckedWorkers``). What it keeps is a part of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.sentinel import (
    Alarm,
    Compared,
    Finding,
    Sentinel,
    Source,
)

#: Evidence of a step: (replica, version) -> what ``Sentinel.weigh`` gave, summed over its groups.
Evidence = Mapping[Source, np.ndarray]


@dataclass(frozen=True)
class Held:
    """Says what a generator holds now, against what the last pushes brought.

    version: of its weights, as it says itself.
    pushed: version of the last push that it took; -1: it took none.
    known: whether its weights can be compared with what came: it can hash them, and they came as
        bytes.
    differ: names of tensors that are not what the last push brought.
    tensors: how many the push brought.
    older: of those that differ, how many are what an older push brought, of the last few the one
        with most of them.
    older_version: of that push; -1: there was none.
    """

    version: int
    pushed: int = -1
    known: bool = False
    differ: list[str] = field(default_factory=list)
    tensors: int = 0
    older: int = 0
    older_version: int = -1


class CheckedWorkers(Protocol):
    """Asks the workers of a run what a step check wants to know of them.

    generators: name of each replica, in order of their numbers.
    both_score: whether trainer and generators can score given actions (capability ``logprobs``).
    """

    generators: Sequence[str]
    both_score: bool

    async def scored_by_trainer(self, version: int, count: int) -> list[Compared]:
        """Returns some records of the last step with the log-probs that the trainer gives them.

        These log-probs stand on both sides. It is empty where the trainer holds another version.

        version: of the weights that the trainer holds.
        count: how many records, over all ranks.
        """

    async def scored_by_generators(
        self, version: int, records: Sequence[Compared]
    ) -> list[Compared]:
        """Returns each record with the log-probs of every generator that can give them.

        One that sleeps, is lost, fails, or holds another version gives none.
        """

    async def found_by_ranks(self, step: int, replicas: Sequence[int]) -> list[Finding]:
        """Returns what every trainer rank finds in its records of a step (``Sentinel.diagnose``).

        replicas: whose records; none: of all.
        """

    async def shown_by_ranks(self, step: int, replicas: Sequence[int]) -> list[Compared]:
        """Returns some of the records that ``found_by_ranks`` looks at."""

    async def found_by_generator(
        self, replica: int, records: Sequence[Compared]
    ) -> list[Finding] | None:
        """Returns why a generator's log-probs of these records are not the trainer's.

        It is None where the generator sleeps or is lost, and empty where it does not know.
        """

    async def held_by_generator(self, replica: int) -> Held | None:
        """Returns what a generator holds; None where it sleeps or is lost."""


@dataclass(frozen=True, kw_only=True)
class StepCheckContext:
    """Tells a step check what it looks at, when its factory is called.

    sentinel: the lead's own half, which judges.
    provider: of the sentinel, as ``use`` names it.
    workers: whom it may ask.
    saves: whether the run makes checkpoints.
    """

    sentinel: Sentinel
    provider: str
    workers: CheckedWorkers
    saves: bool


class StepCheck(Protocol):
    """Looks at each step; see the module. Factory: ``(config, context: StepCheckContext)``.

    A class that derives from it need only say what it does: the defaults do nothing.
    """

    async def before_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns a step's metrics, with metrics of what it still had to judge.

        It is called before each update, also of a step that is skipped, and before a checkpoint.

        metrics: of the step so far.
        """
        return dict(metrics)

    async def updated(self, step: int, evidence: Evidence) -> dict[str, float]:
        """Judges a step; returns metrics whose names begin with "sentinel/".

        evidence: empty where no record of the step could be compared.
        """

    async def pushed(self, version: int) -> None:
        """Is told that generators and trainer hold the same version.

        What it begins here may go on while the program does, until ``before_update`` or ``end``.
        """

    def notes(self) -> list[str]:
        """Returns what a person should know when the run starts."""
        return []

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run needs to check alike; plain values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state`` returned."""

    def end(self) -> None:
        """Waits for nothing any more, as the run ends."""


def mismatch(
    step: int,
    alarms: Sequence[Alarm],
    evidence: Evidence,
    generators: Sequence[str],
    *,
    saves: bool,
    cause: tuple[str, str] = ("", ""),
    compared: str = "records of this step are of version",
) -> WeightMismatch:
    """Makes the error that ends a run after an alarm.

    evidence: what the alarms are about.
    generators: names of the replicas.
    saves: whether the run makes checkpoints.
    cause: a word and a sentence; "" where it is not known.
    compared: says, before the versions, what was compared.
    """
    first = alarms[0]
    replicas = blamed(alarms)
    names = ", ".join(generators[replica] for replica in replicas) or "the generators together"
    versions = sorted({v for replica, v in evidence if not replicas or replica in replicas})
    which = ", ".join(map(str, versions))
    saved = (
        "the run can be resumed from a checkpoint; g-core checkpoint lists them, those after "
        f"step {first.since_step} were trained on such records"
    )
    unsaved = "nothing is saved: set checkpoint.every, so that such a run can be resumed"
    return WeightMismatch(
        f"{names} and the trainer disagree about log-probs since step {first.since_step}",
        where=f"step {step}",
        why=f"{first.text}; {compared} {which}\n{cause[1]}",
        todo=saved if saves else unsaved,
        replicas=[alarm.replica for alarm in alarms],
        since_step=first.since_step,
        versions=versions,
        cause=cause[0],
    )


def blamed(alarms: Sequence[Alarm]) -> list[int]:
    """Returns the replicas that alarms name; none where all show it together."""
    return sorted({alarm.replica for alarm in alarms if alarm.replica >= 0})
