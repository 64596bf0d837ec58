"""Trainers with one fault each, alone and beside a generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import xxhash
from gcore_testing import TrainerContract, TrainerWithGeneratorContract, fake
from gcore_testing.contracts.trainer import SeesAges, SeesSteps
from gcore_testing.fake import FakeGenerator, FakeTrainer, FakeTrainerConfig
from gcore_testing.safetensors_files import write_safetensors

from gcore_core.contract.algorithms import ActionScalars
from gcore_core.contract.columns import Columns, action_ages
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.records import AdapterFacts, TensorSpec, WeightPlan
from gcore_core.contract.trainer import StartLogprobs, TrainRecord
from gcore_core.contract.traits import Traits
from gcore_core.contract.weight_transfer import Offers


class Clean(TrainerContract):
    provider = next(iter(fake.gcore_trainers()))
    caught_by: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = fake.AbleTrainerConfig().traits()
    Backend: ClassVar[type[FakeTrainer]] = FakeTrainer

    @pytest.fixture
    def trainer(self, trainer_context: WorkerContext) -> FakeTrainer:
        return self.Backend(FakeTrainerConfig(), trainer_context)

    @pytest.fixture
    def showing_trainer(self, trainer_context: WorkerContext, sees_steps: SeesSteps) -> FakeTrainer:
        context = replace(trainer_context, parts={"objective": sees_steps})
        return self.Backend(FakeTrainerConfig(), context)

    @pytest.fixture
    def split_trainer(self, context: WorkerContext) -> FakeTrainer:
        return self.Backend(FakeTrainerConfig(micro_batch=1), context)

    @pytest.fixture
    def annotating(self, annotating_context: WorkerContext) -> FakeTrainer:
        return self.Backend(FakeTrainerConfig(), annotating_context)

    @pytest.fixture
    def memory_of(self) -> Callable[[Any], int]:
        return lambda trainer: trainer.memory_bytes

    def build(self, *args: Any, **config: Any) -> Any:
        return self.Backend(FakeTrainerConfig(**config), *args)


class ClaimsSleepWithoutIt(Clean):
    caught_by = (
        "test_a_run_with_sleep_has_the_bits_of_one_without",
        "test_a_trainer_that_sleeps_does_not_train",
        "test_a_trainer_that_sleeps_gives_memory_back",
        "test_sleep_is_claimed_where_it_is_there",
    )

    class Backend(FakeTrainer):
        sleep = None  # type: ignore[assignment]


class SleepsWithItsWeights(Clean):
    caught_by = ("test_a_trainer_that_sleeps_gives_memory_back",)

    class Backend(FakeTrainer):
        def sleep(self) -> None:
            self._asleep = self._logits.tobytes()


class TrainsInItsSleep(Clean):
    caught_by = ("test_a_trainer_that_sleeps_does_not_train",)

    class Backend(FakeTrainer):
        def train(self, *args: Any) -> dict[str, float]:
            self.wake()
            return super().train(*args)


class WakesWithOtherWeights(Clean):
    caught_by = ("test_a_run_with_sleep_has_the_bits_of_one_without",)

    class Backend(FakeTrainer):
        def wake(self) -> None:
            super().wake()
            self._logits = self._logits.astype(np.float16).astype(np.float32)


class SleepsTwiceAndForgets(Clean):
    caught_by = ("test_a_run_with_sleep_has_the_bits_of_one_without",)

    class Backend(FakeTrainer):
        def sleep(self) -> None:
            self._asleep = self._logits.tobytes()
            self._logits = np.zeros(0, np.float32)


class DecaysInASkippedStep(Clean):
    caught_by = ("test_a_skipped_step_changes_the_version_alone",)

    class Backend(FakeTrainer):
        def skip(self, step: int) -> None:
            super().skip(step)
            self._logits = self._logits * np.float32(0.99)


class ForgetsToCountASkippedStep(Clean):
    caught_by = ("test_a_skipped_step_changes_the_version_alone",)

    class Backend(FakeTrainer):
        def skip(self, step: int) -> None: ...


class ComparesAfterTheUpdate(Clean):
    caught_by = (
        "test_log_probs_at_the_start_of_a_step_are_those_before_its_first_update",
        "test_log_probs_of_given_actions_are_those_of_the_weights_it_holds",
    )

    class Backend(FakeTrainer):
        def start_logprobs(self) -> list[StartLogprobs]:
            logp = fake.log_softmax(self._logits)
            return [StartLogprobs(logp=logp[r.columns["action_ids"]]) for r in self._records]


class ComparesTheFirstStepForEver(Clean):
    caught_by = ("test_log_probs_at_the_start_of_a_step_are_those_before_its_first_update",)

    class Backend(FakeTrainer):
        _first: list[StartLogprobs] | None = None

        def start_logprobs(self) -> list[StartLogprobs]:
            self._first = self._first or super().start_logprobs()
            return self._first


class ScoresWithTheWeightsItBeganWith(Clean):
    caught_by = ("test_log_probs_of_given_actions_are_those_of_the_weights_it_holds",)

    class Backend(FakeTrainer):
        def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
            logp = fake.log_softmax(fake.initial_logits(0))
            return [logp[record["action_ids"]] for record in records]


class GivesBackTheLogProbsOfTheRecord(Clean):
    caught_by = ("test_log_probs_of_given_actions_are_those_of_the_weights_it_holds",)

    class Backend(FakeTrainer):
        def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
            return [record["logp"] for record in records]


class LearnsWhileItScores(Clean):
    caught_by = ("test_log_probs_of_given_actions_are_those_of_the_weights_it_holds",)

    class Backend(FakeTrainer):
        def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
            scored = super().logprobs(records)
            self._logits = self._logits * np.float32(0.999)
            return scored


class LearnsWhileItEvaluates(Clean):
    caught_by = ("test_an_evaluation_adds_up_and_changes_nothing",)

    class Backend(FakeTrainer):
        def evaluate(
            self, records: Sequence[TrainRecord], advantages: np.ndarray
        ) -> dict[str, tuple[float, float]]:
            sums = super().evaluate(records, advantages)
            self._logits = self._logits * np.float32(0.999)
            return sums


class MovesWithoutAdvantages(Clean):
    caught_by = (
        "test_zero_advantages_leave_the_weights_bit_equal",
        "test_log_probs_at_the_start_of_a_step_are_those_before_its_first_update",
    )

    class Backend(FakeTrainer):
        """Decays its weights whatever the batch says."""

        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            metrics = super().train(step, advantages, minibatches, epochs)
            if self._records:
                self._logits = self._logits * np.float32(0.999)
            return metrics


class LearnsTheOpposite(Clean):
    caught_by = ("test_the_loss_falls",)

    class Backend(FakeTrainer):
        def _loss(self, advantages: np.ndarray, minibatch: int) -> tuple[float, np.ndarray]:
            loss, gradient = super()._loss(advantages, minibatch)
            return loss, -gradient


class LearnsWhileItAnnotates(Clean):
    caught_by = ("test_annotating_gives_finite_columns_and_changes_nothing",)

    class Backend(FakeTrainer):
        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            given = super().annotate(records)
            self._logits = self._logits * np.float32(0.999)
            return given


class CleanValues(Clean):
    """Has a value head, which is one number for all states, and computes advantages of actions."""

    traits = replace(Clean.traits, action_advantages=True, value_head=True)

    class Backend(FakeTrainer):
        def __init__(self, config: FakeTrainerConfig, context: WorkerContext) -> None:
            super().__init__(config, context)
            objective = context.parts.get("objective")
            self._has_head = objective is not None and "values" in objective.requires
            self._advantage = context.parts.get("advantage")
            self._head = np.float32(0.0)

        def annotate(self, records: Sequence[TrainRecord]) -> list[Any]:
            values = [np.full(len(r.columns["action_ids"]), self._head) for r in records]
            return [dict.fromkeys(self._columns, value) for value in values]

        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            if self._has_head:
                return self._train_head(step, advantages)
            if self._advantage is not None:
                advantages = self._of_records(advantages)
            return super().train(step, advantages, minibatches, epochs)

        def _train_head(self, step: int, numbers: np.ndarray) -> dict[str, float]:
            masks = [record.columns["action_mask"] != 0 for record in self._records]
            targets = np.repeat(numbers, [mask.sum() for mask in masks])
            loss = float(((self._head - targets) ** 2).mean() / 2)
            self._head = self._moved(targets)
            self.version = step + 1
            return {"loss": loss}

        def _moved(self, targets: np.ndarray) -> np.float32:
            return np.float32(self._head + 0.3 * (targets - self._head).mean())

        def _of_records(self, rewards: np.ndarray) -> np.ndarray:
            """Each record's advantage: here all its actions have the same."""
            own = []
            for record, reward in zip(self._records, rewards, strict=True):
                mask = record.columns["action_mask"] != 0
                scalars = ActionScalars(reward=reward, mask=mask)
                own.append(self._advantage.per_action(scalars)[0][mask])
            statistics = sum(self._advantage.statistics(part) for part in own)
            return np.array([self._scaled(part, statistics)[0] for part in own])

        def _scaled(self, advantages: np.ndarray, statistics: np.ndarray) -> np.ndarray:
            return np.asarray(self._advantage.of(advantages, statistics))


