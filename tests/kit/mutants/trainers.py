"""Trainers with one fault each, alone and beside a generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.columns import Columns
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.trainer import StartLogprobs, TrainRecord
from gcore_core.contract.weight_transfer import Offers
from gcore_core.testing import TrainerContract, TrainerWithGeneratorContract, fake
from gcore_core.testing.fake import FakeGenerator, FakeTrainer, FakeTrainerConfig
from gcore_core.testing.safetensors_files import write_safetensors


class Clean(TrainerContract):
    provider = next(iter(fake.gcore_trainers()))
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[FakeTrainer]] = FakeTrainer

    @pytest.fixture
    def trainer(self, trainer_context: WorkerContext) -> FakeTrainer:
        return self.Backend(FakeTrainerConfig(), trainer_context)

    @pytest.fixture
    def split_trainer(self, context: WorkerContext) -> FakeTrainer:
        return self.Backend(FakeTrainerConfig(micro_batch=1), context)


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
    )

    class Backend(FakeTrainer):
        def _loss(self, advantages: np.ndarray, minibatch: int) -> tuple[float, np.ndarray]:
            loss, gradient = super()._loss(advantages, minibatch)
            actions = sum(len(record.columns["action_ids"]) for record in self._records)
            return loss * actions, gradient * actions


class MaskedActionsCount(Clean):
    caught_by = ("test_masked_actions_have_no_influence",)

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
    provider = replace(Clean.provider, capabilities=frozenset({"save.background", "sharding"}))
    caught_by = ("test_two_ranks_train_as_one",)


class NeedsADirectory(FakeTrainer):
    """Is made in processes of their own, so it has a name of its own."""

    def __init__(self, config: FakeTrainerConfig, context: WorkerContext) -> None:
        super().__init__(config, context)
        if context.ranks > 1 and not context.rendezvous:
            raise FileNotFoundError("there is no directory to meet in")


class MeetsInADirectoryOnly(Clean):
    provider = replace(
        Clean.provider,
        factory=f"{__name__}:NeedsADirectory",
        capabilities=frozenset({"save.background", "sharding", "sharding.nodes"}),
    )
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
    caught_by = ("test_the_promised_metrics_are_there_and_finite",)

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


class SavesInTheBackgroundUnasked(Clean):
    provider = replace(Clean.provider, capabilities=frozenset())
    caught_by = ("test_saving_in_the_background_is_claimed_where_it_is_there",)


class CleanDevice(Clean):
    """Its device is the host."""

    provider = replace(
        Clean.provider, capabilities=frozenset({"save.background", "weights.device"})
    )

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
