"""Rewards, balancers, placement policies, advantages, filters, datasets, launchers with one fault
each.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gcore_testing import (
    ActionAdvantageContract,
    AdvantageContract,
    AnnotatorContract,
    BalancerContract,
    DatasetContract,
    FilterContract,
    LauncherContract,
    MeterContract,
    PlacementPolicyContract,
    ScorerContract,
    fake,
)
from gcore_testing.contracts.scorer import scored_record
from gcore_testing.fake import (
    FakeAdvantage,
    FakeAdvantageConfig,
    FakeAnnotator,
    FakeAnnotatorConfig,
    FakeBalancer,
    FakeDataset,
    FakeMeter,
    FakeScorer,
)

from gcore_core.builtin.placement import Even
from gcore_core.contract.algorithms import ActionScalars, GroupScalars, Work
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import FactorySpec, reference_to
from gcore_core.contract.launching import FoundNodes, NodeFacts, Servable, Site
from gcore_core.contract.measurements import Account
from gcore_core.contract.placement import Cell, Decision, Device, Partition, Window
from gcore_core.contract.records import OK, Prompt
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_core.contract.site_files import OneDisk
from gcore_core.contract.trainer import TrainRecord
from gcore_core.contract.traits import Traits
from gcore_core.node.launchers import InlineLauncher

# -- rewards ---------------------------------------------------------------------------------------


class CleanScorer(ScorerContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[FakeScorer]] = FakeScorer

    @pytest.fixture
    def scorer(self, context: WorkerContext) -> FakeScorer:
        return self.Backend(None, context)

    @pytest.fixture
    def unscorable(self) -> ScoredRecord:
        return scored_record(99, "", {})


class TurnsFailureIntoZero(CleanScorer):
    caught_by = ("test_a_record_that_cannot_be_scored_fails_alone",)

    class Backend(FakeScorer):
        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            return [
                score if score.status == OK else Score(value=0.0)
                for score in super().score(records)
            ]


class OneFailureFailsAll(CleanScorer):
    caught_by = (
        "test_a_record_that_cannot_be_scored_fails_alone",
        "test_an_odd_record_does_not_fail_its_batch",
    )

    class Backend(FakeScorer):
        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            scores = super().score(records)
            failed = [score for score in scores if score.status != OK]
            return failed[:1] * len(scores) if failed else scores


class ReordersScores(CleanScorer):
    caught_by = (
        "test_scores_stand_in_the_records_order",
        "test_a_record_that_cannot_be_scored_fails_alone",
        "test_an_odd_record_does_not_fail_its_batch",
    )

    class Backend(FakeScorer):
        """As they come back from a pool of threads: all but the last."""

        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            *others, last = super().score(records) or [None]
            return [*others[::-1], last] if last is not None else []


class LosesTheLastScore(CleanScorer):
    caught_by = (
        "test_one_score_for_each_record",
        "test_scores_stand_in_the_records_order",
        "test_a_score_does_not_depend_on_the_batch",
    )

    class Backend(FakeScorer):
        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            return super().score(records)[: max(1, len(records) - 1)] if records else []


class ScoresNan(CleanScorer):
    caught_by = ("test_a_score_is_finite_or_a_failure_with_a_reason",)

    class Backend(FakeScorer):
        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            return [
                Score(value=float("nan")) if record.text == "four" else score
                for record, score in zip(records, super().score(records), strict=True)
            ]


class FailsWithoutAReason(CleanScorer):
    caught_by = ("test_a_score_is_finite_or_a_failure_with_a_reason",)

    class Backend(FakeScorer):
        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            return [replace(score, reason="") for score in super().score(records)]


class ComparesWithTheBatch(CleanScorer):
    caught_by = (
        "test_a_score_does_not_depend_on_the_batch",
        "test_scores_stand_in_the_records_order",
        "test_an_odd_record_does_not_fail_its_batch",
    )

    class Backend(FakeScorer):
        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            longest = max((len(record.text) for record in records), default=1)
            return [
                score if score.value is None else Score(value=score.value / longest)
                for score in super().score(records)
            ]


class RemembersWhatItSaw(CleanScorer):
    caught_by = (
        "test_asking_twice_gives_the_same",
        "test_scores_stand_in_the_records_order",
        "test_a_score_does_not_depend_on_the_batch",
        "test_a_record_that_cannot_be_scored_fails_alone",
        "test_an_odd_record_does_not_fail_its_batch",
        "test_asking_often_gives_the_same",
    )

    class Backend(FakeScorer):
        """A bonus for an answer that is new."""

        def __init__(self, config: None, context: WorkerContext) -> None:
            self._seen: set[str] = set()

        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            found = []
            for record, score in zip(records, super().score(records), strict=True):
                bonus = float(record.text not in self._seen)
                self._seen.add(record.text)
                found.append(score if score.value is None else Score(value=score.value + bonus))
            return found


class WritesIntoTheRow(CleanScorer):
    caught_by = ("test_arguments_stay_as_they_are",)

    class Backend(FakeScorer):
        """Keeps what it has found out in the row's fields."""

        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            for record in records:
                record.prompt.fields["length"] = len(record.text)  # type: ignore[index]
            return super().score(records)