class ForgetsWhatOthersNeed(CleanValues):
    caught_by = ("test_advantages_of_actions_train_as_those_of_records_where_they_are_equal",)

    class Backend(CleanValues.Backend):
        def _scaled(self, advantages: np.ndarray, statistics: np.ndarray) -> np.ndarray:
            return advantages


class MovesValuesAway(CleanValues):
    caught_by = ("test_a_value_head_learns_the_numbers_of_records",)

    class Backend(CleanValues.Backend):
        def _moved(self, targets: np.ndarray) -> np.float32:
            return np.float32(self._head - 0.3 * (targets - self._head).mean())


class MeanOfMeans(Clean):
    caught_by = ("test_micro_batches_do_not_matter",)

    class Backend(FakeTrainer):
        """Each micro-batch is divided by its own number of actions."""

        def _micro_batch(
            self, indexes: Sequence[int], advantages: np.ndarray
        ) -> tuple[float, np.ndarray, int]:
            loss, gradient, actions = super()._micro_batch(indexes, advantages)
            return loss / actions, gradient / actions, 1


class SumInsteadOfMean(Clean):
    caught_by = (
        "test_the_loss_is_a_mean_over_actions",
        "test_the_loss_falls",
        "test_an_evaluation_adds_up_and_changes_nothing",
    )

    class Backend(FakeTrainer):
        def _loss(self, advantages: np.ndarray, minibatch: int) -> tuple[float, np.ndarray]:
            loss, gradient = super()._loss(advantages, minibatch)
            actions = sum(len(record.columns["action_ids"]) for record in self._records)
            return loss * actions, gradient * actions


