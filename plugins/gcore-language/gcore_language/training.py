"""The training program of language policies, the same for every backend: an engine does forward,
backward and update.

The gradient of an update is sum(loss_sum) / sum(weight_sum) over all its micro-batches and ranks,
whatever their number. The weights do not depend on the parameters, so their sum is known before the
first backward pass, and every
loss is divided by it: a backend only has to add gradients up.

Metrics ``logprob_gap_max``, ``logprob_gap_mean`` and ``logprob_gap_share`` (of actions more than
1e-4 apart) compare rollout and trainer log-probs where both have the same weights: over the first
minibatch of a step, and over the others too when the objective requires ``old_logp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, NonFiniteLoss
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.trainer import TrainRecord
from gcore_language.images import Images
from gcore_language.packing import (
    FLAT_ROW_TOKENS,
    Batch,
    Layout,
    Sample,
    cheapest_layout,
    micro_batches,
)
from gcore_language.policy import Entropy
from gcore_language.progress import Progress
from gcore_language.ranks import Ranks
from gcore_language.schedule import rate_at
from gcore_language.settings import TrainerSettings

LossOf = Callable[[Batch, Tensor, Tensor], Tensor]
#: A record and its place among the prepared ones.
Placed = tuple[int, TrainRecord]

#: What an objective may require.
_SUPPLIED = frozenset({"old_logp", "ref_logp", "entropy"})
#: Scalar -> per-action term of d = logp - ref_logp (Schulman 2020, "Approximating KL divergence").
_SCALARS = {
    "kl_k1": lambda d: d,
    "kl_k2": lambda d: d * d / 2,
    "kl_k3": lambda d: torch.exp(-d) - 1 + d,
}


class TrainingEngine(Protocol):
    """A policy on one rank, and its reference. All ranks get the same calls in the same order.

    layouts: the packings that give this model's log-probs, "padded" always. hidden_size: of the
    model, to weigh the packings' cost.
    """

    layouts: frozenset[Layout]
    hidden_size: int
    device: torch.device
    ranks: Ranks

    def logprobs(
        self, batches: Sequence[Batch | None], model: Literal["policy", "reference"]
    ) -> Sequence[Tensor | None]:
        """float32[A] of each batch, without gradient, on every rank of a replica. None stands where
        other ranks have a batch and this one has not.
        """

    def accumulate(self, batches: Sequence[Batch | None], loss: LossOf, entropy: Entropy) -> None:
        """Forward and backward of every batch: adds the gradients of all ``loss(batch, logp,
        entropies)``, over the data-parallel ranks too. logp float32[A] carries gradient; entropies
        float32[A] do for entropy "gradient".

        With pipeline stages ``loss`` is called on the last one only.
        """

    def update(self, rate: float, clip: float) -> float:
        """One step of AdamW at that learning rate with the gradient clipped to norm ``clip`` (0:
        not clipped); forgets the gradient. Returns its norm before clipping; when that is not
        finite the weights stay as they are.
        """

    def discard(self) -> None:
        """Forgets the gradient."""

    def weight_specs(self) -> list[TensorSpec]: ...

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]: ...

    def save(self, directory: Path, numbers: dict[str, Any]) -> None:
        """Weights, the optimizer's moments and the numbers, in a form that other numbers of ranks
        can load.
        """

    def load(self, directory: Path) -> dict[str, Any]:
        """Returns the numbers."""

    def save_pretrained(self, directory: Path) -> None: ...

    def close(self) -> None: ...


@dataclass(kw_only=True)
class _Prepared:
    """The records of a step. minibatches: the micro-batches of each, padded with None to one number
    on every rank.

    Log-probs and advantages join the columns of the micro-batches as they become known.
    """

    records: Sequence[TrainRecord]
    minibatches: list[list[Batch | None]]
    has_old_logp: bool = False

    def all(self, first: int = 0) -> list[Batch | None]:
        return [batch for part in self.minibatches[first:] for batch in part]


def keeps_reference(settings: TrainerSettings, context: WorkerContext) -> bool:
    """Whether an engine needs a reference model: by its settings, or by what the objective
    requires.
    """
    required = "ref_logp" in context.parts["objective"].requires
    return (
        settings.reference
        or bool(settings.reference_path)
        or (required and "ref_logp" not in context.given)
    )


def check_objective(context: WorkerContext) -> None:
    """Raises ConfigError when the objective requires what no engine supplies."""
    required = frozenset(context.parts["objective"].requires)
    unknown = sorted(required - _SUPPLIED - frozenset(context.given))
    if unknown:
        raise ConfigError(
            f"the objective requires {', '.join(unknown)}, which this trainer does not compute.",
            where=f"roles.{context.role}.use",
            why=f"It computes {', '.join(sorted(_SUPPLIED))}.",
        )


class LanguageTrainer:
    """One rank of a policy; see ``gcore_core.contract.trainer.Trainer``. A plugin's trainer makes
    the engine, and overrides ``pack`` where its actions are no tokens.
    """

    def __init__(
        self, settings: TrainerSettings, context: WorkerContext, engine: TrainingEngine
    ) -> None:
        self.version = 0
        self._settings, self._context, self._engine = settings, context, engine
        self._objective = context.parts["objective"]
        self._has_reference = keeps_reference(settings, context)
        # A reference's log-probs serve scalars too.
        self._given = frozenset(context.given) & {*self._objective.requires, "ref_logp"}
        self._layouts = self._allowed_layouts()
        self._updates = 0
        self._prepared: _Prepared | None = None

    def _allowed_layouts(self) -> frozenset[Layout]:
        found, packing = self._engine.layouts, self._settings.packing
        if packing == "padded":
            return frozenset({"padded"})
        if packing == "auto":
            return found
        if found == {"padded"}:
            raise ConfigError(
                "packing: shared_prompt does not give this model's log-probs.",
                where=f"roles.{self._context.role}.config.packing",
                why=(
                    "It takes images, or its positions or attention windows ignore position_ids "
                    "or a 4-D mask."
                ),
                todo="Use packing: auto or padded.",
            )
        return found - {"padded"}

    # -- preparation -------------------------------------------------------------------------------

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """See ``Trainer.prepare``; scalars: kl_k1, kl_k2, kl_k3, each summed over a record's
        trained actions.
        """
        unknown = sorted(scalars - _SCALARS.keys())
        if unknown:
            raise ConfigError(
                f"no preparation scalar named {', '.join(unknown)}.",
                where=f"roles.{self._context.role}.use",
                why=f"This trainer computes {', '.join(_SCALARS)}.",
            )
        if scalars and not self._has_reference and "ref_logp" not in self._given:
            raise ConfigError(
                f"{', '.join(sorted(scalars))} need a reference model.",
                where=f"roles.{self._context.role}.config.reference",
                todo="Set it to true.",
            )
        self._prepared = prepared = self._packed(records)
        needed = scalars or "ref_logp" in self._objective.requires
        if needed and "ref_logp" not in self._given:
            self._fill(prepared.all(), "ref_logp", "reference")
        found: list[dict[str, float]] = [dict.fromkeys(scalars, 0.0) for _ in records]
        if scalars:
            self._fill(prepared.all(), "old_logp", "policy")
            prepared.has_old_logp = True
            for batch in filter(None, prepared.all()):
                for name in scalars:
                    for place, value in zip(
                        batch.index.tolist(), _sum_terms(batch, name), strict=True
                    ):
                        found[place][name] = value
        return found

    def pack(self, minibatches: Sequence[Sequence[Placed]]) -> list[list[Batch]]:
        """The micro-batches of each minibatch, none of an empty one. Called on every rank, by
        ``prepare``.

        A policy whose actions are no tokens overrides it. What it gives reaches the engine as it
        is; the training program itself uses only ``index`` and ``columns``, which must be as in
        ``Batch``. A record that teaches nothing is left out.
        """
        parts = [
            [
                Sample(
                    index=place,
                    ordinal=record.ordinal,
                    prompt=record.columns["prompt_ids"],
                    columns=record.columns,
                    images=Images.of(record.columns, record.media),
                )
                for place, record in minibatch
                if len(
                    record.columns.get("action_ids", ())
                )  # a record without actions teaches nothing
            ]
            for minibatch in minibatches
        ]
        layout = self._layout([sample for part in parts for sample in part])
        budget, device = self._settings.budget_tokens, self._engine.device
        return [list(micro_batches(part, layout, budget, device)) for part in parts]

    def _packed(self, records: Sequence[TrainRecord]) -> _Prepared:
        """As many minibatches, and as many micro-batches of each, on every rank."""
        parts: list[list[Placed]] = []
        for place, record in enumerate(records):
            while len(parts) <= record.minibatch:
                parts.append([])
            parts[record.minibatch].append((place, record))
        ranks = self._engine.ranks
        batches: list[list[Batch | None]] = [list(packed) for packed in self.pack(parts)]
        for batch in filter(None, (batch for part in batches for batch in part)):
            self._attach_given(batch, records)
        minibatches = int(ranks.max([len(batches)])[0])
        batches += [[] for _ in range(minibatches - len(batches))]
        counts = ranks.max([len(minibatch) for minibatch in batches])
        for minibatch, count in zip(batches, counts, strict=True):
            minibatch += [None] * (int(count) - len(minibatch))
        return _Prepared(records=records, minibatches=batches)

    def _attach_given(self, batch: Batch, records: Sequence[TrainRecord]) -> None:
        """Adds the columns that other roles gave the batch's records."""
        for name in sorted(self._given):
            parts = [records[place].columns[name] for place in batch.index.tolist()]
            column = torch.from_numpy(np.concatenate(parts).astype(np.float32))
            if len(column) != len(batch.columns["record"]):
                raise ConfigError(
                    f"{name} has a value for each action, and this trainer takes other terms.",
                    where=f"roles.{self._context.role}.use",
                )
            batch.columns[name] = column.to(self._engine.device)

    def _layout(self, samples: Sequence[Sample]) -> Layout:
        if not samples:
            return "padded"
        longest = max(len(s.prompt) for s in samples) + max(s.fed for s in samples)
        if "flat" in self._layouts and longest <= FLAT_ROW_TOKENS:
            return "flat"
        if self._layouts >= {"shared", "padded"}:
            return cheapest_layout(samples, self._engine.hidden_size)
        return "shared" if "shared" in self._layouts else "padded"

    def _fill(
        self, batches: Sequence[Batch | None], name: str, model: Literal["policy", "reference"]
    ) -> None:
        self._context.progress()
        for batch, logp in zip(batches, self._engine.logprobs(batches, model), strict=True):
            if batch is not None and logp is not None:
                batch.columns[name] = logp

    # -- training ----------------------------------------------------------------------------------

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """See ``Trainer.train``. Besides the promised metrics gives those of the objective, actions
        and updates.

        ``kl``, unless the objective gives one, is the k3 estimate of KL(rollout policy, current
        policy).
        """
        prepared = self._prepared
        if prepared is None or len(advantages) != len(prepared.records):
            count = "none" if prepared is None else str(len(prepared.records))
            raise ValueError(f"{len(advantages)} advantages for {count} prepared records")
        progress = Progress(step=step)
        for batch in filter(None, prepared.all()):
            by_record = torch.from_numpy(advantages[batch.index].astype(np.float32)).to(
                self._engine.device
            )
            batch.columns["advantage"] = by_record[batch.columns["record"]]
            fresh = torch.tensor(
                [prepared.records[i].fresh for i in batch.index], device=self._engine.device
            )
            batch.columns["fresh"] = fresh[batch.columns["record"]]
        if "old_logp" in self._objective.requires:
            # the first minibatch needs no pass of its own: its first update starts from these very
            # weights
            if not prepared.has_old_logp:
                self._fill(prepared.all(first=1), "old_logp", "policy")
            for batch in filter(None, prepared.all(first=1)):
                progress.compare(batch.columns["old_logp"], batch)
        for epoch in range(epochs):
            for minibatch in range(minibatches):
                part = (
                    prepared.minibatches[minibatch] if minibatch < len(prepared.minibatches) else []
                )
                self._update(prepared, part, progress, first=epoch == 0 and minibatch == 0)
        self._prepared = None
        self.version = step + 1
        ranks = self._engine.ranks
        metrics = progress.metrics(ranks.add_up(progress.sums), ranks.max([progress.gap])[0])
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()  # generators that slept meanwhile take their memory again
        # sharded ranks wait for each other inside an accelerator's kernels; the shell's clock knows
        # processors only
        return metrics if self._engine.device.type == "cpu" else {**metrics, "busy_s": 0.0}

    def _update(
        self, prepared: _Prepared, part: Sequence[Batch | None], progress: Progress, *, first: bool
    ) -> None:
        rate = rate_at(
            self._settings, self._updates, self._context.steps * self._context.updates_per_step
        )
        weight = self._engine.ranks.sum([sum(map(self._weight, filter(None, part)))])[0]
        pass_ = _Pass(weight=weight, progress=progress, first=first)
        if part:
            entropy: Entropy = "gradient" if "entropy" in self._objective.requires else "metric"
            self._engine.accumulate(part, lambda *given: self._loss(pass_, *given), entropy)
        loss = self._engine.ranks.sum([pass_.loss])[0]
        if not math.isfinite(loss):
            self._engine.discard()
            raise self._not_finite(prepared, pass_.broken, progress, f"loss {loss}")
        norm = 0.0
        if weight > 0:
            norm = self._engine.update(rate, self._settings.clip_grad_norm)
        elif part:
            self._engine.discard()
        if not math.isfinite(norm):
            raise self._not_finite(prepared, part, progress, f"gradient norm {norm}")
        self._updates += 1
        progress.updated(loss / weight if weight > 0 else 0.0, norm, rate)

    @torch.no_grad()
    def _weight(self, batch: Batch) -> float:
        """The weight_sum of one micro-batch."""
        return float(self._objective.weight(batch.columns))

    def _loss(self, pass_: _Pass, batch: Batch, logp: Tensor, entropies: Tensor) -> Tensor:
        """One micro-batch's part of the normalised loss; observes it."""
        self._context.progress()
        if pass_.first:
            pass_.progress.compare(logp.detach(), batch)
            batch.columns.setdefault("old_logp", logp.detach())
        current = {"logp": logp} | ({"entropy": entropies} if entropies.requires_grad else {})
        loss, _, metrics = self._objective.loss(batch.columns, current)
        pass_.progress.observe(logp.detach(), entropies.detach(), batch, metrics)
        value = float(loss.detach())
        pass_.loss += value
        if not math.isfinite(value):
            pass_.broken.append(batch)
        return loss / pass_.weight if pass_.weight > 0 else loss * 0.0

    def _not_finite(
        self, prepared: _Prepared, batches: Sequence[Batch | None], progress: Progress, what: str
    ) -> NonFiniteLoss:
        """Writes the columns of the batches to a file and names it in the error."""
        from safetensors.numpy import save_file

        rank, update = self._context.rank, len(progress.rates)
        directory = Path(self._settings.dump_dir or self._context.directory)
        path = directory / f"nonfinite-step{progress.step}-update{update}-rank{rank}.safetensors"
        arrays: dict[str, np.ndarray] = {}
        for batch in batches:
            for index in [] if batch is None else batch.index.tolist():
                record = prepared.records[index]
                for name, column in record.columns.items():
                    arrays[f"{record.ordinal}/{record.sample}/{name}"] = np.ascontiguousarray(
                        column
                    )
        if arrays:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(arrays, path)
        return NonFiniteLoss(
            f"{what} in update {update} of step {progress.step}, rank {rank}.",
            where=f"roles.{self._context.role}",
            why=f"The records that led to it are in {path}."
            if arrays
            else "This rank had no part in it.",
            todo="Look for infinite log-probs or advantages there, or lower learning_rate.",
            step=progress.step,
            rank=rank,
            update=update,
            file=str(path) if arrays else "",
        )

    # -- weights -----------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        return self._engine.weight_specs()

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Weights by Hugging Face name; an array may be a view of live memory, valid until
        ``train``.
        """
        return self._engine.export_weights()

    def numbers(self) -> dict[str, Any]:
        """What is saved besides the engine's state."""
        return {"version": self.version, "updates": self._updates}

    def save(self, directory: Path) -> None:
        """See ``Trainer.save``."""
        self._engine.save(directory, self.numbers())

    def load(self, directory: Path) -> None:
        numbers = self._engine.load(directory)
        self.version, self._updates = int(numbers["version"]), int(numbers["updates"])

    def save_pretrained(self, directory: Path) -> None:
        self._engine.save_pretrained(directory)

    def close(self) -> None:
        self._prepared = None
        self._engine.close()


@dataclass(kw_only=True)
class _Pass:
    """One update's forward and backward. weight: the normaliser, over all ranks; loss: this rank's
    sum, before it.
    """

    weight: float
    progress: Progress
    first: bool
    loss: float = 0.0

    def __post_init__(self) -> None:
        self.broken: list[Batch] = []


def _sum_terms(batch: Batch, name: str) -> list[float]:
    """A preparation scalar of each of the batch's records."""
    columns = batch.columns
    terms = _SCALARS[name](columns["old_logp"] - columns["ref_logp"]) * columns["mask"]
    sums = torch.zeros(len(batch.index), device=terms.device)
    values: list[float] = sums.index_add_(0, columns["record"], terms).tolist()
    return values
