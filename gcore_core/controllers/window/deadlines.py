"""Decides which groups are begun when, and which of them a step takes, so that none gets too old.

``Deadlines`` keeps which groups are begun and complete. It has no clock and does no I/O: what it
says follows from what it was told, and all shards are told the same.

Two numbers bound how far generation runs before training:

    ahead  steps whose groups may be begun before the step that is trained now is over
    age    the most versions between the weights that began a record and the step that trains on it

A group that was begun under version v is *due* at step v + age. A step takes as many groups as it
needs, and never are more than that due at one step: groups are only begun while

    groups that were begun and not taken  <=  needed by the steps up to v + age

where groups that are known to teach nothing do not count.

So a step that takes the groups that are due, before all others, never has more of them than it
needs. Nothing has to be thrown away for its age, and no age exceeds the bound, whatever takes how
long. Versions that records report are not needed for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from gcore_core.controllers.keep_rate import KeepRate, by_quarter


class Told(msgspec.Struct, array_like=True, frozen=True):
    """Says of a group that it is complete.

    ordinal: of the group.
    teaches: whether a step may train on it.
    unusable: whether it failed.
    first: the oldest version of the weights that began one of its records.
    mean_first: the mean of these versions over its records.
    spanning: share of its records that more than one version sampled.
    """

    ordinal: int
    teaches: bool
    unusable: bool
    first: int
    mean_first: float
    spanning: float


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Says which groups a step takes, of all shards.

    trained: the groups that it trains on, by ordinal.
    consumed: their ordinals and those of the groups that it passes over for good, sorted.
    """

    trained: list[Told]
    consumed: list[int]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Holds the numbers that bound a window.

    prompts: groups that a step trains on.
    ahead, age: see the module.
    limit: groups that are begun at most for one step, beyond those of the steps ahead.
    exact: a run that is to repeat: only groups are begun that are surely needed, and steps take
        them in order.
    steps: of the run; nothing is begun for later ones.
    """

    prompts: int
    ahead: int
    age: int
    limit: int
    exact: bool
    steps: int


@dataclass
class Deadlines:
    """Keeps the groups between the first that no step has taken and the next that is begun.

    step: the next one that takes groups.
    base: every ordinal below it is consumed.
    front: the next ordinal that is begun for the first time.
    version: of the weights that every shard has seen published.
    wanted: the step whose groups every shard wants.
    push_waits: a shard waits with its push until nothing is in flight; see ``issue``.
    issued: groups begun since a step took some.
    rounds: in how many rounds these were begun.
    complete: groups that have become complete since then.
    unusable: of the ``complete``, those that have failed.
    belief: the belief about the keep rate, from the steps before.
    """

    bounds: Bounds
    step: int
    base: int
    front: int
    version: int
    wanted: int
    push_waits: bool = False
    issued: int = 0
    rounds: int = 0
    unusable: int = 0
    complete: int = 0
    belief: KeepRate = field(default_factory=KeepRate)
    _begun: dict[int, int] = field(default_factory=dict)  # ordinal -> version that began it
    _told: dict[int, Told] = field(default_factory=dict)
    _above: set[int] = field(default_factory=set)  # consumed ordinals above ``base``
    _again: list[int] = field(default_factory=list)  # to be begun again, sorted
    # Of the groups that became complete since a step took some, in that order: which teach.
    _kept_flags: list[bool] = field(default_factory=list)
    _counted: set[int] = field(default_factory=set)  # complete before the run was resumed
    _drops: bool = False  # whether any group of the run has ever taught nothing

    # -- what happens ------------------------------------------------------------------------------

    def look(
        self, version: int, wanted: int, told: Iterable[Told], push_waits: bool = False
    ) -> None:
        """Takes what all shards say: the oldest of their versions and wishes, and ended groups.

        push_waits: whether any shard waits with its push until nothing is in flight.
        """
        self.version = version
        self.wanted = wanted
        self.push_waits = push_waits
        for one in told:
            self._told[one.ordinal] = one
            if one.ordinal in self._counted:
                continue
            self._kept_flags.append(one.teaches)
            self.complete += 1
            self.unusable += one.unusable
            self._drops |= not one.teaches

    def issue(self) -> list[int]:
        """Decides which ordinals to begin now, and counts them as begun.

        While a push waits, nothing is begun. What replaces a group that teaches nothing is begun
        behind the push, with the groups of the next step: engines then have more to do at once, and
        its deadline is a step later. An ``exact`` run begins it at once, since the clock may decide
        nothing there.
        """
        if self.push_waits and not self.bounds.exact:
            return []
        horizon = min(self.version, self.wanted) + self.bounds.ahead + 1
        needed = self.bounds.prompts * (min(horizon, self.bounds.steps) - self.step)
        most = self.bounds.prompts * (self.version + self.bounds.age + 1 - self.step)
        count = min(
            self._missing(needed),
            self._most_issued - self.issued,
            most - len(self._alive()),
        )
        if count <= 0:
            return []
        ordinals = self._next(count)
        self._begun |= dict.fromkeys(ordinals, self.version)
        self.issued += count
        self.rounds += 1
        return ordinals

    def _next(self, count: int) -> list[int]:
        """Returns the lowest ordinals that are not begun: first those that are begun again."""
        again = self._again[:count]
        self._again = self._again[count:]
        new = range(self.front, self.front + count - len(again))
        self.front = new.stop
        return [*again, *new]

    def take(self) -> Membership | None:
        """Takes the groups of ``step`` if all shards want them and they are there.

        First come the groups that must go now, so that those behind them are in time; then the
        lowest ordinals that are complete. With less than a step needs it goes on only when nothing
        more may be begun for it.
        """
        if self.wanted < self.step:
            return None
        prompts = self.bounds.prompts
        alive = self._alive()
        must = alive[:prompts] if self.bounds.exact else alive[: self.due]
        if any(ordinal not in self._told for ordinal in must):
            return None
        others = sorted(ordinal for ordinal in alive if ordinal in self._told)
        chosen = list(dict.fromkeys([*must, *others]))[:prompts]
        is_short = len(chosen) < prompts
        if is_short and (self.in_flight or self.issued < self._most_issued):
            return None
        return self._consume(sorted(chosen), is_short)

    def _consume(self, chosen: Sequence[int], all_of_them: bool) -> Membership:
        """Consumes the chosen ordinals, and those that teach nothing and lie before the last.

        all_of_them: whether those behind the last go too.
        """
        end = self.front if all_of_them else chosen[-1]
        passed = [o for o, one in self._told.items() if not one.teaches and o < end]
        trained = [self._told[ordinal] for ordinal in chosen]
        consumed = sorted([*chosen, *passed])
        if self._drops and not self.bounds.exact and self._kept_flags:
            flags = np.array(self._kept_flags, np.int64)
            self.belief = self.belief.after(by_quarter(flags), by_quarter(np.ones(len(flags))))
        for ordinal in consumed:
            del self._begun[ordinal]
            del self._told[ordinal]
        self._above.update(consumed)
        while self.base in self._above:
            self._above.remove(self.base)
            self.base += 1
        self._kept_flags = []
        self.step += 1
        self.issued = self.rounds = self.unusable = self.complete = 0
        return Membership(trained=trained, consumed=consumed)

    # -- what is so --------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Groups that are begun and not complete."""
        return len(self._begun) - len(self._told)

    @property
    def finished(self) -> int:
        """Groups that are complete and not consumed."""
        return len(self._told)

    @property
    def consumed(self) -> int:
        """How many ordinals of the run are consumed."""
        return self.base + len(self._above)

    @property
    def oldest(self) -> int:
        """The oldest version that began a group which no step has taken; ``step`` without any."""
        return min(self._begun.values(), default=self.step)

    @property
    def due(self) -> int:
        """How many groups ``step`` must take, so that each group behind them can be in time.

        By the step v + age, all groups that were begun under version v or an older one are taken.
        What of them the steps after this one cannot take, this one must.
        """
        due = 0
        versions = sorted(self._begun[ordinal] for ordinal in self._alive())
        for count, version in enumerate(versions, start=1):
            later_steps = version + self.bounds.age - self.step
            due = max(due, count - self.bounds.prompts * later_steps)
        return due

    def next_part(self) -> list[int]:
        """Returns the ordinals that ``step`` takes if everything comes in order."""
        return self._alive()[: self.bounds.prompts]

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, as plain values."""
        return {
            "front": self.front,
            "above": sorted(self._above),
            "begun": sorted(self._begun.items()),
            "bounds": [self.bounds.prompts, self.bounds.ahead, self.bounds.age],
            "drops": self._drops,
            "rates": list(self.belief.rates),
            "change2": float(self.belief.change2),
        }

    def restore(self, state: Mapping[str, Any], carried: Set[int]) -> list[int]:
        """Goes on with a ``state`` of an earlier run.

        Groups that were begun and are not carried are begun again, before all others. The others
        keep the version that began them, and so their deadline.

        carried: ordinals of the groups whose records a checkpoint holds.

        Returns those of them that the window takes over: all where the bounds are as before. With
        others their deadlines might clash, so all are begun again.
        """
        above = state.get("above", [])
        self._above = set(above)
        self.front = state.get("front", self.front)
        begun = dict(state.get("begun", []))
        bounds = [self.bounds.prompts, self.bounds.ahead, self.bounds.age]
        is_same = state.get("bounds") == bounds
        taken_over = sorted(begun.keys() & carried) if is_same else []
        self._counted = set(taken_over)
        self._begun = {ordinal: begun[ordinal] for ordinal in taken_over}
        self._again = sorted(begun.keys() - self._begun.keys())
        self._drops = state.get("drops", False)
        if "rates" in state:
            rates = tuple(state["rates"])
            self.belief = replace(self.belief, rates=rates, change2=state["change2"])
        return taken_over

    # -- parts -------------------------------------------------------------------------------------

    @property
    def _most_issued(self) -> int:
        """The most groups that are begun from when a step takes its groups until the next does."""
        return self.bounds.limit + self.bounds.ahead * self.bounds.prompts

    def _alive(self) -> list[int]:
        """Returns ordinals of groups that teach or may still teach.

        They are ordered by the version that began them, then by ordinal; in an ``exact`` run by
        ordinal alone.
        """
        alive = [o for o in self._begun if o not in self._told or self._told[o].teaches]
        if self.bounds.exact:
            return sorted(alive)
        return sorted(alive, key=lambda ordinal: (self._begun[ordinal], ordinal))

    def _missing(self, needed: int) -> int:
        """Returns how many groups to begin so that ``needed`` are kept, as in a synchronous run."""
        kept = sum(one.teaches for one in self._told.values())
        in_flight = self.in_flight
        lacking = needed - kept
        if lacking <= 0 or (self.bounds.exact and in_flight):
            return 0
        if self.bounds.exact or not self._drops:
            return lacking - in_flight
        likely = self.belief.missing(
            needed=needed, kept=kept, finished=len(self._told), in_flight=in_flight
        )
        return max(likely, 0 if in_flight else lacking)