class WearsOut(CleanScorer):
    caught_by = ("test_asking_often_gives_the_same",)

    class Backend(FakeScorer):
        """From its twelfth call on it gives what it thinks is enough."""

        _calls = 0

        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            self._calls += 1
            scores = super().score(records)
            return scores if self._calls < 12 else [Score(value=0.5) for _ in scores]


class AnEmptyAnswerFailsTheBatch(CleanScorer):
    caught_by = ("test_an_odd_record_does_not_fail_its_batch",)

    @pytest.fixture
    def unscorable(self) -> None:
        """Its author knows of none."""
        return

    class Backend(FakeScorer):
        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            return [Score(value=record.text.count("a") / len(record.text)) for record in records]


class TakesTwentySeconds(CleanScorer):
    caught_by = ("test_it_answers_in_time",)

    class Backend(FakeScorer):
        now_s = 0.0

        def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
            self.now_s += 20.0
            return super().score(records)

    @pytest.fixture
    def clock(self, scorer: Any) -> Any:
        return lambda: scorer.now_s


# -- balancers -------------------------------------------------------------------------------------


class CleanBalancer(BalancerContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[FakeBalancer]] = FakeBalancer

    @pytest.fixture
    def balancer(self) -> FakeBalancer:
        return self.Backend()