class MaskedActionsCount(Clean):
    caught_by = (
        "test_masked_actions_have_no_influence",
        "test_an_evaluation_adds_up_and_changes_nothing",
    )

    class Backend(FakeTrainer):
        def _micro_batch(
            self, indexes: Sequence[int], advantages: np.ndarray
        ) -> tuple[float, np.ndarray, int]:
            for i in indexes:
                self._records[i].columns["action_mask"][:] = 1  # type: ignore[index]
            return super()._micro_batch(indexes, advantages)


class TellsTheNormAfterClipping(Clean):
    caught_by = ("test_the_gradient_norm_is_told_before_clipping",)

    class Backend(FakeTrainer):
        def _loss(self, advantages: np.ndarray, minibatch: int) -> tuple[float, np.ndarray]:
            loss, gradient = super()._loss(advantages, minibatch)
            return loss, gradient / max(1.0, float(np.linalg.norm(gradient)) / 10.0)


class TrainsTheFirstMinibatchOnly(Clean):
    caught_by = ("test_every_minibatch_teaches",)

    class Backend(FakeTrainer):
        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            return super().train(step, advantages, 1, epochs)


class RanksDoNotMeet(Clean):
    traits = Traits(saves_in_background=True, sharding=True)
    caught_by = ("test_two_ranks_train_as_one",)


class NeedsADirectory(FakeTrainer):
    """Is made in processes of their own, so it has a name of its own."""

    def __init__(self, config: FakeTrainerConfig, context: WorkerContext) -> None:
        super().__init__(config, context)
        if context.ranks > 1 and not context.rendezvous:
            raise FileNotFoundError("there is no directory to meet in")


