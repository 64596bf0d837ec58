"""Objectives with one fault each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from gcore_testing import ObjectiveContract
from gcore_testing.contracts.objective import make_batch
from gcore_testing.fake import FakeObjective

Result = tuple[Any, Any, dict[str, Any]]


class Clean(ObjectiveContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[FakeObjective]] = FakeObjective

    @pytest.fixture
    def objective(self) -> FakeObjective:
        return self.Backend(None)

    @pytest.fixture
    def reference(self) -> Any:
        def loops(columns: Any, current: Any) -> tuple[Any, Any]:
            places = [t for t in range(len(columns["mask"])) if columns["mask"][t]]
            total = sum(-columns["advantage"][t] * current["logp"][t] for t in places)
            return total / len(places), len(places)

        return loops


class CleanAdapting(Clean):
    """Its loss grows with the number of steps that it was shown."""

    class Backend(FakeObjective):
        def __init__(self, config: None) -> None:
            self.steps = 0

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, metrics = super().loss(columns, current)
            return loss * (1 + self.steps), weight, metrics

        def observe(self, metrics: Mapping[str, float]) -> None:
            self.steps += 1

        def state(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def restore(self, state: Mapping[str, Any]) -> None:
            self.steps = state["steps"]


class BeginsAnewWhenResumed(CleanAdapting):
    caught_by = ("test_what_it_has_learned_survives_json",)

    class Backend(CleanAdapting.Backend):
        def restore(self, state: Mapping[str, Any]) -> None:
            self.steps = 0


class LearnsFromLosses(CleanAdapting):
    caught_by = ("test_only_a_step_changes_what_it_has_learned",)

    class Backend(CleanAdapting.Backend):
        """Counts what it is asked, which its loss does not show."""

        def __init__(self, config: None) -> None:
            super().__init__(config)
            self.asked = 0

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            self.asked += 1
            return super().loss(columns, current)

        def state(self) -> dict[str, Any]:
            return {**super().state(), "asked": self.asked}

        def restore(self, state: Mapping[str, Any]) -> None:
            super().restore(state)
            self.asked = state["asked"]


class CleanByAge(Clean):
    """A record counts less, the older its oldest trained action is."""

    class Backend(FakeObjective):
        requires = frozenset({"age"})

        def counted(self, columns: Mapping[str, Any]) -> Any:
            return columns["mask"]

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            trained = columns["mask"]
            loss = -(columns["advantage"] * current["logp"]).masked_fill(~trained, 0.0)
            weight = self.weight(columns)
            total = loss.sum() * 0
            for record in columns["record"].unique():
                own = columns["record"] == record
                counted = columns["age"][own & self.counted(columns)]
                oldest = int(counted.max()) if len(counted) else 0
                total = total + loss[own].sum() / (1 + oldest)
            return total, weight, {}

    @pytest.fixture
    def reference(self) -> Any:
        return None


class CountsAgesOfMaskedActions(CleanByAge):
    caught_by = ("test_masked_actions_have_no_influence", "test_padding_does_not_matter")

    class Backend(CleanByAge.Backend):
        def counted(self, columns: Mapping[str, Any]) -> Any:
            return columns["mask"] | True


class MeanOfMeans(Clean):
    caught_by = (
        "test_micro_batches_do_not_matter",
        "test_data_parallel_ranks_do_not_matter",
        "test_it_equals_the_slow_reference",
    )

    class Backend(FakeObjective):
        """A mean per micro-batch, which are then averaged; right only where all are of one size."""

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, metrics = super().loss(columns, current)
            one = weight * 0 + 1
            return loss / weight.clamp(min=1), one, metrics

        def weight(self, columns: Mapping[str, Any]) -> Any:
            return super().weight(columns) * 0 + 1


class MaskedActionsCount(Clean):
    caught_by = (
        "test_masked_actions_have_no_influence",
        "test_padding_does_not_matter",
        "test_it_equals_the_slow_reference",
    )

    class Backend(FakeObjective):
        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            return super().loss({**columns, "mask": columns["mask"] | True}, current)

        def weight(self, columns: Mapping[str, Any]) -> Any:
            return super().weight({**columns, "mask": columns["mask"] | True})


class PaddingIsInTheNormaliser(Clean):
    caught_by = ("test_padding_does_not_matter", "test_it_equals_the_slow_reference")

    class Backend(FakeObjective):
        """The loss leaves masked actions out, the number it is divided by does not."""

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, metrics = super().loss(columns, current)
            return loss, weight * 0 + columns["mask"].numel(), metrics

        def weight(self, columns: Mapping[str, Any]) -> Any:
            return super().weight(columns) * 0 + columns["mask"].numel()


class MaskedByMultiplication(Clean):
    caught_by = (
        "test_masked_actions_have_no_influence",
        "test_padding_does_not_matter",
        "test_it_equals_the_slow_reference",
    )

    class Backend(FakeObjective):
        """Masked actions have weight 1e-6 instead of none."""

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, metrics = super().loss(columns, current)
            soft = columns["mask"].to(loss.dtype).clamp(min=1e-6)
            return -(columns["advantage"] * current["logp"] * soft).sum(), weight, metrics


class AssumesThatRecordsLieTogether(Clean):
    caught_by = (
        "test_interleaved_records_are_the_same_records",
        "test_it_equals_the_slow_reference",
    )

    class Backend(FakeObjective):
        """Weighs a record's actions by its length, which it reads from where the next record
        begins.
        """

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            import torch

            trained = columns["mask"]
            runs, lengths = torch.unique_consecutive(columns["record"][trained], return_counts=True)
            weights = (1.0 / lengths).repeat_interleave(lengths)
            loss = -(columns["advantage"][trained] * current["logp"][trained] * weights).sum()
            return loss, self.weight(columns), {}

        def weight(self, columns: Mapping[str, Any]) -> Any:
            records = columns["record"][columns["mask"]].unique().numel()
            return super().weight(columns) * 0 + records


class ComparesWithTheRecordBefore(Clean):
    caught_by = (
        "test_the_order_of_samples_does_not_matter",
        "test_micro_batches_do_not_matter",
        "test_data_parallel_ranks_do_not_matter",
        "test_interleaved_records_are_the_same_records",
        "test_it_equals_the_slow_reference",
    )

    class Backend(FakeObjective):
        """Advantages are differences between neighbours: a shift by one that ran over the end of a
        record.
        """

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            trained = columns["mask"]
            advantage = columns["advantage"].clone()
            kept = advantage[trained]
            advantage[trained] = kept - 0.5 * kept.roll(1)
            return super().loss({**columns, "advantage": advantage}, current)


class TheWeightFollowsTheParameters(Clean):
    caught_by = (
        "test_the_weight_does_not_depend_on_the_parameters",
        "test_the_weight_alone_is_that_of_the_loss",
        "test_it_equals_the_slow_reference",
    )

    class Backend(FakeObjective):
        """Divides by the sum of importance weights."""

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, _, metrics = super().loss(columns, current)
            trained = columns["mask"]
            ratio = (current["logp"].detach()[trained] - columns["rollout_logp"][trained]).exp()
            return loss, ratio.sum(), metrics


class TheWeightAloneCountsPadding(Clean):
    caught_by = ("test_the_weight_alone_is_that_of_the_loss",)

    class Backend(FakeObjective):
        """``loss`` divides by trained actions, ``weight`` counts all."""

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, _, _ = super().loss(columns, current)
            return loss, super().weight(columns), {}

        def weight(self, columns: Mapping[str, Any]) -> Any:
            return super().weight(columns) * 0 + columns["mask"].numel()


class TheWeightAloneWaitsForLogprobs(Clean):
    caught_by = ("test_the_weight_alone_is_that_of_the_loss",)

    class Backend(FakeObjective):
        """Reads a column that is not there before the first pass."""

        requires = frozenset({"old_logp"})

        def weight(self, columns: Mapping[str, Any]) -> Any:
            return super().weight(columns).to(columns["old_logp"].dtype)


class MetricsKeepTheGraph(Clean):
    caught_by = ("test_it_gives_two_sums_and_detached_metrics",)

    class Backend(FakeObjective):
        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, _ = super().loss(columns, current)
            return loss, weight, {"surprise": (-current["logp"][columns["mask"]].sum(), weight)}


class MetricsAreMeans(Clean):
    caught_by = ("test_micro_batches_do_not_matter", "test_data_parallel_ranks_do_not_matter")

    class Backend(FakeObjective):
        """Means of micro-batches, which cannot be added up."""

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, metrics = super().loss(columns, current)
            total, count = metrics["surprise"]
            return loss, weight, {"surprise": (total / count.clamp(min=1), count * 0 + 1)}


class AnEmptyRankIsNan(Clean):
    caught_by = ("test_data_parallel_ranks_do_not_matter",)

    class Backend(FakeObjective):
        """The mean of nothing times the number of nothing."""

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            trained = columns["mask"]
            loss = -(columns["advantage"] * current["logp"])
            empty = trained.numel() == 0
            kept = loss.mean() * 0 if empty else loss[trained].sum()
            return kept, trained.sum().to(loss.dtype), {}


class WritesIntoItsColumns(Clean):
    caught_by = ("test_asking_twice_gives_the_same",)

    class Backend(FakeObjective):
        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            columns["rollout_logp"].clamp_(min=-1e-3)
            return super().loss(columns, current)


class Descends(Clean):
    caught_by = (
        "test_a_positive_advantage_raises_the_logprob",
        "test_it_equals_the_slow_reference",
    )

    class Backend(FakeObjective):
        """The sign of policy gradient descent."""

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, metrics = super().loss(columns, current)
            return -loss, weight, metrics


class DescendsWithoutAReference(Clean):
    caught_by = ("test_a_positive_advantage_raises_the_logprob",)

    @pytest.fixture
    def reference(self) -> None:
        """Its author has written none."""
        return

    class Backend(Descends.Backend):
        pass


class DetachesTheLogprobs(Clean):
    caught_by = (
        "test_the_gradient_is_finite_and_not_zero",
        "test_it_equals_the_slow_reference",
    )

    class Backend(FakeObjective):
        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, metrics = super().loss(columns, current)
            return loss.detach() + 0 * current["logp"].sum(), weight, metrics


class CleanOfTokens(ObjectiveContract):
    """Raises the log-probs of two tokens at each action, too."""

    caught_by: ClassVar[tuple[str, ...]] = ()

    class Backend(FakeObjective):
        requires = frozenset({"ids", "logp@ids"})

        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, metrics = super().loss(columns, current)
            return loss - current["logp@ids"][columns["mask"]].sum(), weight, metrics

    @pytest.fixture
    def objective(self) -> FakeObjective:
        return self.Backend(None)

    @pytest.fixture
    def batch(self) -> Mapping[str, Any]:
        batch = make_batch()
        tokens = batch["logp"][:, None] - batch["entropy"][:, None].expand(-1, 2)
        return {**batch, "ids": (tokens * 0).long(), "logp@ids": tokens.clone()}


class RaisesTheTokensOfMaskedActions(CleanOfTokens):
    caught_by = (
        "test_masked_actions_have_no_influence",
        "test_padding_does_not_matter",
    )

    class Backend(CleanOfTokens.Backend):
        def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Result:
            loss, weight, metrics = super().loss(columns, current)
            masked = current["logp@ids"][~columns["mask"]].sum()
            return loss - masked, weight, metrics
