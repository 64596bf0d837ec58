"""Dynamic sampling: how many groups a step issues, and which of them it takes. Pure.

A step takes the lowest ordinals whose groups teach, up to the number that it needs, and everything
before the last of them: never the first to finish. Whatever was issued beyond is as if it had not
been. So what is consumed does not depend on timing, on the number of shards, or on how much was
issued. Every shard computes the same from the same sums, so none has to ask another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.keep_rate import KeepRate


@dataclass
class Totals:
    """Groups of the current step, summed over all shards.

    issued: leased, in all rounds.
    complete: drawn, scored and settled.
    kept: of the complete ones, those that the step may train on.
    unusable: of the complete ones, those that have failed.
    """

    issued: int = 0
    kept: int = 0
    unusable: int = 0
    complete: int = 0

    @property
    def in_flight(self) -> int:
        return self.issued - self.complete


@dataclass(frozen=True)
class Left:
    """Groups that the previous step issued but did not use, summed over all shards.

    surplus: how many.
    carried: of the surplus, those that are kept for this step with their records.
    teach: of the carried, those that passed the filter.
    """

    surplus: int = 0
    carried: int = 0
    teach: int = 0


@dataclass
class Quota:
    """How many groups the steps issue, and where each ends; the same on every shard.

    needed: groups that a step trains on.
    limit: groups that a step issues at most.
    exact: nothing is issued that may not be needed, as in a run that is to repeat.
    carries: what is left over is kept for the next step.
    belief: about the keep rate, from the steps before.
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
    _drops: bool = False  # a group was dropped, ever
    _left: Left = field(default_factory=Left)

    @classmethod
    def of(cls, config: SyncConfig, exact: bool, stale: bool) -> Quota:
        carries = config.surplus == "keep" or (config.surplus == "auto" and stale)
        return cls(config.prompts, config.max_rounds * config.prompts, exact, carries and not exact)

    def begin(self) -> None:
        """A step begins."""
        self.totals = Totals()
        self.rounds = 0

    def issue(self) -> int:
        """How many groups to issue now; they count as issued.

        The first round leases all of the last step's surplus again, even where fewer are missing:
        ordinals are leased without gaps, and the surplus has the lowest. Carried groups cost
        nothing more. The others of the surplus are drawn anew, so they stand for that many of the
        missing ones.
        """
        left = self._left if self.rounds == 0 else Left()
        missing = self._missing(self.needed - left.teach)
        drawn_anew = left.surplus - left.carried
        wanted = left.surplus + max(missing - drawn_anew, 0)
        count = min(wanted, self.limit - self.totals.issued)
        self.totals.issued += count
        self.rounds += bool(count)
        return count

    def _missing(self, due: int) -> int:
        """Groups to draw so that ``due`` are kept. Until one was ever dropped, all are."""
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
        """Groups were settled since the last time, on all shards."""
        self.totals.kept += kept
        self.totals.unusable += unusable
        self.totals.complete += complete
        self._drops |= self.totals.kept < self.totals.complete

    @property
    def over(self) -> bool:
        """Everything issued is there, and it is enough or there may be no more."""
        done = self.totals
        return not done.in_flight and (done.kept >= self.needed or done.issued >= self.limit)

    def end(self, teaching: Iterable[int], next_ordinal: int) -> int:
        """The ordinal behind the last one that the step takes. teaching: ordinals of all shards
        whose groups teach. next_ordinal: the one behind the last that was issued.
        """
        teach = sorted(teaching)
        return teach[self.needed - 1] + 1 if len(teach) >= self.needed else next_ordinal

    @property
    def learns(self) -> bool:
        """Whether ``learn`` is to be told how the step's groups came out."""
        return self._drops and not self.exact

    def learn(self, kept: Sequence[int], finished: Sequence[int]) -> None:
        """Groups of each quarter of the step in the order they finished, summed over shards."""
        self.belief = self.belief.after(kept, finished)

    def close(self, left: Left) -> None:
        """The step has ended; what it leaves for the next one."""
        self._left = left

    @property
    def holds(self) -> bool:
        """Records of the last step are still needed in the next one."""
        return self._left.carried > 0

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with; plain values."""
        belief = {"rates": list(self.belief.rates), "change2": float(self.belief.change2)}
        return {"drops": self._drops, **belief, "left": list(astuple(self._left))}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self._drops = state["drops"]
            self.belief = replace(
                self.belief, rates=tuple(state["rates"]), change2=state["change2"]
            )
            self._left = Left(*state.get("left", ())) if self.carries else Left()