class DropsAnIndex(CleanBalancer):
    caught_by = ("test_every_index_is_in_one_bin",)

    class Backend(FakeBalancer):
        """What does not fit evenly is left out."""

        def split(self, work: Work, bins: int) -> list[list[int]]:
            return super().split(work.take(range(len(work) // bins * bins)), bins)


class DuplicatesAnIndex(CleanBalancer):
    caught_by = ("test_every_index_is_in_one_bin", "test_it_is_never_worse_than_dealing_in_turn")

    class Backend(FakeBalancer):
        """Fills every bin up to the same number."""

        def split(self, work: Work, bins: int) -> list[list[int]]:
            found = super().split(work, bins)
            most = max(map(len, found))
            return [part + part[:1] * (most - len(part)) for part in found]


class ShufflesTies(CleanBalancer):
    caught_by = ("test_the_same_records_give_the_same_split",)

    class Backend(FakeBalancer):
        def split(self, work: Work, bins: int) -> list[list[int]]:
            return [random.sample(part, len(part)) for part in super().split(work, bins)]


class NeedsAnItemForEachBin(CleanBalancer):
    caught_by = (
        "test_there_are_as_many_bins_as_asked_for",
        "test_every_index_is_in_one_bin",
        "test_the_same_records_give_the_same_split",
        "test_it_is_never_worse_than_dealing_in_turn",
        "test_equal_records_are_dealt_evenly",
        "test_arguments_stay_as_they_are",
    )

    class Backend(FakeBalancer):
        def split(self, work: Work, bins: int) -> list[list[int]]:
            if len(work) < bins:
                raise ValueError("fewer items than bins")
            return super().split(work, bins)


class LeavesEmptyBinsOut(CleanBalancer):
    caught_by = ("test_there_are_as_many_bins_as_asked_for",)

    class Backend(FakeBalancer):
        def split(self, work: Work, bins: int) -> list[list[int]]:
            return [part for part in super().split(work, bins) if part]


class HoldsTwentyToABin(CleanBalancer):
    caught_by = ("test_every_index_is_in_one_bin",)

    class Backend(FakeBalancer):
        """What comes after the twentieth of a bin is left out."""

        def split(self, work: Work, bins: int) -> list[list[int]]:
            return [part[:20] for part in super().split(work, bins)]


class RoundsItsArguments(CleanBalancer):
    caught_by = ("test_arguments_stay_as_they_are",)

    class Backend(FakeBalancer):
        """Writes where it may."""

        def split(self, work: Work, bins: int) -> list[list[int]]:
            if work.prompt.flags.writeable:
                work.prompt[:] = work.prompt // 2
            return super().split(work, bins)


class LooksAtCountsAlone(CleanBalancer):
    caught_by = ("test_it_is_never_worse_than_dealing_in_turn",)

    class Backend(FakeBalancer):
        def split(self, work: Work, bins: int) -> list[list[int]]:
            return [part.tolist() for part in np.array_split(np.argsort(self.costs(work)), bins)]


class AllToOneRank(CleanBalancer):
    caught_by = (
        "test_equal_records_are_dealt_evenly",
        "test_it_is_never_worse_than_dealing_in_turn",
    )

    class Backend(FakeBalancer):
        def split(self, work: Work, bins: int) -> list[list[int]]:
            return [list(range(len(work))), *([] for _ in range(bins - 1))]


class CostsOverflow(CleanBalancer):
    caught_by = ("test_costs_are_finite_and_not_negative",)

    class Backend(FakeBalancer):
        def costs(self, work: Work) -> np.ndarray:
            return super().costs(work) ** 2


class LearnsInSilence(CleanBalancer):
    caught_by = ("test_learning_is_claimed_or_absent",)

    class Backend(FakeBalancer):
        def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
            return None


class Power(FakeBalancer):
    """A record costs its length to the power that explains the latest steps best."""

    def __init__(self) -> None:
        self._power = 1
        self._shown: list[tuple[float, float, float]] = []

    def costs(self, work: Work) -> np.ndarray:
        return super().costs(work) ** (1 if work.extra.any() else self._power)

    def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
        sums = ([float((load.lengths**power).sum()) for load in loads] for power in (1, 2))
        self._shown = [*self._shown, *zip(*sums, seconds.tolist(), strict=True)][-400:]
        if len(self._shown) > 100:
            table = np.corrcoef(np.array(self._shown).T)[2]
            self._power = 1 + int(table[1] > table[0])
        return None


class CleanLearner(CleanBalancer):
    traits: ClassVar[Traits] = Traits(learns_costs=True)
    Backend: ClassVar[type[FakeBalancer]] = Power


class LearnsNothing(CleanLearner):
    caught_by = ("test_it_predicts_the_times_it_was_shown",)

    class Backend(Power):
        def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
            return 1.0


class NeverForgets(CleanLearner):
    caught_by = ("test_it_predicts_the_times_it_was_shown",)

    class Backend(Power):
        def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
            return super().observe(loads, seconds) if len(self._shown) < 400 else None


class LearnsNegativeCosts(CleanLearner):
    caught_by = ("test_what_it_is_shown_cannot_break_it",)

    class Backend(Power):
        """Longer records took less time, so it says."""

        slope = 1.0

        def costs(self, work: Work) -> np.ndarray:
            return super().costs(work) * self.slope

        def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
            tokens = np.array([load.lengths.sum() for load in loads])
            self.slope = float(
                np.sign(((tokens - tokens.mean()) * (seconds - seconds.mean())).sum()) or 1.0
            )
            return super().observe(loads, seconds)


# -- placement -------------------------------------------------------------------------------------


class CleanPolicy(PlacementPolicyContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[Even]] = Even

    @pytest.fixture
    def policy(self) -> Even:
        return self.Backend()


class OverCommits(CleanPolicy):
    caught_by = (
        "test_generators_that_share_cells_leave_each_other_some",
        "test_no_slot_is_given_twice",
        "test_a_run_can_carry_its_decision_out",
    )

    class Backend(Even):
        """All slots of a role on its first device."""

        def revise(self, partition: Partition | None, window: Window) -> Decision:
            plan = super().revise(partition, window)
            cells = {role: (own[0],) * len(own) for role, own in plan.partition.cells.items()}
            return replace(plan, partition=Partition(cells))


class InventsADevice(CleanPolicy):
    caught_by = (
        "test_no_slot_is_given_twice",
        "test_a_run_can_carry_its_decision_out",
    )

    class Backend(Even):
        def revise(self, partition: Partition | None, window: Window) -> Decision:
            plan = super().revise(partition, window)
            extra = Cell((Device(index=len(window.devices), kind="cpu"),))
            cells = {role: (extra, *own[1:]) for role, own in plan.partition.cells.items()}
            return replace(plan, partition=Partition(cells))


class ForgetsARole(CleanPolicy):
    caught_by = (
        "test_every_role_has_its_slots",
        "test_generators_that_share_cells_leave_each_other_some",
        "test_a_plan_that_fits_stays",
        "test_a_run_can_carry_its_decision_out",
        "test_a_resumed_run_decides_as_the_run_would_have",
    )

    class Backend(Even):
        def revise(self, partition: Partition | None, window: Window) -> Decision:
            plan = super().revise(partition, window)
            return replace(plan, partition=Partition(dict(list(plan.partition.cells.items())[:-1])))


class TakesTurns(CleanPolicy):
    caught_by = ("test_the_same_arguments_give_the_same_plan",)

    class Backend(Even):
        """Begins one device further on with every call."""

        def __init__(self) -> None:
            self._calls = 0

        def revise(self, partition: Partition | None, window: Window) -> Decision:
            self._calls += 1
            first = self._calls % len(window.devices)
            turned = replace(window, devices=(*window.devices[first:], *window.devices[:first]))
            return super().revise(partition, turned)


class MovesEveryTime(CleanPolicy):
    caught_by = ("test_a_plan_that_fits_stays",)

    class Backend(Even):
        def revise(self, partition: Partition | None, window: Window) -> Decision:
            devices = window.devices if partition is None else window.devices[::-1]
            return super().revise(None, replace(window, devices=devices))


class WritesIntoTheWindow(CleanPolicy):
    caught_by = (
        "test_arguments_stay_as_they_are",
        "test_every_role_has_its_slots",
        "test_generators_that_share_cells_leave_each_other_some",
        "test_the_same_arguments_give_the_same_plan",
        "test_a_run_can_carry_its_decision_out",
    )

    class Backend(Even):
        def revise(self, partition: Partition | None, window: Window) -> Decision:
            plan = super().revise(partition, window)
            for role in window.slots:
                window.slots[role] -= 1  # type: ignore[index]
            return plan


class RemembersAnObject(CleanPolicy):
    caught_by = ("test_what_it_says_can_be_written_down",)

    class Backend(Even):
        def revise(self, partition: Partition | None, window: Window) -> Decision:
            decision = super().revise(partition, window)
            return replace(decision, state={"where": decision.partition})


class CountsByANumberThatJsonMakesAText(CleanPolicy):
    caught_by = ("test_a_resumed_run_decides_as_the_run_would_have",)

    class Backend(Even):
        """Counts each device's requests in its account, under the device's index."""

        def revise(self, partition: Partition | None, window: Window) -> Decision:
            counts = {device.index: 0 for device in window.devices} | dict(window.account.state)
            for requests in window.requests.values():
                for replica in requests.replica.tolist():
                    counts[replica] += 1
            decision = super().revise(partition, window)
            return replace(decision, account=Account(state=counts))


class SqueezesWhatDoesNotFit(CleanPolicy):
    caught_by = ("test_what_does_not_fit_is_refused_by_name",)

    class Backend(Even):
        def revise(self, partition: Partition | None, window: Window) -> Decision:
            fitting = {
                role: min(slots, len(window.devices)) for role, slots in window.slots.items()
            }
            return super().revise(partition, replace(window, slots=fitting))


class BothAwakeInASplit(CleanPolicy):
    caught_by = ("test_a_run_can_carry_its_decision_out",)

    class Backend(Even):
        """Has engines everywhere, all of them awake, and says that no device is shared."""

        def revise(self, partition: Partition | None, window: Window) -> Decision:
            decision = super().revise(partition, window)
            return replace(decision, engines=decision.partition, mode="split")


class HasRolesTakeTurnsForEver(CleanPolicy):
    caught_by = ("test_nothing_takes_turns_where_generation_never_ends",)

    class Backend(Even):
        """Co-locates wherever generators have the same slots, whatever the run can do."""

        def revise(self, partition: Partition | None, window: Window) -> Decision:
            decision = super().revise(partition, window)
            generators = [r for r, need in window.needs.items() if need.kind == "generator"]
            shared = len(generators) > 1 and len({window.slots[r] for r in generators}) == 1
            return replace(decision, mode="colocated") if shared else decision


# -- advantages ------------------------------------------------------------------------------------


class CleanAdvantage(AdvantageContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[FakeAdvantage]] = FakeAdvantage

    @pytest.fixture
    def advantage(self) -> FakeAdvantage:
        return self.Backend(FakeAdvantageConfig())


class NormalisesByItsShard(CleanAdvantage):
    caught_by = ("test_shards_do_not_matter",)

    class Backend(FakeAdvantage):
        """Divides by the spread of the groups it happens to see."""

        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            found = super().of(groups, statistics)
            spread = np.concatenate(found).std() if found else 0.0
            return [values / (spread + 1e-4) for values in found]


class EqualRewardsTeach(CleanAdvantage):
    caught_by = (
        "test_a_group_of_equal_rewards_teaches_nothing",
        "test_a_batch_of_equal_rewards_teaches_nothing",
    )

    class Backend(FakeAdvantage):
        """The rest of rounding, over a standard deviation that is rounding, too."""

        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            return [
                values + 1e-8 * (values.size > 1) * (np.ptp(values) == 0)
                for values in super().of(groups, statistics)
            ]


class NoiseTeaches(CleanAdvantage):
    caught_by = ("test_rewards_that_are_equal_but_for_rounding_teach_nothing",)

    class Backend(FakeAdvantage):
        """Divides by the deviation wherever it is not exactly 0."""

        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            centred = [group.rewards - group.rewards.mean() for group in groups]
            equal = [np.ptp(group.rewards) == 0 for group in groups]
            return [
                np.zeros(len(own)) if none else own / own.std()
                for own, none in zip(centred, equal, strict=True)
            ]


class DividesByZero(CleanAdvantage):
    caught_by = (
        "test_each_record_has_one_finite_number",
        "test_a_group_of_equal_rewards_teaches_nothing",
        "test_a_batch_of_equal_rewards_teaches_nothing",
        "test_a_higher_reward_never_has_a_lower_advantage",
        "test_rewards_that_are_equal_but_for_rounding_teach_nothing",
    )

    class Backend(FakeAdvantage):
        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            with np.errstate(invalid="ignore"):
                return [
                    values / np.ptp(group.rewards)
                    for values, group in zip(super().of(groups, statistics), groups, strict=True)
                ]


class PunishesTheBest(CleanAdvantage):
    caught_by = ("test_a_higher_reward_never_has_a_lower_advantage",)

    class Backend(FakeAdvantage):
        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            return [-values for values in super().of(groups, statistics)]


class FirstRecordIsTheBaseline(CleanAdvantage):
    caught_by = ("test_the_order_of_groups_and_records_does_not_matter",)

    class Backend(FakeAdvantage):
        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            return [group.rewards - group.rewards[:1] for group in groups]


class RemembersTheMean(CleanAdvantage):
    caught_by = (
        "test_asking_twice_gives_the_same",
        "test_shards_do_not_matter",
        "test_the_order_of_groups_and_records_does_not_matter",
    )

    class Backend(FakeAdvantage):
        """A running baseline over batches."""

        _mean = 0.0

        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            found = [values - self._mean for values in super().of(groups, statistics)]
            self._mean += 0.1 * float(np.mean([group.rewards.max() for group in groups]))
            return found


class WritesIntoTheStatistics(CleanAdvantage):
    caught_by = ("test_arguments_stay_as_they_are",)

    class Backend(FakeAdvantage):
        """Turns sums into means where they stand."""

        def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
            return np.array([sum(group.rewards.size for group in groups), len(groups)], float)

        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            statistics /= max(1.0, statistics[1])
            return super().of(groups, statistics)


class WritesIntoANamedReward(CleanAdvantage):
    caught_by = ("test_arguments_stay_as_they_are",)

    class Backend(FakeAdvantage):
        """Fills up what a record does not have, where it stands."""

        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            for group in groups:
                for values in group.named.values():
                    if values.flags.writeable:
                        values[:1] += 1.0
            return super().of(groups, statistics)


class TakesOneRewardForACost(CleanAdvantage):
    caught_by = ("test_a_higher_reward_never_has_a_lower_advantage",)

    class Backend(FakeAdvantage):
        """Subtracts one of the named rewards in place of adding it."""

        def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
            costs = [group.named["straight"] for group in groups]
            return [cost.mean() - cost for cost in costs]


class CleanActionAdvantage(ActionAdvantageContract):
    caught_by: ClassVar[tuple[str, ...]] = ()

    class Backend:
        """Reward to go, less the value, less the mean of all."""

        group_size, requires = 4, frozenset({"values"})

        def shown(self, record: ActionScalars) -> np.ndarray:
            return np.where(record.mask, record.columns["values"], 0.0)

        def per_action(self, record: ActionScalars) -> tuple[np.ndarray, np.ndarray]:
            returns = np.where(record.mask, record.reward, 0.0)
            return (returns - self.shown(record)) * record.mask, returns

        def statistics(self, advantages: np.ndarray) -> np.ndarray:
            return np.array([advantages.size, advantages.sum()], float)

        def of(self, advantages: np.ndarray, statistics: np.ndarray) -> np.ndarray:
            return advantages - statistics[1] / max(1.0, statistics[0])

    @pytest.fixture
    def advantage(self) -> Any:
        return self.Backend()


class ValuesAtMaskedActionsCount(CleanActionAdvantage):
    caught_by = ("test_masked_actions_have_no_influence",)

    class Backend(CleanActionAdvantage.Backend):
        def shown(self, record: ActionScalars) -> np.ndarray:
            mean = record.columns["values"].mean() if len(record.mask) else 0.0
            return np.where(record.mask, mean, 0.0)


class HidesInPlace(CleanActionAdvantage):
    caught_by = ("test_arguments_stay_as_they_are",)

    class Backend(CleanActionAdvantage.Backend):
        def shown(self, record: ActionScalars) -> np.ndarray:
            values = record.columns["values"]
            if values.flags.writeable:
                values[~record.mask] = 0.0
            return super().shown(record)


class WarmsUp(CleanActionAdvantage):
    caught_by = ("test_asking_twice_gives_the_same",)

    class Backend(CleanActionAdvantage.Backend):
        """Trusts the values from its thirtieth record on."""

        _calls = 0

        def shown(self, record: ActionScalars) -> np.ndarray:
            self._calls += 1
            return super().shown(record) * (self._calls > 30)


class ShortReturns(CleanActionAdvantage):
    caught_by = ("test_each_action_has_an_advantage_and_a_return",)

    class Backend(CleanActionAdvantage.Backend):
        def per_action(self, record: ActionScalars) -> tuple[np.ndarray, np.ndarray]:
            advantages, returns = super().per_action(record)
            return advantages, returns[:-1]


class DividesByNothing(CleanActionAdvantage):
    caught_by = ("test_statistics_of_all_records_have_one_size_and_scale_finite_numbers",)

    class Backend(CleanActionAdvantage.Backend):
        def statistics(self, advantages: np.ndarray) -> np.ndarray:
            return np.array([len(advantages)] if len(advantages) else [], float)

        def of(self, advantages: np.ndarray, statistics: np.ndarray) -> np.ndarray:
            return advantages / statistics.sum()


# -- filters and datasets --------------------------------------------------------------------------


class CleanFilter(FilterContract):
    caught_by: ClassVar[tuple[str, ...]] = ()

    class Backend:
        def keep(self, group: GroupScalars) -> tuple[bool, str]:
            return (True, "") if group.rewards.size > 1 else (False, "alone")

    @pytest.fixture
    def group_filter(self) -> Any:
        return self.Backend()


class DropsWithoutAReason(CleanFilter):
    caught_by = ("test_what_is_dropped_has_a_named_reason",)

    class Backend(CleanFilter.Backend):
        def keep(self, group: GroupScalars) -> tuple[bool, str]:
            return super().keep(group)[0], ""


class KeepsEverySecondGroup(CleanFilter):
    caught_by = ("test_the_same_group_gets_the_same_verdict",)

    class Backend(CleanFilter.Backend):
        _calls = 0

        def keep(self, group: GroupScalars) -> tuple[bool, str]:
            self._calls += 1
            return (True, "") if self._calls % 3 else (False, "third")


class LooksAtTheFirstRecord(CleanFilter):
    caught_by = ("test_the_order_of_a_groups_records_does_not_matter",)

    class Backend(CleanFilter.Backend):
        def keep(self, group: GroupScalars) -> tuple[bool, str]:
            return (True, "") if group.rewards[:1].sum() > 0 else (False, "first")


class SortsTheRewards(CleanFilter):
    caught_by = ("test_arguments_stay_as_they_are",)

    class Backend(CleanFilter.Backend):
        def keep(self, group: GroupScalars) -> tuple[bool, str]:
            if group.rewards.flags.writeable:
                group.rewards.sort()
            return super().keep(group)


class AnswersWithNumpy(CleanFilter):
    caught_by = ("test_a_verdict_is_a_truth_value_and_a_word",)

    class Backend(CleanFilter.Backend):
        def keep(self, group: GroupScalars) -> tuple[bool, str]:
            return np.bool_(group.rewards.sum() > 0), "sum"  # type: ignore[return-value]


class CleanDataset(DatasetContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[FakeDataset]] = FakeDataset

    @pytest.fixture
    def dataset(self) -> FakeDataset:
        return self.Backend(fake.FakeDataConfig())

    def factory(self) -> FactorySpec:
        backend = f"{__file__}:{self.Backend.__qualname__}"
        if self.Backend is FakeDataset:
            backend = reference_to(FakeDataset)
        return FactorySpec(backend, reference_to(fake.FakeDataConfig))


class ShufflesWithoutASeed(CleanDataset):
    """The rows of one opening are the same every time; another opening has other ones."""

    caught_by = ("test_a_row_is_the_same_in_another_process",)

    class Backend(FakeDataset):
        def __init__(self, config: fake.FakeDataConfig) -> None:
            super().__init__(config)
            self._order = random.Random().sample(range(len(self)), len(self))

        def __getitem__(self, row: int) -> Prompt:
            if not 0 <= row < len(self):
                raise IndexError(row)
            return Prompt(row=row, text=super().__getitem__(self._order[row]).text)


class CountsFromOne(CleanDataset):
    caught_by = ("test_a_row_knows_its_number",)

    class Backend(FakeDataset):
        def __getitem__(self, row: int) -> Prompt:
            prompt = super().__getitem__(row)
            return Prompt(row=row + 1, text=prompt.text)


class StartsAgainAtTheEnd(CleanDataset):
    caught_by = ("test_there_is_nothing_after_the_last_row",)

    class Backend(FakeDataset):
        def __getitem__(self, row: int) -> Prompt:
            return super().__getitem__(row % len(self))


class TextAndMessages(CleanDataset):
    caught_by = ("test_a_row_is_either_text_or_messages",)

    class Backend(FakeDataset):
        def __getitem__(self, row: int) -> Prompt:
            text = super().__getitem__(row).text
            return Prompt(row=row, text=text, messages=[{"role": "user", "content": text}])


class AugmentsAtRandom(CleanDataset):
    caught_by = (
        "test_a_row_is_the_same_every_time_and_travels",
        "test_a_row_is_the_same_in_another_process",
    )

    class Backend(FakeDataset):
        def __getitem__(self, row: int) -> Prompt:
            return Prompt(row=super().__getitem__(row).row, text=str(random.random()))


# -- launchers -------------------------------------------------------------------------------------


def with_node(site: Site, **changed: Any) -> Site:
    """Returns the site with something of its only node changed."""
    return replace(site, nodes={site.home: replace(site.home_node, **changed)})


class CleanLauncher(LauncherContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[InlineLauncher]] = InlineLauncher

    @pytest.fixture
    def launcher(self) -> InlineLauncher:
        return self.Backend()


class LeavesItsFilesBehind(CleanLauncher):
    caught_by = ("test_nothing_is_left_behind",)

    class Backend(InlineLauncher):
        @contextlib.asynccontextmanager
        async def site(
            self, where: Mapping[str, str], supervisor: Servable, logs: Path
        ) -> AsyncIterator[Site]:
            async with super().site(where, supervisor, logs) as site:
                store = logs / "store"
                store.mkdir(exist_ok=True)
                yield with_node(site, store=store)


class OneSecretForAll(CleanLauncher):
    caught_by = ("test_the_secret_is_new_for_each_site",)

    class Backend(InlineLauncher):
        @contextlib.asynccontextmanager
        async def site(
            self, where: Mapping[str, str], supervisor: Servable, logs: Path
        ) -> AsyncIterator[Site]:
            async with super().site(where, supervisor, logs) as site:
                yield replace(site, secret=b"the same secret for everyone")


class OneAddressForAll(CleanLauncher):
    caught_by = ("test_every_process_has_an_address_of_its_own",)

    class Backend(InlineLauncher):
        @contextlib.asynccontextmanager
        async def site(
            self, where: Mapping[str, str], supervisor: Servable, logs: Path
        ) -> AsyncIterator[Site]:
            async with super().site(where, supervisor, logs) as site:
                yield replace(site, views={site.home: dict.fromkeys(where, "inline:here")})


class ItsAgentIsNotThere(CleanLauncher):
    caught_by = (
        "test_the_agents_of_a_site_answer",
        "test_the_agent_of_a_site_reads_a_meter",
    )

    class Backend(InlineLauncher):
        @contextlib.asynccontextmanager
        async def site(
            self, where: Mapping[str, str], supervisor: Servable, logs: Path
        ) -> AsyncIterator[Site]:
            async with super().site(where, supervisor, logs) as site:
                yield with_node(site, agent=site.network.peer("agent.1"))


class TwoNodesOfOneName(CleanLauncher):
    caught_by = ("test_it_says_which_nodes_there_are",)

    class Backend(InlineLauncher):
        async def nodes(self, devices: int | str) -> list[NodeFacts]:
            nodes = await super().nodes(devices)
            return [*nodes, replace(nodes[0], devices=())]


class LosesANodeWithoutAWord(CleanLauncher):
    caught_by = ("test_it_finds_its_nodes_again",)

    class Backend(InlineLauncher):
        async def find_nodes(self, devices: int | str, *, again: bool) -> FoundNodes:
            nodes = await self.nodes(devices)
            return FoundNodes(nodes=[replace(nodes[0], devices=())] if again else nodes)


class CleanLeavingLauncher(CleanLauncher):
    """Its second node is the first one under another name, so it has no files of its own."""

    test_files_go_to_every_node_and_come_back = None  # type: ignore[assignment]
    remembers: ClassVar[bool] = True

    @pytest.fixture
    def launcher(self) -> InlineLauncher:
        remembers = self.remembers
        left = False

        def let_go() -> None:
            nonlocal left
            left = remembers

        class Leaving(InlineLauncher):
            async def nodes(self, devices: int | str) -> list[NodeFacts]:
                nodes = await super().nodes(devices)
                other = [] if left else [NodeFacts(name="agent.1", devices=(), host="other")]
                return [*nodes, *other]

            async def find_nodes(self, devices: int | str, *, again: bool) -> FoundNodes:
                missing = {"other": "it has left"} if left else {}
                return FoundNodes(nodes=await self.nodes(devices), missing=missing)

            @contextlib.asynccontextmanager
            async def site(
                self, where: Mapping[str, str], supervisor: Servable, logs: Path
            ) -> AsyncIterator[Site]:
                async with super().site(where, supervisor, logs) as site:
                    other = {} if left else {"agent.1": replace(site.home_node, let_go=let_go)}
                    views = dict.fromkeys(other, site.views[site.home])
                    yield replace(
                        site, nodes={**site.nodes, **other}, views={**site.views, **views}
                    )

        return Leaving()


class FindsAMachineThatHasLeft(CleanLeavingLauncher):
    caught_by = ("test_a_machine_that_is_let_go_is_not_of_the_next_site",)
    remembers = False


class PutsAllOnOneNode(CleanLauncher):
    caught_by = ("test_every_process_is_where_it_was_to_be",)

    class Backend(InlineLauncher):
        async def nodes(self, devices: int | str) -> list[NodeFacts]:
            nodes = await super().nodes(devices)
            return [*nodes, NodeFacts(name="agent.1", devices=())]

        @contextlib.asynccontextmanager
        async def site(
            self, where: Mapping[str, str], supervisor: Servable, logs: Path
        ) -> AsyncIterator[Site]:
            async with super().site(where, supervisor, logs) as site:
                yield replace(site, where=dict.fromkeys(where, site.home))


class KeepsFilesToItself(CleanLauncher):
    """It loses what it is to bring home."""

    caught_by = ("test_files_go_to_every_node_and_come_back",)

    class Backend(InlineLauncher):
        @contextlib.asynccontextmanager
        async def site(
            self, where: Mapping[str, str], supervisor: Servable, logs: Path
        ) -> AsyncIterator[Site]:
            class Losing(OneDisk):
                async def collect(self, directory: Path) -> None:
                    shutil.rmtree(directory)

            async with super().site(where, supervisor, logs) as site:
                yield replace(site, files=Losing())


class MeetsInPublic(CleanLauncher):
    caught_by = ("test_where_ranks_meet_is_private",)

    class Backend(InlineLauncher):
        @contextlib.asynccontextmanager
        async def site(
            self, where: Mapping[str, str], supervisor: Servable, logs: Path
        ) -> AsyncIterator[Site]:
            async with super().site(where, supervisor, logs) as site:
                site.home_node.meeting.chmod(0o755)
                yield site


# -- annotators ------------------------------------------------------------------------------------


class CleanAnnotator(AnnotatorContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[FakeAnnotator]] = FakeAnnotator

    @pytest.fixture
    def annotator(self, annotator_context: WorkerContext) -> FakeAnnotator:
        return self.Backend(FakeAnnotatorConfig(), annotator_context)


class GivesAnotherColumn(CleanAnnotator):
    caught_by = (
        "test_each_record_has_exactly_the_columns_of_the_role",
        "test_each_action_has_what_the_column_says",
    )

    class Backend(FakeAnnotator):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            return [
                {f"{name}s": column for name, column in columns.items()}
                for columns in super().annotate(records)
            ]


class GivesFloat64(CleanAnnotator):
    caught_by = ("test_each_action_has_what_the_column_says",)

    class Backend(FakeAnnotator):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            return [
                {name: column.astype(np.float64) for name, column in columns.items()}
                for columns in super().annotate(records)
            ]


class CleanWideAnnotator(AnnotatorContract):
    """Gives the two letters that come first in its table beside the log-prob of the action."""

    caught_by: ClassVar[tuple[str, ...]] = ()
    columns = ("teacher_logp", ColumnSpec(name="teacher_ids", dtype="int32", wide=True, k=2))

    class Backend(FakeAnnotator):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            best = np.argsort(-self._logits)[:2].astype(np.int32)
            return [
                {**columns, "teacher_ids": np.tile(best, (len(columns["teacher_logp"]), 1))}
                for columns in super().annotate(records)
            ]

    @pytest.fixture
    def annotator(self, annotator_context: WorkerContext) -> FakeAnnotator:
        return self.Backend(FakeAnnotatorConfig(), annotator_context)


class GivesARowForTheWholeRecord(CleanWideAnnotator):
    caught_by = ("test_each_action_has_what_the_column_says",)

    class Backend(CleanWideAnnotator.Backend):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            return [
                {**columns, "teacher_ids": columns["teacher_ids"][0]}
                for columns in super().annotate(records)
            ]


class GivesIdsAsFloats(CleanWideAnnotator):
    caught_by = ("test_each_action_has_what_the_column_says",)

    class Backend(CleanWideAnnotator.Backend):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            return [
                {**columns, "teacher_ids": columns["teacher_ids"].astype(np.float32)}
                for columns in super().annotate(records)
            ]


class LeavesMaskedActionsUndefined(CleanAnnotator):
    caught_by = ("test_every_value_is_finite",)

    class Backend(FakeAnnotator):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            masks = [record.columns["action_mask"] != 0 for record in records]
            return [
                {name: np.where(mask, column, np.float32(-np.inf)) for name, column in own.items()}
                for mask, own in zip(masks, super().annotate(records), strict=True)
            ]


class CentresOverTheBatch(CleanAnnotator):
    caught_by = ("test_the_batch_and_its_order_do_not_matter",)

    class Backend(FakeAnnotator):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            given = super().annotate(records)
            values = [column for columns in given for column in columns.values()]
            mean = np.concatenate(values).mean() if values else np.float32(0)
            return [{name: own - mean for name, own in columns.items()} for columns in given]


class CountsRecordsOnce(CleanAnnotator):
    caught_by = ("test_a_record_may_come_twice", "test_the_batch_and_its_order_do_not_matter")

    class Backend(FakeAnnotator):
        def __init__(self, config: FakeAnnotatorConfig, context: WorkerContext) -> None:
            super().__init__(config, context)
            self._seen = set[tuple[int, int]]()

        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            """A record that it has seen before gets zeros."""
            given = list(super().annotate(records))
            for at, record in enumerate(records):
                if (record.ordinal, record.sample) in self._seen:
                    given[at] = {name: np.zeros_like(own) for name, own in given[at].items()}
                self._seen.add((record.ordinal, record.sample))
            return given


class FailsWithoutRecords(CleanAnnotator):
    caught_by = ("test_no_records_give_no_columns",)

    class Backend(FakeAnnotator):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            np.concatenate([record.columns["action_ids"] for record in records])
            return super().annotate(records)


class AddsItsColumnsToTheRecord(CleanAnnotator):
    caught_by = ("test_arguments_stay_as_they_are",)

    class Backend(FakeAnnotator):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            answers = super().annotate(records)
            for record, columns in zip(records, answers, strict=True):
                record.columns.update(columns)  # type: ignore[attr-defined]
            return answers


class CountsItsCalls(CleanAnnotator):
    caught_by = ("test_the_version_stays",)

    class Backend(FakeAnnotator):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            self.version += 1
            return super().annotate(records)


# -- meters ----------------------------------------------------------------------------------------


class CleanMeter(MeterContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[Any]] = FakeMeter

    @pytest.fixture
    def meter(self) -> Any:
        return self.Backend()


class CannotBeClosed(CleanMeter):
    caught_by = ("test_it_is_a_meter", "test_it_can_be_closed")

    class Backend:
        def used_s(self, devices: Mapping[int, Sequence[int]]) -> dict[int, float]:
            return dict.fromkeys(devices, 0.0)


class ReadsOneDeviceOnly(CleanMeter):
    caught_by = ("test_it_reads_the_devices_that_it_is_asked_for",)

    class Backend(FakeMeter):
        def used_s(self, devices: Mapping[int, Sequence[int]]) -> dict[int, float]:
            return {0: super().used_s(devices).get(0, 0.0)}


class ForgetsWhatHasEnded(CleanMeter):
    caught_by = ("test_seconds_never_get_fewer",)

    class Backend(FakeMeter):
        def used_s(self, devices: Mapping[int, Sequence[int]]) -> dict[int, float]:
            used_s = super().used_s(devices)
            return {index: used_s[index] if pids else 0.0 for index, pids in devices.items()}
