"""Defines what watches whether generators compute what the trainer computes.

A sentinel compares the log-probs that came with the records of a step with those that the trainer
computes for the same actions under the weights that sampled them. It has two halves, which are two
objects of one class, made by the same factory:

    on each rank        measure   the numbers of each record; they are summed over a group
                        diagnose  what the records of the step say of the cause, after an alarm
    in each controller  weigh     the evidence of each group, which adds up over groups
    in the lead         judge     the evidence of a step -> alarms; state and restore keep what it
                                  knows in checkpoints

What becomes of an alarm, a step check says (``gcore_core.contract.step_check``).

Log-probs never leave the rank. A group may lie on several ranks, so a rank sends its sums of every
group to the controller that owns it; controllers send the lead one row of evidence for each replica
and version. Sums of numbers that are exact in float64 are the same in any order. That is why the
verdict does not depend on how records were dealt to ranks and shards, if ``measure`` counts and
``weigh`` rounds to a fixed grid (``on_grid``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

#: (replica, version): who sampled some records, and under which weights.
Source = tuple[int, int]
#: Factory of the kernel's sentinel ``core/band``, which every interpreter of a run has.
BAND = "gcore_core.builtin.band:Band"
#: Evidence is a multiple of this, so that its sums are exact up to 2 ** 20.
GRID = 2.0**-32


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Names a generator and a trainer whose log-probs are compared.

    generator, trainer: the plugins that provide them.
    generator_precision, trainer_precision: dtype of their arithmetic, such as "bfloat16"; "" where
        their config does not say (``StatesPrecision``).
    """

    generator: str = ""
    generator_precision: str = ""
    trainer: str = ""
    trainer_precision: str = ""


@dataclass(frozen=True, kw_only=True)
class SentinelContext:
    """Tells a sentinel what it watches, when its factory is called.

    pair: whose log-probs are compared.
    band: by how many nats the log-prob of one action may be off.
    model: the policy's ``model:`` mapping, ``path`` already resolved.
    replicas: how many the generator has.
    directory: the run's.
    rank: the trainer rank that this half is on; -1 in a controller.
    """

    pair: Pair = field(default_factory=Pair)
    band: float = 1e-3
    model: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    directory: str = "."
    rank: int = -1


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Holds a record whose log-probs both sides have computed under the same weights.

    ordinal, sample: name it; records with one ordinal are a group.
    step: the one that trains on it.
    replica, version: who sampled it, and under which weights.
    rollout_logp: float32[A], as they came with the record, in nats.
    trainer_logp: float32[A], the trainer's own.
    mask: bool[A], false at actions that are not trained on; nothing may be read there.
    entropy: float32[A], of the trainer's distribution at each action, in nats; None where it was
        not computed.
    prompt_ids, action_ids: int32[P], int32[A]; None where actions are not tokens.
    temperature: by which the record says that logits were divided.
    """

    ordinal: int
    sample: int
    step: int
    replica: int
    version: int
    rollout_logp: np.ndarray
    trainer_logp: np.ndarray
    mask: np.ndarray
    entropy: np.ndarray | None = None
    prompt_ids: np.ndarray | None = None
    action_ids: np.ndarray | None = None
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Says how well one cause explains the records that a rank holds.

    cause: a word for it, the same on all ranks.
    score: between 0 and 1, or 2 where bytes leave no doubt; ranks' scores are averaged by weight.
    weight: how much this rank's score counts.
    text: one sentence for a person.
    """

    cause: str
    score: float
    weight: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Says that a generator does not compute what the trainer computes.

    replica: which one; -1: all of them together show it, none of them alone.
    since_step: the step with which the disagreement probably began.
    actions: how many actions were compared since then.
    text: what was seen, one sentence for a person.
    cause: a word for the cause, where what was seen leaves no doubt; "": it is looked for.
    """

    replica: int
    since_step: int
    actions: int
    text: str
    cause: str = ""


class Sentinel(Protocol):
    """Watches log-probs; see the module. Factory: ``(config, context: SentinelContext)``."""

    def measure(self, records: Sequence[Compared]) -> np.ndarray:
        """Returns the numbers of each record, float64[records, K]; K never changes.

        They are summed over the records of a group. Pure.
        """

    def diagnose(self, records: Sequence[Compared]) -> list[Finding]:
        """Returns how well each cause that it knows explains the records. Pure.

        It is called on every rank after an alarm, with the step's records of the replicas that the
        alarms name.
        """

    def weigh(self, sums: np.ndarray) -> np.ndarray:
        """Returns the evidence of each group, float64[groups, N], multiples of ``GRID``. Pure.

        sums: float64[groups, K], what ``measure`` gave, summed over a group's records of one
            replica and version.
        """

    def judge(self, step: int, evidence: Mapping[Source, np.ndarray]) -> list[Alarm]:
        """Takes the evidence of a step and returns alarms; the run ends when there is one.

        evidence: for each replica and version, float64[N] summed over all groups of the step.
        """

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the step that was judged last; names begin with "sentinel/"."""

    def notes(self) -> list[str]:
        """Returns what a person should know when the run starts, such as what is not watched."""

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run needs to judge alike; plain values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state`` returned, in a run that may have other replicas."""


def on_grid(values: np.ndarray) -> np.ndarray:
    """Rounds evidence down to multiples of ``GRID``: rounded down, it claims nothing too much.

    values: float64[...].
    """
    return np.floor(np.asarray(values, np.float64) / GRID) * GRID
