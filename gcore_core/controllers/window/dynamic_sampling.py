"""Decides how many groups a step issues, and which of them it takes (dynamic sampling).

A ``Quota`` keeps counts from step to step. It has no clock and does no I/O: what it says follows
from what it was told.

A step takes the lowest ordinals whose groups teach, up to the number that it needs, and everything
before the last of them: never the first to finish. What was issued beyond is surplus: the next step
leases its ordinals again. Where surplus is drawn anew, what is consumed does not depend on timing,
on the number of shards, or on how much was issued. Where it is carried it does, since a step then
takes records that older weights drew.

All shards issue the same number: they compute it from the same sums and ask nobody. Only where a
step ends is asked of the lead, since that takes the ordinals of all shards that teach: see ``end``
and ``Window._close``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.keep_rate import KeepRate


@dataclass
class Totals:
    """Counts the groups of the current step, summed over all shards.

    issued: groups leased, in all rounds of the step.
    kept: of the complete groups, those that the step may train on.
    unusable: of the complete groups, those that have failed.
    complete: groups that are drawn, scored and settled.
    """

    issued: int = 0
    kept: int = 0
    unusable: int = 0
    complete: int = 0

    @property
    def in_flight(self) -> int:
        """The number of groups that are issued and not complete."""
        return self.issued - self.complete


@dataclass(frozen=True)
class Leftover:
    """Counts groups that the previous step issued but did not use, summed over all shards.

    surplus: how many.
    carried: of the surplus, those that are kept for this step with their records.
    teach: of the carried, those that passed the filter.
    """

    surplus: int = 0
    carried: int = 0
    teach: int = 0


@dataclass
class Quota:
    """Counts the groups of a step: how many it issues, and at which ordinal it ends.

    It is the same on every shard. It only counts: the ledger holds the groups and ends their
    leases (``Ledger.close``), and the window calls both in order (``Window._close``). Here ``end``
    computes the ordinal for that, and ``close`` notes what the step leaves for the next one.

    needed: groups that a step trains on.
    limit: groups that a step issues at most.
    exact: whether only groups are issued that are surely needed, as in a run that is to repeat.
    carries: whether the surplus is kept for the next step.
    belief: the belief about the keep rate, from the steps before.
    totals: the groups of the current step.
    rounds: how often the current step has issued.
    """

    needed: int
    limit: int
    exact: bool
    carries: bool
    belief: KeepRate = field(default_factory=KeepRate)
    totals: Totals = field(default_factory=Totals)
    rounds: int = 0
    _drops: bool = False  # whether the run has ever dropped a group
    _leftover: Leftover = field(default_factory=Leftover)  # of the step before

    @classmethod
    def of(cls, config: SyncConfig, exact: bool, stale: bool) -> Quota:
        """Makes the quota of a run.

        exact: see the class.
        stale: whether the trainer takes records that older weights drew.
        """
        carries = config.surplus == "keep" or (config.surplus == "auto" and stale)
        return cls(config.prompts, config.max_rounds * config.prompts, exact, carries and not exact)

    def begin(self) -> None:
        """Begins a step: nothing is issued yet."""
        self.totals = Totals()
        self.rounds = 0

    def issue(self) -> int:
        """Decides how many groups to issue now, and counts them as issued.

        The first round issues all of the last step's surplus, and what is missing beyond that. It
        issues all of the surplus even where less is missing: ordinals are leased without gaps, and
        the surplus has the lowest. Of the surplus

            carried, teaching      count as kept: that many less must be drawn
            carried, not teaching  count for nothing, and cost nothing
            the others             are drawn anew, so they count as that many of the missing ones
        """
        leftover = self._leftover if self.rounds == 0 else Leftover()
        missing = self._missing(self.needed - leftover.teach)
        drawn_anew = leftover.surplus - leftover.carried
        to_issue = leftover.surplus + max(missing - drawn_anew, 0)
        count = min(to_issue, self.limit - self.totals.issued)
        self.totals.issued += count
        self.rounds += bool(count)
        return count

    def _missing(self, due: int) -> int:
        """Returns how many groups to draw so that ``due`` are kept.

        Until the run has dropped a first group, it counts on every group being kept.
        """
        totals = self.totals
        lacking = due - totals.kept
        if lacking <= 0 or (self.exact and totals.in_flight):
            return 0
        if self.exact or not self._drops:
            return lacking - totals.in_flight
        likely = self.belief.missing(
            needed=due, kept=totals.kept, finished=totals.complete, in_flight=totals.in_flight
        )
        # A step with nothing in flight must go on, whatever the belief says.
        return max(likely, 0 if totals.in_flight else lacking)

    def settled(self, kept: int, unusable: int, complete: int) -> None:
        """Adds the groups that all shards have settled since the last call."""
        self.totals.kept += kept
        self.totals.unusable += unusable
        self.totals.complete += complete
        self._drops |= self.totals.kept < self.totals.complete

    @property
    def over(self) -> bool:
        """Whether all issued groups are complete, and are enough or reach ``limit``."""
        totals = self.totals
        return not totals.in_flight and (totals.kept >= self.needed or totals.issued >= self.limit)

    def end(self, teaching: Iterable[int], next_ordinal: int) -> int:
        """Computes where the step ends: the ordinal behind the last one that it takes.

        teaching: ordinals, of all shards, of the groups that teach.
        next_ordinal: the one behind the last that was issued; the end where too few groups teach.
        """
        teach = sorted(teaching)
        return teach[self.needed - 1] + 1 if len(teach) >= self.needed else next_ordinal

    @property
    def learns(self) -> bool:
        """Whether ``learn`` is to be called when the step has ended."""
        return self._drops and not self.exact

    def learn(self, kept: Sequence[int], finished: Sequence[int]) -> None:
        """Learns the keep rate from the groups of the step that is over, summed over shards.

        kept: of the finished groups of each quarter of the step, how many were kept.
        finished: groups of each quarter, in the order in which they finished.
        """
        self.belief = self.belief.after(kept, finished)

    def close(self, leftover: Leftover) -> None:
        """Notes what the step that has ended leaves for the next one."""
        self._leftover = leftover

    @property
    def holds(self) -> bool:
        """Whether records of the last step are still needed in the next one."""
        return self._leftover.carried > 0

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, as plain values."""
        belief = {"rates": list(self.belief.rates), "change2": float(self.belief.change2)}
        return {"drops": self._drops, **belief, "left": list(astuple(self._leftover))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with a ``state`` of an earlier run; does nothing with an empty one."""
        if state:
            self._drops = state["drops"]
            self.belief = replace(
                self.belief, rates=tuple(state["rates"]), change2=state["change2"]
            )
            self._leftover = Leftover(*state.get("left", ())) if self.carries else Leftover()
