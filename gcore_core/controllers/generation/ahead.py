"""Begins groups for steps ahead of the one that is trained, and lets none of them get too old.

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

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.generation.schedule import Bounds, Membership, Schedule
from gcore_core.runtime.worker_settings import JobFacts


@dataclass(kw_only=True)
class Ahead(Schedule):
    """Begins groups without a break, each under the newest weights."""

    runs_on: ClassVar[bool] = True
    tick_s: ClassVar[float] = 0.05

    _above: set[int] = field(default_factory=set)  # consumed ordinals above ``base``
    _again: list[int] = field(default_factory=list)  # to be begun again, sorted

    @classmethod
    def of(cls, config: SyncConfig, facts: JobFacts, *, ahead: int, age: int) -> Self:
        """Makes the schedule of a run.

        ahead, age: see the module.
        """
        bounds = Bounds.of(config, facts, ahead, age)
        return cls(bounds=bounds, step=facts.start_step, base=facts.next_ordinal)

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
        return self._begin(self._next(count))

    def _next(self, count: int) -> list[int]:
        """Returns the lowest ordinals that are not begun: first those that are begun again."""
        again = self._again[:count]
        self._again = self._again[count:]
        new = range(self.front, self.front + count - len(again))
        self.front = new.stop
        return [*again, *new]

    def take_if_ready(self) -> Membership | None:
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
        membership = self._end_step(trained, sorted([*chosen, *passed]))
        self._above.update(membership.consumed)
        while self.base in self._above:
            self._above.remove(self.base)
            self.base += 1
        return membership

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
        """Returns the ordinals that a wanted step takes if everything comes in order."""
        return self._alive()[: self.bounds.prompts] if self.wanted >= self.step else []

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, as plain values."""
        window = {
            "front": self.front,
            "above": sorted(self._above),
            "begun": sorted(self._begun.items()),
            "bounds": [self.bounds.prompts, self.bounds.ahead, self.bounds.age],
        }
        return {"quota": {}, "window": window | self._learned()}

    def restore(self, state: Mapping[str, Any], carried: Set[int]) -> list[int]:
        """Goes on with what the controllers of an earlier run saved.

        Groups that were begun and are not carried are begun again, before all others. The others
        keep the version that began them, and so their deadline. With other bounds than before these
        deadlines might clash, so all are begun again.
        """
        window = state.get("window", {})
        self._above = set(window.get("above", []))
        self.front = window.get("front", self.front)
        begun = dict(window.get("begun", []))
        bounds = [self.bounds.prompts, self.bounds.ahead, self.bounds.age]
        is_same = window.get("bounds") == bounds
        taken_over = sorted(begun.keys() & carried) if is_same else []
        self._carried_in = set(taken_over)
        self._begun = {ordinal: begun[ordinal] for ordinal in taken_over}
        self._again = sorted(begun.keys() - self._begun.keys())
        self._restore_learned(window)
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