class MeetsInADirectoryOnly(Clean):
    provider = replace(Clean.provider, factory=f"{__name__}:NeedsADirectory")
    traits = Traits(saves_in_background=True, sharding=True, sharding_over_nodes=True)
    caught_by = ("test_two_ranks_train_as_one", "test_ranks_meet_at_an_address")
    Backend = NeedsADirectory


class ForgetsTheVersion(Clean):
    caught_by = (
        "test_train_sets_the_version",
        "test_a_rank_may_get_no_records",
        "test_a_saved_trainer_goes_on_as_if_never_stopped",
        "test_a_save_in_the_background_is_of_the_moment_it_began",
    )

    class Backend(FakeTrainer):
        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            metrics = super().train(step, advantages, minibatches, epochs)
            self.version = 0
            return metrics


class LacksAMetric(Clean):
    caught_by = (
        "test_the_promised_metrics_are_there_and_finite",
        "test_an_objective_sees_the_metrics_of_each_step_once",
    )

    class Backend(FakeTrainer):
        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            metrics = super().train(step, advantages, minibatches, epochs)
            return {name: value for name, value in metrics.items() if name != "clip_share"}


class MeasuresNoGap(Clean):
    caught_by = (
        "test_the_gap_to_the_rollout_is_measured",
        "test_log_probs_at_the_start_of_a_step_are_those_before_its_first_update",
        "test_an_objective_sees_the_metrics_of_each_step_once",
    )

    class Backend(FakeTrainer):
        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            return super().train(step, advantages, minibatches, epochs) | {"logprob_gap_max": 0.0}


class SwallowsWhatIsNotFinite(Clean):
    caught_by = ("test_numbers_that_are_not_finite_stop_the_run",)

    class Backend(FakeTrainer):
        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            return super().train(step, np.nan_to_num(advantages), minibatches, epochs)


class NeedsARecord(Clean):
    caught_by = ("test_a_rank_may_get_no_records",)

    class Backend(FakeTrainer):
        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            return super().train(step, advantages, minibatches, epochs) | {
                "first": float(advantages[0])
            }


class ForgetsARecord(Clean):
    caught_by = ("test_prepare_answers_for_every_record",)

    class Backend(FakeTrainer):
        def prepare(self, records: Any, scalars: frozenset[str]) -> list[dict[str, float]]:
            return super().prepare(records, scalars)[:-1]


class ExportsATensorTwice(Clean):
    caught_by = (
        "test_every_tensor_is_exported_once_as_announced",
        "test_saved_weights_are_the_exported_ones",
    )

    class Backend(FakeTrainer):
        def weight_specs(self) -> list[TensorSpec]:
            return [*super().weight_specs(), super().weight_specs()[-1]]

        def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
            tensors = list(super().export_weights())
            yield from [*tensors, tensors[-1]]


class ExportsWhatItDidNotAnnounce(Clean):
    caught_by = ("test_every_tensor_is_exported_once_as_announced",)

    class Backend(FakeTrainer):
        def weight_specs(self) -> list[TensorSpec]:
            return super().weight_specs()[::-1]


class SavesHalfItsState(Clean):
    caught_by = (
        "test_a_saved_trainer_goes_on_as_if_never_stopped",
        "test_a_save_in_the_background_is_of_the_moment_it_began",
        "test_masked_actions_have_no_influence",
        "test_the_loss_is_a_mean_over_actions",
    )

    class Backend(FakeTrainer):
        """Has momentum, and saves the weights without it."""

        _momentum = np.float64(0)

        def _loss(self, advantages: np.ndarray, minibatch: int) -> tuple[float, np.ndarray]:
            loss, gradient = super()._loss(advantages, minibatch)
            self._momentum = 0.5 * self._momentum + gradient
            return loss, np.asarray(self._momentum)


class SavesWhatItHasWhenItFinishes(Clean):
    caught_by = ("test_a_save_in_the_background_is_of_the_moment_it_began",)

    class Backend(FakeTrainer):
        def finish_save(self) -> None:
            if self._begun is not None:
                self.begin_save(self._begun[0].parent)
            super().finish_save()


class ForgetsWhatItsObjectiveLearned(Clean):
    caught_by = ("test_what_an_objective_has_learned_is_saved_and_loaded",)

    class Backend(FakeTrainer):
        def load(self, directory: Path) -> None:
            objective = self._objective
            self._objective = None
            super().load(directory)
            self._objective = objective


