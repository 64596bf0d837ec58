"""The contract of a trainer.

Its updates follow from the records alone, and its exports and checkpoints are complete.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.algorithms import LOGP_OF, ActionScalars
from gcore_core.contract.columns import column_of_versions
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, NonFiniteLoss
from gcore_core.contract.generator import ScoresLogprobs
from gcore_core.contract.records import UNSAMPLED, TensorSpec
from gcore_core.contract.trainer import EvaluatesLoss, SavesInBackground, Trainer, TrainRecord
from gcore_core.contract.weight_transfer import SendsDevice
from gcore_core.contract.weights_hash import WeightsHash
from gcore_testing.contracts.adapters import TrainsAdapters
from gcore_testing.contracts.base import claims, closing
from gcore_testing.contracts.trainer_sleep import TrainerSleepTests
from gcore_testing.contracts.weights import ITEM_BYTES, digests, exported, largest_change
from gcore_testing.safetensors_files import read_safetensors

#: Metrics of a step that every trainer gives.
METRICS = [
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "kl",
    "clip_share",
    "logprob_gap_max",
    "logprob_gap_mean",
]
#: What ``logprobs`` gets of a record.
SCORED = ("prompt_ids", "action_ids", "logp", "action_mask", "temperature")


class PolicyGradient:
    """Is the objective -advantage * logp over trained actions.

    It is linear in the advantages, which some tests rely on.
    """

    requires: frozenset[str] = frozenset()

    def loss(
        self, columns: Mapping[str, Any], current: Mapping[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        mask = columns["mask"].to(current["logp"].dtype)
        return -(columns["advantage"] * current["logp"] * mask).sum(), self.weight(columns), {}

    def weight(self, columns: Mapping[str, Any]) -> Any:
        return columns["mask"].to(columns["rollout_logp"].dtype).sum()


class SeesSteps(PolicyGradient):
    """Remembers the metrics of every step that it was shown."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def observe(self, metrics: Mapping[str, float]) -> None:
        self.seen.append(dict(metrics))

    def state(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


class TokenGradient(PolicyGradient):
    """Learns from log-probs of two tokens at each action, too, and keeps what it was given.

    seen: for each call (ids [A, 2], logp [A], log-probs of the ids [A, 2]).
    """

    IDS: ClassVar[str] = "kit_ids"
    requires: frozenset[str] = frozenset({IDS, LOGP_OF + IDS})

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any, Any]] = []

    def loss(
        self, columns: Mapping[str, Any], current: Mapping[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        tokens = current[LOGP_OF + self.IDS]
        self.seen.append((columns[self.IDS], current["logp"], tokens))
        loss, weight, metrics = super().loss(columns, current)
        return loss - 0.1 * tokens[columns["mask"]].sum(), weight, metrics


class SeesAges(PolicyGradient):
    """Keeps the age of each action that it was given, by the action's log-prob.

    seen: (log-prob under the weights that sampled the action, age).
    """

    requires: frozenset[str] = frozenset({"age"})

    def __init__(self) -> None:
        self.seen: set[tuple[float, int]] = set()

    def loss(
        self, columns: Mapping[str, Any], current: Mapping[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        self.seen |= set(
            zip(columns["rollout_logp"].tolist(), columns["age"].tolist(), strict=True)
        )
        return super().loss(columns, current)


class SquaredError:
    """Is half the squared distance of values to their record's number, over trained states."""

    requires = frozenset({"values"})

    def loss(self, columns: Mapping[str, Any], current: Mapping[str, Any]) -> Any:
        mask = columns["mask"]
        apart = current["values"][mask] - columns["advantage"][mask]
        return (apart * apart).sum() / 2, self.weight(columns), {}

    def weight(self, columns: Mapping[str, Any]) -> Any:
        return columns["mask"].sum().float()


class LessTheMean:
    """Gives every action its record's reward, less the mean over all trained actions."""

    group_size = 4
    requires: frozenset[str] = frozenset()

    def per_action(self, record: ActionScalars) -> tuple[np.ndarray, np.ndarray]:
        rewards = np.where(record.mask, record.reward, 0.0)
        return rewards, rewards

    def statistics(self, advantages: np.ndarray) -> np.ndarray:
        return np.array([advantages.size, advantages.sum()], np.float64)

    def of(self, advantages: np.ndarray, statistics: np.ndarray) -> np.ndarray:
        return np.asarray(advantages - statistics[1] / statistics[0])


class TrainerContract(TrainsAdapters, TrainerSleepTests):
    """To test a trainer, override ``provider``, or the fixture ``trainer``.

    tolerance: how much weights may differ after an update that was split differently, and how much
        metrics may, absolute and relative.
    micro_batches: settings under which the backend computes an update in its smallest parts.
    vocabulary: actions are drawn from 3..vocabulary-1.

    ``config`` needs a learning rate that teaches within a few steps and no weight decay. Adam needs
    an eps of about the gradients' size. Otherwise it turns the rounding errors of gradients that
    should be zero into whole steps.
    """

    kind: ClassVar[str] = "trainer"
    tolerance: ClassVar[float] = 1e-5
    micro_batches: ClassVar[Mapping[str, Any]] = {}
    vocabulary: ClassVar[int] = 9

    @pytest.fixture
    def objective(self) -> Any:
        """Gives the objective that the trainer is made with. It is linear in the advantages."""
        return PolicyGradient()

    @pytest.fixture
    def trainer_context(self, context: WorkerContext, objective: Any) -> WorkerContext:
        return replace(context, role="policy", parts={"objective": objective}, columns=("values",))

    @pytest.fixture
    def trainer(self, trainer_context: WorkerContext) -> Iterator[Any]:
        yield from closing(self.build(trainer_context))

    @pytest.fixture
    def sees_steps(self) -> SeesSteps:
        return SeesSteps()

    @pytest.fixture
    def showing_trainer(
        self, trainer_context: WorkerContext, sees_steps: SeesSteps
    ) -> Iterator[Any]:
        """Gives a trainer whose objective adapts to steps."""
        context = replace(trainer_context, parts={"objective": sees_steps})
        yield from closing(self.build(context))

    @pytest.fixture
    def columns(self) -> tuple[str, ...]:
        """Gives the names of the columns that a role of this trainer gives."""
        return ("values", "next_values")

    @pytest.fixture
    def annotating_context(
        self, context: WorkerContext, objective: Any, columns: tuple[str, ...]
    ) -> WorkerContext:
        """Gives the context of a role that gives columns: of values, where the trainer has them."""
        has_values = self.claimed().value_head
        parts = {"objective": SquaredError() if has_values else objective}
        return replace(context, role="critic", parts=parts, columns=columns)

    @pytest.fixture
    def annotating(self, annotating_context: WorkerContext) -> Iterator[Any]:
        yield from closing(self.build(annotating_context))

    @pytest.fixture
    def split_trainer(self, trainer_context: WorkerContext) -> Iterator[Any]:
        """Gives a trainer that is like ``trainer`` but computes an update in its smallest parts."""
        if not self.micro_batches:
            self.not_claimed("micro-batches (name the settings in `micro_batches`)")
        yield from closing(self.build(trainer_context, **self.micro_batches))

    @pytest.fixture
    def records(self) -> list[TrainRecord]:
        return make_records(self.vocabulary)

    @pytest.fixture
    def advantages(self, records: list[TrainRecord]) -> np.ndarray:
        return np.random.default_rng(1).standard_normal(len(records))

    # -- updates -----------------------------------------------------------------------------------

    def test_it_is_a_trainer(self, trainer: Any) -> None:
        assert isinstance(trainer, Trainer), (
            "it lacks a method of gcore_core.contract.trainer.Trainer"
        )

    def test_the_promised_metrics_are_there_and_finite(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        metrics = train(trainer, records, advantages)
        assert [name for name in METRICS if not math.isfinite(metrics.get(name, math.nan))] == []

    def test_train_sets_the_version(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        train(trainer, records, advantages, step=6)
        assert trainer.version == 7

    def test_a_skipped_step_changes_the_version_alone(self, trainer: Any) -> None:
        before = exported(trainer)
        trainer.skip(6)
        assert trainer.version == 7
        assert digests(exported(trainer)) == digests(before), "weights changed"

    def test_zero_advantages_leave_the_weights_bit_equal(
        self, trainer: Any, records: list[TrainRecord]
    ) -> None:
        before = exported(trainer)
        train(trainer, records, np.zeros(len(records)))
        assert digests(exported(trainer)) == digests(before)

    def test_the_loss_falls(self, trainer: Any, records: list[TrainRecord]) -> None:
        """Actions that are rewarded become likelier."""
        losses = [
            train(trainer, records, np.ones(len(records)), step=step)["loss"] for step in range(6)
        ]
        assert losses[-1] < losses[0], losses

    def test_every_minibatch_teaches(self, trainer: Any, records: list[TrainRecord]) -> None:
        """A minibatch after the first has an update of its own."""
        halved = [replace(record, minibatch=record.ordinal % 2) for record in records]
        advantages = np.array([float(record.minibatch) for record in halved])
        before = exported(trainer)
        train(trainer, halved, advantages, minibatches=2)
        assert digests(exported(trainer)) != digests(before)

    def test_micro_batches_do_not_matter(
        self, trainer: Any, split_trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """One part and many give the same loss, gradient norm and weights.

        The records have different lengths.
        """
        whole, parts = (train(t, records, advantages) for t in (trainer, split_trainer))
        for name in ("loss", "grad_norm"):
            assert parts[name] == pytest.approx(
                whole[name], rel=self.tolerance, abs=self.tolerance
            ), name
        assert largest_change(exported(trainer), exported(split_trainer)) <= self.tolerance

    def test_the_loss_is_a_mean_over_actions(
        self, trainer: Any, records: list[TrainRecord]
    ) -> None:
        """A batch that holds every record twice gives the same loss and gradient norm."""
        advantages = np.where([r.columns["action_ids"].size > 4 for r in records], 1.0, -1.0)
        twice = [replace(r, ordinal=r.ordinal + shift) for shift in (0, 100) for r in records]
        with restored(trainer) as back:
            once = train(trainer, records, advantages)
            back()
            doubled = train(trainer, twice, np.tile(advantages, 2))
        for name in ("loss", "grad_norm"):
            assert doubled[name] == pytest.approx(once[name], rel=1e-3, abs=self.tolerance), name

    def test_masked_actions_have_no_influence(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """Another action at a masked place leaves the update as it was.

        The masked action is the last of its record, so that no other action depends on it.
        """
        changed = [
            replace(record, columns=_other_masked_actions(record.columns)) for record in records
        ]
        with restored(trainer) as back:
            one = train(trainer, records, advantages)
            after = exported(trainer)
            back()
            other = train(trainer, changed, advantages)
        assert other["loss"] == pytest.approx(one["loss"], rel=self.tolerance, abs=self.tolerance)
        assert largest_change(after, exported(trainer)) <= self.tolerance

    def test_the_gradient_norm_is_told_before_clipping(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """Advantages a thousand times as large give a norm a thousand times as large."""
        with restored(trainer) as back:
            one = train(trainer, records, advantages)["grad_norm"]
            back()
            large = train(trainer, records, 1000 * advantages)["grad_norm"]
        assert large == pytest.approx(1000 * one, rel=1e-2)

    def test_the_gap_to_the_rollout_is_measured(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """Rollout log-probs that are all 30 nats lower show as a larger gap."""
        lower = [
            replace(r, columns={**r.columns, "logp": r.columns["logp"] - np.float32(30)})
            for r in records
        ]
        with restored(trainer) as back:
            one = train(trainer, records, advantages)
            back()
            other = train(trainer, lower, advantages)
        assert other["logprob_gap_max"] > one["logprob_gap_max"] + 10

    def test_numbers_that_are_not_finite_stop_the_run(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        before = exported(trainer)
        advantages[0] = np.nan
        with pytest.raises(NonFiniteLoss):
            train(trainer, records, advantages)
        assert digests(exported(trainer)) == digests(before), (
            "the weights were changed all the same"
        )

    def test_a_rank_may_get_no_records(self, trainer: Any) -> None:
        before = exported(trainer)
        train(trainer, [], np.zeros(0), step=2)
        assert trainer.version == 3
        assert digests(exported(trainer)) == digests(before)

    def test_prepare_answers_for_every_record(
        self, trainer: Any, records: list[TrainRecord]
    ) -> None:
        assert [dict(row) for row in trainer.prepare(records, frozenset())] == [{}] * len(records)

    @claims("annotates")
    def test_annotating_gives_finite_columns_and_changes_nothing(
        self, annotating: Any, columns: tuple[str, ...], records: list[TrainRecord]
    ) -> None:
        """Each action gets a value in every column, which follows from the record alone."""
        before = digests(exported(annotating))
        answers = annotating.annotate(records)
        for record, given in zip(records, answers, strict=True):
            (alone,) = annotating.annotate([record])
            assert set(given) == set(columns)
            for name, column in given.items():
                shape = record.columns["action_ids"].shape
                assert (column.dtype, column.shape) == (np.float32, shape)
                assert np.isfinite(column).all()
                assert np.abs(alone[name] - column).max() <= self.tolerance
        assert annotating.annotate([]) == [], "a rank may have no records"
        assert digests(exported(annotating)) == before

    @claims("value_head")
    def test_a_value_head_learns_the_numbers_of_records(
        self, context: WorkerContext, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """The squared distance of values to each record's number falls."""
        context = replace(context, role="critic", parts={"objective": SquaredError()})
        for trainer in closing(self.build(context)):
            losses = [train(trainer, records, advantages, step=step)["loss"] for step in range(4)]
            assert losses[-1] < losses[0]
            assert losses[0] > 0

    @claims("action_advantages")
    def test_advantages_of_actions_train_as_those_of_records_where_they_are_equal(
        self,
        trainer: Any,
        trainer_context: WorkerContext,
        records: list[TrainRecord],
        advantages: np.ndarray,
    ) -> None:
        """Each action gets its record's number less the mean of all actions, as of two ways."""
        masks = [record.columns["action_mask"] != 0 for record in records]
        counts = np.array([mask.sum() for mask in masks])
        train(trainer, records, advantages - (advantages @ counts) / counts.sum())
        parts = {**trainer_context.parts, "advantage": LessTheMean()}
        for other in closing(self.build(replace(trainer_context, parts=parts))):
            before = exported(other)
            train(other, records, advantages)
            assert largest_change(exported(trainer), exported(other)) <= self.tolerance
            assert largest_change(before, exported(other)) > 0

    @claims("sharding")
    def test_two_ranks_train_as_one(self, model: Mapping[str, Any], tmp_path: Path) -> None:
        """Two processes give the weights that one gives.

        Their shares of the records are unequal, and so are the numbers of actions in them.
        """
        from gcore_testing.contracts.rank import trained_by

        one, two = (
            trained_by(
                ranks,
                self.description(),
                self.config,
                model,
                (tmp_path / f"ranks{ranks}", self.vocabulary),
            )
            for ranks in (1, 2)
        )
        assert largest_change(one, two) <= self.tolerance

    @claims("sharding_over_nodes")
    def test_ranks_meet_at_an_address(self, model: Mapping[str, Any], tmp_path: Path) -> None:
        """Two processes without a common directory give the weights of two that have one."""
        from gcore_testing.contracts.rank import trained_by

        in_directory, at_address = (
            trained_by(
                2,
                self.description(),
                self.config,
                model,
                (tmp_path / f"meet{at_address}", self.vocabulary),
                at_address=at_address,
            )
            for at_address in (False, True)
        )
        assert largest_change(in_directory, at_address) == 0

    # -- weights -----------------------------------------------------------------------------------

    def test_every_tensor_is_exported_once_as_announced(self, trainer: Any) -> None:
        specs = trainer.weight_specs()
        names = [spec.name for spec in specs]
        assert sorted(set(names)) == sorted(names), "a tensor is announced twice"
        tensors = exported(trainer)
        assert [spec for spec, _ in tensors] == list(specs)
        for spec, array in tensors:
            assert array.dtype == np.uint8 and array.ndim == 1, f"{spec.name} must be flat uint8"
            assert array.nbytes == spec.nbytes == math.prod(spec.shape) * ITEM_BYTES[spec.dtype], (
                spec.name
            )

    @claims("device_weights")
    def test_tensors_on_the_device_are_the_exported_ones(self, trainer: Any) -> None:
        """They come in the same order, as flat bytes that can be copied to the host."""
        sends = isinstance(trainer, SendsDevice)
        assert sends, "device_weights is claimed, SendsDevice is not implemented"
        tensors = [
            (spec, content.nbytes, on_host(content)) for spec, content in trainer.export_tensors()
        ]
        assert [spec for spec, _, _ in tensors] == list(trainer.weight_specs())
        assert [nbytes for _, nbytes, _ in tensors] == [
            spec.nbytes for spec in trainer.weight_specs()
        ]
        assert digests([(spec, array) for spec, _, array in tensors]) == digests(exported(trainer))

    def test_a_saved_trainer_goes_on_as_if_never_stopped(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray, tmp_path: Path
    ) -> None:
        train(trainer, records, advantages, step=0)
        saved = digests(exported(trainer))
        directory = tmp_path / "state"
        directory.mkdir()
        trainer.save(directory)
        expected = [train(trainer, records, advantages, step=step)["loss"] for step in (1, 2)]
        after = digests(exported(trainer))
        trainer.load(directory)
        assert (trainer.version, digests(exported(trainer))) == (1, saved)
        assert [
            train(trainer, records, advantages, step=step)["loss"] for step in (1, 2)
        ] == expected
        assert digests(exported(trainer)) == after

    @claims("compares_logprobs")
    def test_log_probs_at_the_start_of_a_step_are_those_before_its_first_update(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        metrics = train(trainer, records, np.zeros(len(records)))
        before = trainer.start_logprobs()
        assert [len(own.logp) for own in before] == [len(r.columns["logp"]) for r in records]
        gaps = [
            np.abs(own.logp - record.columns["logp"])[record.columns["action_mask"] != 0].max()
            for own, record in zip(before, records, strict=True)
        ]
        assert max(gaps) == pytest.approx(metrics["logprob_gap_max"], abs=self.tolerance)
        train(trainer, records, advantages)
        start = trainer.start_logprobs()
        train(trainer, records, advantages, step=1)
        later = trainer.start_logprobs()
        for own, same, other in zip(before, start, later, strict=True):
            assert own.logp == pytest.approx(same.logp, abs=self.tolerance), "after the update"
            assert not np.allclose(own.logp, other.logp, atol=1e-7), "not of the second step"

    @claims("token_logprobs")
    def test_log_probs_of_other_tokens_are_those_of_the_actions_distributions(
        self, trainer_context: WorkerContext, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """Of each action's two tokens the first is the action itself, the second another one."""
        objective = TokenGradient()
        context = replace(
            trainer_context, parts={"objective": objective}, given=(TokenGradient.IDS,)
        )
        asked = [_with_other_tokens(record, self.vocabulary) for record in records]
        for trainer in closing(self.build(context)):
            train(trainer, asked, advantages)
        assert objective.seen
        for ids, logp, tokens in objective.seen:
            assert tokens.shape == ids.shape == (len(logp), 2)
            assert tokens.requires_grad, "they carry no gradient"
            own, other = (column.detach().double().cpu().numpy() for column in tokens.T)
            expected = logp.detach().double().cpu().numpy()
            np.testing.assert_allclose(own, expected, atol=self.tolerance, rtol=0)
            assert not np.allclose(own, other, atol=1e-7), "the ids are not looked at"
            assert (np.exp(own) + np.exp(other) <= 1 + self.tolerance).all(), "no distribution"

    def test_an_objective_that_requires_ages_gets_that_of_each_action(
        self, trainer_context: WorkerContext, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """It is by how many versions the step's weights are newer than those that sampled it.

        Some records have one version, some were cut, some nobody has sampled.
        """
        objective = SeesAges()
        step = 5
        versions = _some_versions(records, step)
        asked = [
            replace(
                record,
                version=int(own[0]),
                fresh=int(own[0]) == step,
                columns={**record.columns, **column_of_versions(own)},
            )
            for record, own in zip(records, versions, strict=True)
        ]
        context = replace(trainer_context, parts={"objective": objective})
        try:
            made = self.build(context)
        except ConfigError:
            self.not_claimed("the column age (an objective that requires it is refused)")
        for trainer in closing(made):
            trainer.skip(step - 1)
            train(trainer, asked, advantages, step=step)
        if not objective.seen:
            self.not_claimed("an objective whose loss is asked for")
        expected = {
            (float(logp), step - int(version) if version >= 0 else 0)
            for record, own in zip(records, versions, strict=True)
            for logp, version in zip(record.columns["logp"], own, strict=True)
        }
        assert objective.seen <= expected, "an action has another age"
        of_trained = {
            float(logp)
            for record in records
            for logp in record.columns["logp"][record.columns["action_mask"] > 0]
        }
        assert of_trained <= {logp for logp, _ in objective.seen}, "an action has no age"

    @claims("scores_logprobs")
    def test_log_probs_of_given_actions_are_those_of_the_weights_it_holds(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """They are what the next step begins with, and asking changes no weight."""
        has_it = isinstance(trainer, ScoresLogprobs)
        assert has_it, "it lacks the method logprobs"
        before = exported(trainer)
        columns = [{name: record.columns[name] for name in SCORED} for record in records]
        asked = trainer.logprobs(columns)
        assert digests(exported(trainer)) == digests(before), "weights changed"
        assert trainer.logprobs([]) == []
        train(trainer, records, advantages)
        later = trainer.logprobs(columns)
        # The record's own log-probs are no part of the question.
        others = [{**one, "logp": np.zeros_like(one["logp"])} for one in columns]
        for again, own in zip(trainer.logprobs(others), later, strict=True):
            np.testing.assert_allclose(again, own, atol=self.tolerance, rtol=0)
        train(trainer, records, advantages, step=1)
        for record, own, other in zip(records, asked, later, strict=True):
            assert own.dtype == other.dtype == np.float32
            assert own.shape == other.shape == record.columns["action_ids"].shape
            assert not np.allclose(own, other, atol=1e-7), "the update is not in them"
        if self.claimed().compares_logprobs:
            for own, start in zip(later, trainer.start_logprobs(), strict=True):
                np.testing.assert_allclose(own, start.logp, atol=self.tolerance, rtol=0)

    @claims("adapts_objective")
    def test_an_objective_sees_the_metrics_of_each_step_once(
        self,
        showing_trainer: Any,
        sees_steps: SeesSteps,
        records: list[TrainRecord],
        advantages: np.ndarray,
    ) -> None:
        """They are what ``train`` returns, and come after the step's last update."""
        for step in (0, 1):
            metrics = train(showing_trainer, records, advantages, step=step)
            assert len(sees_steps.seen) == step + 1, "it is shown a step once"
            shown = sees_steps.seen[-1]
            assert [name for name in METRICS if shown.get(name) != metrics[name]] == []

    @claims("adapts_objective")
    def test_what_an_objective_has_learned_is_saved_and_loaded(
        self,
        showing_trainer: Any,
        sees_steps: SeesSteps,
        records: list[TrainRecord],
        advantages: np.ndarray,
        tmp_path: Path,
    ) -> None:
        train(showing_trainer, records, advantages)
        saved = list(sees_steps.seen)
        showing_trainer.save(tmp_path)
        train(showing_trainer, records, advantages, step=1)
        assert sees_steps.seen != saved
        showing_trainer.load(tmp_path)
        assert sees_steps.seen == saved, "the objective's state is not that of the checkpoint"

    @claims("evaluates")
    def test_an_evaluation_adds_up_and_changes_nothing(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray
    ) -> None:
        """Sums of parts are the sum of all; neither weights nor prepared records are touched."""
        has_it = isinstance(trainer, EvaluatesLoss)
        assert has_it, "it lacks the method evaluate"
        before = exported(trainer)
        trainer.prepare(records, frozenset())
        whole = trainer.evaluate(records, advantages)
        assert digests(exported(trainer)) == digests(before), "weights changed"
        parts = [
            trainer.evaluate(records[part], advantages[part])
            for part in (slice(None, 1), slice(1, None))
        ]
        for name, sums in whole.items():
            added = np.sum([part.get(name, (0.0, 0.0)) for part in parts], 0)
            np.testing.assert_allclose(added, sums, rtol=1e-4, atol=1e-4, err_msg=name)
        assert whole["loss"][1] > 0
        assert sum(weight for _, weight in trainer.evaluate([], advantages[:0]).values()) == 0
        metrics = trainer.train(0, advantages, 1, 1)
        assert whole["loss"][0] / whole["loss"][1] == pytest.approx(
            metrics["loss"], rel=1e-4, abs=1e-5
        ), "it is not the loss of the update that follows"

    @claims("saves_in_background")
    def test_a_save_in_the_background_is_of_the_moment_it_began(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray, tmp_path: Path
    ) -> None:
        """Training goes on during a save and does not change what is saved.

        It is tried twice, since a second save may reuse what the first one left.
        """
        for step in (0, 2):
            train(trainer, records, advantages, step=step)
            saved = digests(exported(trainer))
            directory = tmp_path / f"state{step}"
            directory.mkdir()
            trainer.begin_save(directory)
            expected = train(trainer, records, advantages, step=step + 1)["loss"]
            after = digests(exported(trainer))
            trainer.finish_save()
            assert digests(exported(trainer)) == after, "finishing a save moved the weights"
            trainer.load(directory)
            assert (trainer.version, digests(exported(trainer))) == (step + 1, saved)
            assert train(trainer, records, advantages, step=step + 1)["loss"] == expected
            assert digests(exported(trainer)) == after

    def test_saving_in_the_background_is_claimed_where_it_is_there(self, trainer: Any) -> None:
        claimed = self.claimed().saves_in_background
        assert isinstance(trainer, SavesInBackground) == claimed, (
            f"saves_in_background claimed: {claimed}"
        )

    def test_saved_weights_are_the_exported_ones(
        self, trainer: Any, records: list[TrainRecord], advantages: np.ndarray, tmp_path: Path
    ) -> None:
        train(trainer, records, advantages)
        trainer.save_pretrained(tmp_path / "weights")
        files = sorted((tmp_path / "weights").glob("*.safetensors"))
        assert files, "save_pretrained wrote no safetensors"
        saved = [item for file in files for item in read_safetensors(file)]
        assert digests(saved) == digests(exported(trainer))
        assert weights_sha256(saved) == weights_sha256(exported(trainer)), (
            "names, dtypes or shapes of the saved weights are not those of the exported ones"
        )


@contextlib.contextmanager
def restored(trainer: Trainer) -> Iterator[Callable[[], None]]:
    """Yields a function that restores the trainer to its present state, by its own files."""
    with tempfile.TemporaryDirectory() as directory:
        trainer.save(Path(directory))
        yield lambda: trainer.load(Path(directory))


def weights_sha256(tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> str:
    """Returns the hash that names these weights, whatever their order."""
    weights = WeightsHash()
    for spec, content in tensors:
        weights.add(spec, np.ascontiguousarray(content).data)
    return weights.hexdigest()


def on_host(content: Any) -> np.ndarray:
    """Copies flat bytes to the host, from whatever device; torch's tensors have ``cpu``."""
    return np.asarray(content.cpu() if hasattr(content, "cpu") else content).copy()


def train(
    trainer: Trainer,
    records: Sequence[TrainRecord],
    advantages: np.ndarray,
    *,
    step: int = 0,
    minibatches: int = 1,
) -> dict[str, float]:
    """Prepares the records, trains on them for one epoch and returns the metrics."""
    trainer.prepare(records, frozenset())
    return trainer.train(step, advantages, minibatches, 1)


def make_records(vocabulary: int, groups: int = 4, samples: int = 3) -> list[TrainRecord]:
    """Makes sorted random records of 2 to 7 actions; the last action of each is masked.

    The arrays are read-only, as in a slab.
    """
    draw = np.random.default_rng(0)
    records = []
    for ordinal in range(groups):
        prompt = draw.integers(3, vocabulary, 2 + ordinal).astype(np.int32)
        for sample in range(samples):
            actions = 2 + (ordinal + 2 * sample) % 6
            mask = np.ones(actions, np.uint8)
            mask[-1] = 0
            columns: dict[str, np.ndarray] = {
                "prompt_ids": prompt,
                "action_ids": draw.integers(3, vocabulary, actions).astype(np.int32),
                "logp": np.log(draw.uniform(0.05, 0.2, actions)).astype(np.float32),
                "action_mask": mask,
                "temperature": np.ones((), np.float32),
                "text": np.zeros(0, np.uint8),
            }
            for column in columns.values():
                column.flags.writeable = False
            records.append(
                TrainRecord(ordinal=ordinal, sample=sample, minibatch=0, columns=columns)
            )
    return records


def _some_versions(records: Sequence[TrainRecord], step: int) -> list[np.ndarray]:
    """Returns which version sampled each action of the records, int32[A]; -1: none did.

    In turn, records are of the step's version, of an older one, of several, and of none.
    """
    versions = []
    for place, record in enumerate(records):
        actions = len(record.columns["logp"])
        rising = step - 4 + np.arange(actions) // 2
        of_kind = (step, step - 3, np.minimum(rising, step - 1), UNSAMPLED)[place % 4]
        versions.append(np.broadcast_to(np.asarray(of_kind, np.int32), (actions,)).copy())
    return versions


def _other_masked_actions(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the columns with another last action, which is masked, and another log-prob of it."""
    actions = columns["action_ids"].copy()
    logp = columns["logp"].copy()
    actions[-1] = 3 if actions[-1] != 3 else 4
    logp[-1] = -9.0
    return {**columns, "action_ids": actions, "logp": logp}


def _with_other_tokens(record: TrainRecord, vocabulary: int) -> TrainRecord:
    """Returns the record with ids of two tokens for each action: the action and the next one."""
    actions = record.columns["action_ids"]
    ids = np.stack([actions, 3 + (actions - 2) % (vocabulary - 3)], 1).astype(np.int32)
    return replace(record, columns={**record.columns, TokenGradient.IDS: ids})
