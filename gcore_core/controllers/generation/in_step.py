"""Begins groups for the step that is waited for, and for no other (dynamic sampling).

A step takes the lowest ordinals whose groups teach, up to the number that it needs, and everything
before the last of them: never the first to finish. All that was issued is complete before. What was
issued beyond is surplus: the next step issues its ordinals again. Where surplus is redrawn,
what is consumed does not depend on timing, on the number of shards, or on how much was issued.
Where it is carried it does, since a step then takes records that older weights drew.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import astuple, dataclass, field
from typing import Any, ClassVar

from gcore_core.contract.errors import ConfigError
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.generation.schedule import Bounds, Membership, Schedule
from gcore_core.runtime.worker_settings import JobFacts


@dataclass(frozen=True)
class Leftover:
    """Counts groups that the previous step issued but did not use, of all shards.

    surplus: how many.
    carried: of the surplus, those that are kept for this step with their records.
    teach: of the carried, those that passed the filter.
    """

    surplus: int = 0
    carried: int = 0
    teach: int = 0


@dataclass(kw_only=True)
class InStep(Schedule):
    """Issues the groups of one step, takes them in order, and goes on to the next.

    carries: whether the surplus is kept for the next step.
    """

    runs_on: ClassVar[bool] = False
    tick_s: ClassVar[float] = 1.0

    carries: bool
    _leftover: Leftover = field(default_factory=Leftover)  # of the step before

    @classmethod
    def of(cls, config: SyncConfig, facts: JobFacts) -> InStep:
        """Makes the schedule of a run."""
        carries = config.surplus == "keep" or (config.surplus == "auto" and facts.takes_stale)
        return cls(
            bounds=Bounds.of(config, facts),
            step=facts.start_step,
            base=facts.next_ordinal,
            carries=carries and not facts.run.deterministic,
        )

    def issue(self) -> list[int]:
        """Decides which ordinals to issue now.

        The first round issues all of the last step's surplus, and what is missing beyond that. It
        issues all of the surplus even where less is missing: ordinals are issued without gaps, and
        the surplus has the lowest. Of the surplus

            carried, teaching      count as kept: that many less must be drawn
            carried, not teaching  count for nothing, and cost nothing
            the others             are redrawn, so they count as that many of the missing ones
        """
        leftover = self._leftover if self.rounds == 0 else Leftover()
        missing = self._missing(self.bounds.prompts - leftover.teach)
        redrawn = leftover.surplus - leftover.carried
        to_issue = leftover.surplus + max(missing - redrawn, 0)
        count = min(to_issue, self.bounds.limit - self.issued)
        if count <= 0:
            return []
        begin = self.front
        self.front += count
        return self._begin(range(begin, self.front))

    def take_if_ready(self) -> Membership | None:
        """Takes the step's groups if all that was issued is complete, and is enough or the limit.

        The step ends behind the last group that it needs.
        """
        is_enough = self._kept() >= self.bounds.prompts or self.issued >= self.bounds.limit
        if self.in_flight or not is_enough:
            return None
        # What the step trains on: the lowest ordinals that teach, as many as it needs.
        teach = sorted(ordinal for ordinal, one in self._told.items() if one.teaches)
        needed = self.bounds.prompts
        end = teach[needed - 1] + 1 if len(teach) >= needed else self.front
        trained = [self._told[ordinal] for ordinal in teach if ordinal < end]
        # What it leaves for the next step, with its records or without.
        surplus = range(end, self.front)
        carried = [ordinal for ordinal in surplus if self._is_carried(ordinal)]
        teach_later = sum(self._told[ordinal].teaches for ordinal in carried)
        self._leftover = Leftover()
        if self.carries:
            self._leftover = Leftover(len(surplus), len(carried), teach_later)
        membership = self._end_step(trained, list(range(self.base, end)), surplus, carried)
        self._carried_in = set(carried)
        self.base = self.front = end
        self.version = self.step
        return membership

    def _is_carried(self, ordinal: int) -> bool:
        """Whether a surplus group keeps its records; one that was carried before does not."""
        one = self._told[ordinal]
        return self.carries and one.whole and not one.unusable and ordinal not in self._carried_in

    @property
    def consumed(self) -> int:
        """How many ordinals of the run are consumed."""
        return self.base

    @property
    def oldest(self) -> int:
        """The version of the step before, where records of it are carried; else ``step``."""
        return self.step - 1 if self._carried_in else self.step

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, as plain values."""
        return {"quota": {**self._learned(), "left": list(astuple(self._leftover))}}

    def restore(self, state: Mapping[str, Any], carried: Set[int]) -> list[int]:
        """Goes on with what the controllers of an earlier run saved.

        Raises ConfigError where the steps of that run have taken groups out of order.
        """
        if above := state.get("window", {}).get("above"):
            base = state["ledger"]["next_ordinal"]
            raise ConfigError(
                "a schedule that takes groups in order cannot go on from this checkpoint: its "
                "steps took groups out of order.",
                where="controller.use",
                why=f"ordinal {base} is not consumed, and {above[0]} is: it would be trained on "
                "again",
                todo="resume it with the program that saved it (controller.use); with ahead: 0 and "
                "age: 0 some steps of it take what is left, and another program can go on",
            )
        saved = state.get("quota", {})
        self._restore_learned(saved)
        if not self.carries:
            return []
        self._leftover = Leftover(*saved.get("left", ()))
        # A program that runs ahead carries groups of later steps, too, whose records would be freed
        # before they are taken.
        surplus = range(self.base, self.base + self._leftover.surplus)
        self._carried_in = set(carried).intersection(surplus)
        return sorted(self._carried_in)