class ShowsItsObjectiveEachUpdate(Clean):
    caught_by = ("test_an_objective_sees_the_metrics_of_each_step_once",)

    class Backend(FakeTrainer):
        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            metrics = super().train(step, advantages, minibatches, epochs)
            if isinstance(self._objective, SeesSteps):
                self._objective.observe(metrics)
            return metrics


class SavesInTheBackgroundUnasked(Clean):
    traits = Traits()
    caught_by = ("test_saving_in_the_background_is_claimed_where_it_is_there",)


class CleanDevice(Clean):
    """Its device is the host."""

    traits = Traits(saves_in_background=True, device_weights=True)

    class Backend(FakeTrainer):
        def push_writer(
            self, wanted: str, offers: Sequence[Offers], path: Path, nbytes: int
        ) -> None: ...

        def export_tensors(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
            return self.export_weights()


class ExportsOtherBytesFromTheDevice(CleanDevice):
    caught_by = ("test_tensors_on_the_device_are_the_exported_ones",)

    class Backend(CleanDevice.Backend):
        def export_tensors(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
            return ((spec, array[::-1]) for spec, array in self.export_weights())


class CleanTokens(Clean):
    """Gives its objective the log-probs of other tokens, out of the table."""

    traits = replace(Clean.traits, token_logprobs=True)

    class Backend(FakeTrainer):
        def __init__(self, config: FakeTrainerConfig, context: WorkerContext) -> None:
            super().__init__(config, context)
            self._objective = context.parts.get("objective")
            self._given = context.given

        def tokens(self, table: Any, ids: Any) -> Any:
            return table[ids]

        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            import torch

            for record in self._records if self._given else ():
                table = torch.from_numpy(fake.log_softmax(self._logits)).requires_grad_()
                ids = torch.from_numpy(record.columns["kit_ids"].astype(np.int64))
                one = torch.ones(len(ids))
                columns = {"kit_ids": ids, "mask": one > 0, "advantage": one, "rollout_logp": one}
                tokens = self.tokens(table, ids)
                self._objective.loss(columns, {"logp": table[ids[:, 0]], "logp@kit_ids": tokens})
            return super().train(step, advantages, minibatches, epochs)

    def build(self, *args: Any, **changes: Any) -> FakeTrainer:
        return self.Backend(FakeTrainerConfig(), *args)


class GivesTheActionForEveryToken(CleanTokens):
    caught_by = ("test_log_probs_of_other_tokens_are_those_of_the_actions_distributions",)

    class Backend(CleanTokens.Backend):
        def tokens(self, table: Any, ids: Any) -> Any:
            return table[ids[:, :1].expand_as(ids)]


class GivesTokensWithoutAGradient(CleanTokens):
    caught_by = ("test_log_probs_of_other_tokens_are_those_of_the_actions_distributions",)

    class Backend(CleanTokens.Backend):
        def tokens(self, table: Any, ids: Any) -> Any:
            return table.detach()[ids]


class CleanAges(Clean):
    """Shows its objective the columns of every record, ages among them."""

    class Backend(FakeTrainer):
        def __init__(self, config: FakeTrainerConfig, context: WorkerContext) -> None:
            super().__init__(config, context)
            self._objective = context.parts.get("objective")

        def ages(self, record: TrainRecord, step: int) -> np.ndarray:
            actions = len(record.columns["action_ids"])
            return action_ages(record.columns, actions, record.version, step)

        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            import torch

            for record in self._records if isinstance(self._objective, SeesAges) else ():
                logp = torch.from_numpy(record.columns["logp"].copy())
                mask = torch.from_numpy(record.columns["action_mask"] > 0)
                columns = {"mask": mask, "advantage": logp, "rollout_logp": logp}
                columns["age"] = torch.from_numpy(self.ages(record, step))
                self._objective.loss(columns, {"logp": logp})
            return super().train(step, advantages, minibatches, epochs)


_AGES = "test_an_objective_that_requires_ages_gets_that_of_each_action"


class AgesByTheFirstAction(CleanAges):
    """All actions of a record are as old as its first one."""

    caught_by = (_AGES,)

    class Backend(CleanAges.Backend):
        def ages(self, record: TrainRecord, step: int) -> np.ndarray:
            return np.full_like(super().ages(record, step), step - record.version)


class AgesByTheNextVersion(CleanAges):
    """Ages are counted from the weights that the step makes."""

    caught_by = (_AGES,)

    class Backend(CleanAges.Backend):
        def ages(self, record: TrainRecord, step: int) -> np.ndarray:
            return super().ages(record, step + 1)


class SavesTheFirstWeights(Clean):
    caught_by = ("test_saved_weights_are_the_exported_ones",)

    class Backend(FakeTrainer):
        def save_pretrained(self, directory: Path) -> None:
            directory.mkdir()
            write_safetensors(
                directory / "model.safetensors", fake.tensors_of(fake.initial_logits(0))
            )


class SavesAnotherShape(Clean):
    """The bytes are right, and the file has another ``weights_sha256`` than a checkpoint says."""

    caught_by = ("test_saved_weights_are_the_exported_ones",)

    class Backend(FakeTrainer):
        def save_pretrained(self, directory: Path) -> None:
            directory.mkdir()
            flat = [
                (TensorSpec(spec.name, spec.dtype, (1, *spec.shape), spec.nbytes), array)
                for spec, array in self.export_weights()
            ]
            write_safetensors(directory / "model.safetensors", flat)


# -- trainer and generator -------------------------------------------------------------------------


class CleanPair(TrainerWithGeneratorContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = fake.AbleTrainerConfig().traits()
    Backend: ClassVar[type[FakeTrainer]] = FakeTrainer
    Generator: ClassVar[type[FakeGenerator]] = FakeGenerator

    @pytest.fixture
    def trainer(self, context: WorkerContext) -> FakeTrainer:
        return self.Backend(FakeTrainerConfig(learning_rate=0.5), context)

    @pytest.fixture
    def generator(self, context: WorkerContext) -> FakeGenerator:
        return self.Generator(fake.FakeGeneratorConfig(), context)


class BeginsFromOtherWeights(CleanPair):
    caught_by = ("test_before_the_first_push_they_agree",)

    class Backend(FakeTrainer):
        def __init__(self, config: FakeTrainerConfig, context: WorkerContext) -> None:
            super().__init__(config, context)
            self._logits = fake.initial_logits(1)


class ExportsTheWeightsBefore(CleanPair):
    caught_by = ("test_after_each_push_they_agree",)

    class Backend(FakeTrainer):
        """Its export lags behind by one update."""

        _before = fake.initial_logits(0)

        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            self._before = self._logits
            return super().train(step, advantages, minibatches, epochs)

        def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
            yield from fake.tensors_of(self._before)


class HidesTheGap(CleanPair):
    caught_by = ("test_a_push_that_did_not_come_shows_as_a_gap",)

    class Backend(FakeTrainer):
        def train(
            self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
        ) -> dict[str, float]:
            return super().train(step, advantages, minibatches, epochs) | {"logprob_gap_max": 0.0}


class RoundsWhatItLoads(CleanPair):
    caught_by = ("test_the_generator_holds_the_exported_bytes",)

    class Generator(FakeGenerator):
        """Holds 24 bits of every 32, which is too little to see in a log-prob."""

        def commit_weights(self, plan: Any) -> None:
            super().commit_weights(plan)
            self._logits = (self._logits.view(np.uint32) & 0xFFFFFF00).view(np.float32)


# -- adapters --------------------------------------------------------------------------------------


class Adapted(FakeTrainer):
    """Trains its logits as an adapter of rank 1 on a matrix of one column: A is [[1]]."""

    target = "head"
    scale = 2.0

    def adapter_facts(self) -> AdapterFacts | None:
        return AdapterFacts(1, self.scale, [self.target], "1" * 64)

    def adapter_specs(self) -> list[TensorSpec]:
        letters = len(self._logits)
        first, second = (f"base_model.model.{self.target}.lora_{half}.weight" for half in "AB")
        return [
            TensorSpec(first, "F32", (1, 1), 4),
            TensorSpec(second, "F32", (letters, 1), 4 * letters),
        ]

    def export_adapter(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        change = (self._logits - fake.initial_logits(0)) / np.float32(self.scale)
        for spec, values in zip(
            self.adapter_specs(), (np.ones(1, np.float32), change), strict=True
        ):
            yield spec, values.view(np.uint8)

    def weight_specs(self) -> list[TensorSpec]:
        letters = len(self._logits)
        return [TensorSpec(f"{self.target}.weight", "F32", (letters, 1), 4 * letters)]

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        yield self.weight_specs()[0], self._logits.view(np.uint8)


class CleanAdapter(Clean):
    traits = replace(Clean.traits, adapters=True)
    Adapter: ClassVar[type[Adapted]] = Adapted

    @pytest.fixture
    def adapter_trainer(self, trainer_context: WorkerContext) -> Adapted:
        return self.Adapter(FakeTrainerConfig(), trainer_context)


_ON_THE_BASE = ("test_an_adapter_put_on_the_base_gives_the_exported_weights",)


class NamesAnotherScale(CleanAdapter):
    caught_by = _ON_THE_BASE

    class Adapter(Adapted):
        def adapter_facts(self) -> AdapterFacts | None:
            return AdapterFacts(1, 1.0, [self.target], "1" * 64)


class SendsHalvesInTheWrongOrder(CleanAdapter):
    caught_by = _ON_THE_BASE

    class Adapter(Adapted):
        def adapter_specs(self) -> list[TensorSpec]:
            return super().adapter_specs()[::-1]

        def export_adapter(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
            change = (self._logits - fake.initial_logits(0)) / np.float32(self.scale)
            parts = (change, np.ones(1, np.float32))
            for spec, values in zip(self.adapter_specs(), parts, strict=True):
                yield spec, values.view(np.uint8)


class TrainsAnAdapterThatItDoesNotName(CleanAdapter):
    caught_by = _ON_THE_BASE

    class Adapter(Adapted):
        def adapter_facts(self) -> AdapterFacts | None:
            return None


class OnItsBase(FakeGenerator):
    """Puts adapters on the logits with which it began."""

    _adapter = False

    def begin_weights(self, plan: WeightPlan) -> None:
        self._adapter = plan.adapter is not None
        if plan.adapter is None:
            super().begin_weights(plan)
        elif plan.adapter.base != "1" * 64:
            raise WeightMismatch("the adapter is for another base", where="fake")

    def commit_weights(self, plan: WeightPlan) -> None:
        if not self._adapter:
            super().commit_weights(plan)
            return
        first, second = (self._incoming[spec.name] for spec in plan.tensors)
        assert plan.adapter is not None
        self._logits = self.base() + np.float32(plan.adapter.scale) * second * first
        self.version = plan.version

    def base(self) -> np.ndarray:
        return fake.initial_logits(0)

    def fingerprint(self) -> dict[str, int]:
        return super().fingerprint() | {
            name: xxhash.xxh3_64_intdigest(part.tobytes()) for name, part in self._incoming.items()
        }


class CleanAdapterPair(CleanPair):
    adapter_config: ClassVar[dict[str, int]] = {"rank": 1}
    Generator: ClassVar[type[FakeGenerator]] = OnItsBase

    @pytest.fixture
    def adapter_trainer(self, context: WorkerContext) -> Adapted:
        return Adapted(FakeTrainerConfig(learning_rate=0.5), context)


class AddsEachAdapterToTheOneBefore(CleanAdapterPair):
    caught_by = ("test_after_each_push_of_an_adapter_they_agree",)

    class Generator(OnItsBase):
        def base(self) -> np.ndarray:
            return self._logits


class KeepsSamplingFromTheBase(CleanAdapterPair):
    caught_by = ("test_after_each_push_of_an_adapter_they_agree",)

    class Generator(OnItsBase):
        def commit_weights(self, plan: WeightPlan) -> None:
            before = self._logits
            super().commit_weights(plan)
            if self._adapter:
                self._logits = before


class TakesAnAdapterOfAnyBase(CleanAdapterPair):
    caught_by = ("test_an_adapter_for_another_base_is_refused",)

    class Generator(OnItsBase):
        def begin_weights(self, plan: WeightPlan) -> None:
            self._adapter = plan.adapter is not None
            if not self._adapter:
                super().begin_weights(plan)
