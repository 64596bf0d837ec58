"""Defines what the core calls on a backend that trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.records import AdapterFacts, TensorSpec
from gcore_core.contract.sentinel import Finding


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """Holds a record at its data-parallel rank.

    ordinal, sample: name it.
    minibatch: in which update of an epoch it trains.
    columns: as listed in ``gcore_core.contract.records``.
    media: ``Finished.media`` of its generator.
    fresh: whether this step's weights sampled it.
    tile: the part of its minibatch that it belongs to, see ``Assignment``. A rank that has one
        record of a tile has all of them.
    replica: number of the generator's replica that sampled it.
    version: of the weights that sampled its first action.
    truncated: whether it was cut before the policy ended it, so that more actions could follow.
    """

    ordinal: int
    sample: int
    minibatch: int
    columns: Columns
    media: Columns = field(default_factory=dict)
    fresh: bool = True
    tile: int = 0
    replica: int = 0
    version: int = 0
    truncated: bool = False


@runtime_checkable
class Trainer(Protocol):
    """Trains on one data-parallel rank of a policy.

    All ranks get the same calls in the same order, so collectives may be used. Records come sorted
    by (ordinal, sample). A rank may get none.

    version: of the weights that it holds.
    """

    version: int

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """Keeps the records for ``train`` and computes what the objective requires of them.

        That is old and reference log-probs. Returns for each record the named scalars ("kl_k1": sum
        over actions of logp - ref_logp, ...).
        """

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """Runs minibatches x epochs updates over the prepared records.

        Every loss is divided by a normaliser summed over all ranks. Sets ``version`` to step + 1.
        Raises NonFiniteLoss.

        Returns metrics that are already reduced over ranks, at least: loss, grad_norm (before
        clipping), learning_rate, entropy, kl, clip_share, logprob_gap_max (rollout against trainer,
        of fresh records, before the first update), logprob_gap_mean. Without logprob_gap_max the
        run ends, unless the trainer trains a value head.

        The metric ``busy_s`` is this rank's own: seconds it worked, without waiting for other
        ranks; 0 when it cannot tell. Without it the processor time of the process is taken, which
        says nothing about an accelerator.

        advantages: float64[records], in the order of the prepared records. Where the job has an
            advantage of level "action" (``WorkerContext.parts``), these are the records' rewards.
        """

    def skip(self, step: int) -> None:
        """Ends a step that has nothing to train on; neither ``prepare`` nor ``train`` is called in
        it. Sets ``version`` to step + 1 and changes nothing else.
        """

    def weight_specs(self) -> list[TensorSpec]:
        """Returns a spec of every tensor that ``export_weights`` will give, in its order."""

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Yields full tensors in Hugging Face layout, one at a time, as flat uint8.

        Ranks other than 0 yield empty arrays. Of tied weights only one is given, under the name
        that a checkpoint has.
        """

    def save(self, directory: Path) -> None:
        """Writes all that is needed to continue, in a format for any number of ranks."""

    def load(self, directory: Path) -> None:
        """Continues from what ``save`` wrote, also with another number of ranks."""

    def save_pretrained(self, directory: Path) -> None:
        """Writes weights and tokenizer in Hugging Face layout (safetensors).

        Every rank is asked, and may be asked again: a run whose disk is full waits with its trained
        weights and tries again. So a rank that cannot write raises OSError, or safetensors' own
        error, only after the collectives of the others, and keeps its weights.

        directory: may be there already, with files of a write that failed.
        """

    def close(self) -> None:
        """Frees devices and processes; no other call follows."""


@runtime_checkable
class SendsAdapter(Protocol):
    """Pushes a low-rank adapter in place of whole weights: trait ``adapters``.

    ``export_weights`` still gives the whole weights, with the adapter merged, to engines that
    cannot take the adapter alone.
    """

    def adapter_facts(self) -> AdapterFacts | None:
        """Returns what it trains; None where it trains the weights themselves.

        It is the same for the whole life of the trainer.
        """

    def adapter_specs(self) -> list[TensorSpec]:
        """Returns a spec of every tensor that ``export_adapter`` will give, in its order."""

    def export_adapter(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Yields the adapter's tensors, as ``export_weights`` does and ``WeightPlan`` names them.

        Ranks other than 0 yield empty arrays.
        """


@runtime_checkable
class SavesInBackground(Protocol):
    """Saves while training goes on: trait ``saves_in_background`` of a trainer.

    One save runs at a time. Other calls come between these two.
    """

    def begin_save(self, directory: Path) -> None:
        """Begins to save the state as it is now, as ``save`` does.

        It returns as soon as training may go on.
        """

    def finish_save(self) -> None:
        """Waits until this rank's part is on the disk; raises what failed.

        Without a save under way it does nothing.
        """


@runtime_checkable
class SleepsInRollout(Protocol):
    """Gives its memory to others while generators draw: trait ``sleeps`` of a trainer.

    Each rank is asked by itself, so neither method may use collectives. Asleep, whatever needs the
    weights raises an error that says so; a second ``sleep``, or ``wake`` of one that is awake, does
    nothing. The caller of a trainer wakes it before any other call.
    """

    def sleep(self) -> None:
        """Gives the memory of weights and optimizer back, and drops gradients.

        What a save in the background still needs is copied before. Raises PlacementError where
        there is no room for what must be kept.
        """

    def wake(self) -> None:
        """Takes the memory again, with the same bits of weights and optimizer."""


@dataclass(frozen=True, kw_only=True)
class StartLogprobs:
    """Holds a record's log-probs under the weights that its step began with.

    logp: float32[A], in nats, at the record's temperature.
    entropy: float32[A], of the distribution at each action, in nats; None where it was not needed.
    """

    logp: np.ndarray
    entropy: np.ndarray | None = None


@runtime_checkable
class DiagnosesExport(Protocol):
    """Compares what it exports with what it holds; asked only after an alarm, on every rank.

    No trait: a trainer that has the method is asked.
    """

    def diagnose_export(self) -> list[Finding]:
        """Returns a finding when what ``export_weights`` gives is not what it trains; else none.

        Bytes leave no doubt, so its score is 2.
        """


@runtime_checkable
class ComparesLogprobs(Protocol):
    """Gives the log-probs that a sentinel compares: trait ``compares_logprobs`` of a trainer."""

    def start_logprobs(self) -> Sequence[StartLogprobs | None]:
        """Returns what the last ``train`` computed before its first update, for each record.

        It is called once after each ``train`` and computes nothing again. It has an entry for each
        record of ``prepare``, in their order; None for one whose log-probs were not computed before
        the first update, such as later minibatches' under an objective without ``old_logp``.
        """


@runtime_checkable
class EvaluatesLoss(Protocol):
    """Computes the objective on records without an update: trait ``evaluates`` of a trainer."""

    def evaluate(
        self, records: Sequence[TrainRecord], advantages: np.ndarray
    ) -> dict[str, tuple[float, float]]:
        """Returns metric -> (sum, weight), summed over all ranks; the metric is their quotient.

        At least "loss", then the objective's. All ranks call it at the same time, each with
        records of its own, perhaps none. Weights, optimizer, and what ``prepare`` keeps stay as
        they are. Raises ConfigError for an objective that needs more than log-probs.

        advantages: float64[records].
        """
