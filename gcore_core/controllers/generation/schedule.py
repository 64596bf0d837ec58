"""Decides which groups are begun when, and which of them a step takes.

A ``Schedule`` keeps which groups are begun and complete. It has no clock and does no I/O: what it
says follows from what it was told, and all shards are told the same. So they decide alike and ask
nobody. The two schedules:

    InStep  begins groups for the step that is waited for
    Ahead   begins groups for later steps too
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
import numpy as np

from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.keep_rate import QUARTERS, KeepRate, by_quarter
from gcore_core.runtime.worker_settings import JobFacts


class GroupReport(msgspec.Struct, array_like=True, frozen=True):
    """Says of a group that it is complete.

    ordinal: of the group.
    teaches: whether a step may train on it.
    unusable: whether it failed.
    first: the oldest version of the weights that began one of its records.
    mean_first: the mean of these versions over its records.
    spanning: share of its records that more than one version sampled.
    whole: whether none of its records failed.
    """

    ordinal: int
    teaches: bool
    unusable: bool
    first: int
    mean_first: float
    spanning: float
    whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Says which groups a step takes, of all shards.

    step: whose groups these are.
    issued: groups that were begun for it.
    rounds: in how many rounds.
    first_ordinal: how many ordinals of the run were consumed before.
    trained: the groups that it trains on, by ordinal.
    consumed: ordinals of these groups and of all that it passes over for good, sorted.
    surplus: ordinals of complete groups that a later step begins again, sorted.
    carried: the part of the surplus that keeps its records; the rest is redrawn.
    """

    step: int
    issued: int
    rounds: int
    first_ordinal: int
    trained: list[GroupReport]
    consumed: list[int]
    surplus: Sequence[int]
    carried: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Holds the numbers that bound what is begun.

    prompts: groups that a step trains on.
    limit: groups that are begun at most for one step, beyond what is begun for the steps ahead.
    exact: a run that is to repeat: only groups are begun that are surely needed, and steps take
        them in order.
    steps: of the run; nothing is begun for later ones.
    shards: number of shards.
    ahead, age: see ``ahead``; where groups are begun for one step alone, both are 0.
    """

    prompts: int
    limit: int
    exact: bool
    steps: int
    shards: int = 1
    ahead: int = 0
    age: int = 0

    @classmethod
    def of(cls, config: SyncConfig, facts: JobFacts, ahead: int = 0, age: int = 0) -> Bounds:
        """Returns the bounds of a run."""
        return cls(
            prompts=config.prompts,
            limit=config.max_rounds * config.prompts,
            exact=facts.run.deterministic,
            steps=facts.run.steps,
            shards=facts.shards,
            ahead=ahead,
            age=age,
        )


@dataclass(kw_only=True)
class Schedule(ABC):
    """Keeps the groups between the first that no step has taken and the next that is begun.

    runs_on: whether groups are begun also while no step waits for any.
    tick_s: while a step waits, shards tell each other every so many seconds what has ended.

    step: the next one that takes groups.
    base: every ordinal below it is consumed.
    front: the next ordinal that is begun for the first time.
    version: of the weights under which groups are begun: those that every shard has seen published,
        or, under ``InStep``, those of the next step, which are published before one is begun.
    wanted: the step whose groups every shard wants.
    push_waits: a shard waits with its push until nothing is in flight.
    issued: groups begun since a step took some.
    rounds: in how many rounds these were begun.
    ended: groups that have become complete since then, of each shard in the order of that.
    belief: the belief about the keep rate, from the steps before.
    """

    runs_on: ClassVar[bool]
    tick_s: ClassVar[float]

    bounds: Bounds
    step: int
    base: int
    front: int = field(init=False)
    version: int = field(init=False)
    wanted: int = field(init=False)
    push_waits: bool = False
    issued: int = 0
    rounds: int = 0
    ended: list[GroupReport] = field(default_factory=list)
    belief: KeepRate = field(default_factory=KeepRate)
    # Ordinal -> version that began it.
    _begun: dict[int, int] = field(default_factory=dict)
    _told: dict[int, GroupReport] = field(default_factory=dict)
    _carried_in: set[int] = field(
        default_factory=set
    )  # groups that came complete: of an earlier step or run
    _drops: bool = False  # whether any group of the run has ever taught nothing

    def __post_init__(self) -> None:
        self.front = self.base
        self.version = self.step
        self.wanted = self.step - 1

    # -- what happens ------------------------------------------------------------------------------

    def look(
        self, version: int, wanted: int, told: Iterable[GroupReport], push_waits: bool = False
    ) -> None:
        """Takes what all shards say: the oldest of their versions and wishes, and ended groups.

        told: of each shard in the order in which they ended.
        push_waits: whether any shard waits with its push until nothing is in flight.
        """
        self.version = version
        self.wanted = wanted
        self.push_waits = push_waits
        ended = list(told)
        self._told |= {one.ordinal: one for one in ended}
        self.ended += ended
        self._drops = self._drops or not all(one.teaches for one in ended)

    @abstractmethod
    def issue(self) -> list[int]:
        """Decides which ordinals to begin now, and counts them as begun."""

    @abstractmethod
    def take_if_ready(self) -> Membership | None:
        """Takes the groups of ``step`` if they are there."""

    def _begin(self, ordinals: Iterable[int]) -> list[int]:
        begun = dict.fromkeys(ordinals, self.version)
        self._begun |= begun
        self.issued += len(begun)
        self.rounds += 1
        return list(begun)

    def _end_step(
        self,
        trained: list[GroupReport],
        consumed: list[int],
        surplus: Sequence[int] = (),
        carried: Sequence[int] = (),
    ) -> Membership:
        """Learns the keep rate, gives up these groups and goes on to the next step."""
        membership = Membership(
            step=self.step,
            issued=self.issued,
            rounds=self.rounds,
            first_ordinal=self.consumed,
            trained=trained,
            consumed=consumed,
            surplus=surplus,
            carried=carried,
        )
        if self._drops and not self.bounds.exact:
            self._learn()
        for ordinal in [*consumed, *surplus]:
            del self._begun[ordinal]
            del self._told[ordinal]
        self.ended = []
        self.step += 1
        self.issued = self.rounds = 0
        return membership

    def _learn(self) -> None:
        kept = np.zeros(QUARTERS, np.int64)
        finished = np.zeros(QUARTERS, np.int64)
        for flags in self._kept_flags().values():
            kept += by_quarter(np.array(flags, np.int64))
            finished += by_quarter(np.ones(len(flags)))
        self.belief = self.belief.after(kept.tolist(), finished.tolist())

    def _kept_flags(self) -> dict[int, list[bool]]:
        """Returns shard -> whether each of its ``ended`` groups teaches, without those that were
        carried in: they have counted before.
        """
        flags = defaultdict[int, list[bool]](list)
        for one in self.ended:
            if one.ordinal not in self._carried_in:
                flags[one.ordinal % self.bounds.shards].append(one.teaches)
        return flags

    # -- what is so --------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Groups that are begun and not complete."""
        return len(self._begun) - len(self._told)

    @property
    def begun(self) -> int:
        """Groups that are begun and not consumed."""
        return len(self._begun)

    @property
    @abstractmethod
    def consumed(self) -> int:
        """How many ordinals of the run are consumed."""

    @property
    @abstractmethod
    def oldest(self) -> int:
        """The oldest version that began a group which no step has taken; ``step`` without any."""

    def next_part(self) -> list[int]:
        """Returns ordinals; when all of them are complete, shards tell each other at once."""
        return []

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, as plain values."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any], carried: Set[int]) -> list[int]:
        """Goes on with what the controllers of an earlier run saved.

        carried: ordinals of the groups whose records the checkpoint holds.

        Returns the ones that the run goes on with, sorted; the others are redrawn.
        """

    # -- parts -------------------------------------------------------------------------------------

    def _missing(self, needed: int) -> int:
        """Returns how many groups to begin so that ``needed`` are kept.

        Until the run has dropped a first group, it counts on every group being kept.
        """
        kept = self._kept()
        in_flight = self.in_flight
        lacking = needed - kept
        if lacking <= 0 or (self.bounds.exact and in_flight):
            return 0
        if self.bounds.exact or not self._drops:
            return lacking - in_flight
        likely = self.belief.missing(
            needed=needed, kept=kept, finished=len(self._told), in_flight=in_flight
        )
        # With nothing in flight it must go on, whatever the belief says.
        return max(likely, 0 if in_flight else lacking)

    def _kept(self) -> int:
        return sum(one.teaches for one in self._told.values())

    def _learned(self) -> dict[str, Any]:
        rates = list(self.belief.rates)
        return {"drops": self._drops, "rates": rates, "change2": float(self.belief.change2)}

    def _restore_learned(self, state: Mapping[str, Any]) -> None:
        self._drops = state.get("drops", False)
        if "rates" in state:
            rates = tuple(state["rates"])
            self.belief = replace(self.belief, rates=rates, change2=state["change2"])
