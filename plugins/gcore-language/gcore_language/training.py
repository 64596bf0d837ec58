"""Trains language policies, with one program for every backend.

An engine (``TrainingEngine``) does forward, backward and update; the program around it is here.

**Units.** A step trains on its *records*. They are dealt to *minibatches*, each of which makes one
*update* of the weights, and again in each epoch. A rank packs its records of a minibatch into
*micro-batches*: so much as goes through the model in one pass. Ranks may have different numbers of
them; the missing ones are None, since all ranks must make the same calls.

**The gradient** of an update is that of sum(loss) / sum(weight) over all its micro-batches and
ranks, whatever their number. Weights do not depend on the parameters, so their sum is computed
before the first backward pass, and every loss is divided by it: a backend only has to add gradients
up. For example, with losses as the objective gives them, summed over trained actions, and the
number of these as weight:

    rank 0    micro-batch of 300 actions, loss 150    backward of 150 / 1000
              micro-batch of 500 actions, loss 200    backward of 200 / 1000
    rank 1    micro-batch of 200 actions, loss  50    backward of  50 / 1000
    update                                            gradient of 400 / 1000

**Columns.** A batch has columns with a value for each action. Those that are not in the records are
added when they are known:

    column      is                              computed in
    ref_logp    log-probs of the reference      ``prepare``, unless another role has given them
    rows        of how many rows its record is  ``prepare``, where a record has several sequences
    advantage   what ``train`` gets             ``train``
    fresh       sampled under these weights?    ``train``
    age         by how many versions older      ``train``, where the objective requires it
                weights sampled it
    old_logp    log-probs before the step's     where scalars need them: ``prepare``. Else ``train``
                first update                    before its first update, for all minibatches but the
                                                first: that one has no need of a pass of its own,
                                                since its first update starts from these very
                                                weights (``_loss``)

Metrics ``logprob_gap_max``, ``logprob_gap_mean`` and ``logprob_gap_share`` (of actions more than
1e-4 apart) compare rollout and trainer log-probs where both have the same weights: over the first
minibatch of a step, and over the others too when the objective requires ``old_logp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.algorithms import (
    LOG_RATIO_LIMIT,
    LOGP_OF,
    AdaptsToSteps,
    MakesAdvantages,
    ids_column,
)
from gcore_core.contract.columns import Columns, action_ages
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError, NonFiniteLoss, TrainingError
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.sentinel import Finding
from gcore_core.contract.trainer import StartLogprobs, TrainRecord
from gcore_language import objective_state
from gcore_language.action_advantages import per_action
from gcore_language.at_start import AtStart
from gcore_language.cut_records import CutRecords
from gcore_language.device_clock import DeviceClock
from gcore_language.exported import NamesExports, diagnose_export
from gcore_language.host_memory import return_free_pages
from gcore_language.images import GRID, Images
from gcore_language.lineage import check_terms
from gcore_language.lockstep import sizes_in_lockstep
from gcore_language.model_files import read_config
from gcore_language.model_places import directory_here
from gcore_language.packing import (
    FLAT_ROW_TOKENS,
    Batch,
    Layout,
    Sample,
    build,
    cheapest_layout,
    counts_of,
    micro_batches,
    rows_of,
    steady_batches,
    width_of,
)
from gcore_language.policy import Entropy
from gcore_language.progress import Progress
from gcore_language.ranks import Ranks
from gcore_language.resplit import (
    PENALTY_NORM,
    TOLERANCES,
    ShowsGradient,
    carry_columns,
    check_same,
)
from gcore_language.schedule import rate_at
from gcore_language.sequences import by_rows
from gcore_language.settings import TrainerSettings
from gcore_language.update_checks import (
    Direction,
    ShowsWeights,
    adamw_bound,
    check_distance,
    some_of,
)

#: Called with a batch, its log-probs and entropies; of a value head, with its values and None.
LossOf = Callable[[Batch, Tensor, Any], Tensor]
#: The same with log-probs of other tokens behind it, float32[A, k].
LossOfTokens = Callable[[Batch, Tensor, Any, Tensor], Tensor]
#: A record and its place among the prepared ones.
Placed = tuple[int, TrainRecord]


def loss_of_columns(loss: LossOfTokens) -> LossOf:
    """Returns a loss that takes all log-probs of an action in one tensor, float32[A, 1 + k].

    Column 0 is the sampled token. The other columns are the tokens that the batch names.
    """

    def split(batch: Batch, logp: Tensor, entropies: Any) -> Tensor:
        return loss(batch, logp[:, 0], entropies, logp[:, 1:])

    return split


#: What an objective may require.
_SUPPLIED = frozenset({"age", "old_logp", "ref_logp", "entropy", "group", "sample"})


def _k3(difference: Tensor) -> Tensor:
    difference = difference.clamp(min=-LOG_RATIO_LIMIT)  # else exp() overflows
    return torch.exp(-difference) - 1 + difference


#: Scalar -> per-action term of d = logp - ref_logp (Schulman 2020, "Approximating KL divergence").
_SCALARS = {
    "kl_k1": lambda d: d,
    "kl_k2": lambda d: d * d / 2,
    "kl_k3": _k3,
}


class TrainingEngine(Protocol):
    """One rank's part of a policy, of its optimizer and of the reference model, if there is one.

    All ranks get the same calls in the same order.

    An engine whose objective requires ``values`` (``gcore_language.values.trains_values``) opens
    its model with a value head. Wherever this protocol says log-probs float32[A], it then gives
    values float32[S] of the batch's states; batches are packed with one more action for each record
    (``values.with_end``), and there are no entropies. It gives weights, saves and exports as ever.

    layouts: the packings that give this model's log-probs; "padded" is always among them.
    hidden_size: that of the model, to estimate what a packing costs.
    device: where batches are put.
    ranks: sums and maxima over all ranks.
    clock: measures the engine's forward and backward passes on an accelerator.
    sums_exactly: whether the gradients of micro-batches add up to the same bits in any order and
        on any number of ranks. Records are then packed by tile.
    """

    sums_exactly: bool
    layouts: frozenset[Layout]
    hidden_size: int
    device: torch.device
    ranks: Ranks
    clock: DeviceClock

    def logprobs(
        self, batches: Sequence[Batch | None], model: Literal["policy", "reference"]
    ) -> Sequence[Tensor | None]:
        """Returns the log-probs float32[A] of each batch's actions, without gradient.

        Every rank of a replica gets them. A batch is None where other ranks have one and this rank
        has none; its result is ignored.
        """

    def accumulate(self, batches: Sequence[Batch | None], loss: LossOf, entropy: Entropy) -> None:
        """Runs forward and backward of every batch and adds up the gradients of their losses.

        Gradients are summed over the data-parallel ranks too, not averaged.

        batches: None where other ranks have a batch and this rank has none.
        loss: called as ``loss(batch, logp, entropies)``, both float32[A]; logp carries gradient.
            With pipeline stages it is called on the last stage only.
        entropy: "gradient" if entropies carry gradient, "metric" if not.
        """

    def update(self, rate: float, clip: float) -> float:
        """Takes one step of AdamW and clears the gradient.

        rate: the learning rate.
        clip: the gradient is scaled down to this norm; 0 leaves it as it is.
        Returns the gradient's norm before clipping. If it is not finite, the weights stay as they
        are.
        """

    def discard(self) -> None:
        """Clears the gradient without a step."""

    def weight_specs(self) -> list[TensorSpec]:
        """Returns name, shape and dtype of every tensor that ``export_weights`` gives."""

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Yields the weights by Hugging Face name; see ``LanguageTrainer.export_weights``."""

    def save(self, directory: Path, numbers: dict[str, Any]) -> None:
        """Writes the weights, the optimizer's moments and ``numbers`` to a directory.

        The form does not depend on the number of ranks: another number of them can load it.
        """

    def load(self, directory: Path) -> dict[str, Any]:
        """Reads what ``save`` wrote and returns its ``numbers``."""

    def save_pretrained(self, directory: Path) -> None:
        """Writes the model in the form of Hugging Face's ``save_pretrained``."""

    def close(self) -> None:
        """Frees what the engine holds."""


@runtime_checkable
class ScoresTokens(Protocol):
    """An engine that gives a loss the log-probs of other tokens than the actions.

    Its trainer claims the trait ``token_logprobs``.
    """

    def accumulate_tokens(
        self, batches: Sequence[Batch | None], loss: LossOfTokens, entropy: Entropy, ids: str
    ) -> None:
        """Does what ``accumulate`` does; ``loss`` gets float32[A, k] more, with gradient.

        Those are the log-probs, where each action is predicted and at its temperature, of the
        tokens that the batch's column ``ids``, int64[A, k], names.
        """


@runtime_checkable
class PacksRecords(Protocol):
    """An engine that packs records in a way of its own, such as over ranks that share tokens."""

    def packed(
        self, samples: Sequence[Sample], budget_tokens: int, *, whole_groups: bool
    ) -> list[Batch] | None:
        """Returns the micro-batches of one minibatch; None for the layouts of ``packing``.

        budget_tokens, whole_groups: as in ``micro_batches``.
        """


@dataclass(kw_only=True)
class _Prepared:
    """The records of a step, packed. Log-probs and advantages join the columns when computed.

    A record's *place* is its number in ``records``; ``Batch.index`` has the places of a batch's
    records.

    cut: this rank's records, in the order of ``prepare``, and their rows.
    records: these rows. The training program packs, trains and checks rows; records that came as
        one sequence are rows as they are.
    minibatches: the micro-batches of each minibatch, filled up with None until every rank has the
        same number of them.
    has_old_logp: whether all micro-batches have the column ``old_logp``.
    advantages: float64[rows], once ``train`` has them; where they are computed for each action,
        a float64[A] for each row.
    """

    cut: CutRecords
    records: Sequence[TrainRecord]
    minibatches: list[list[Batch | None]]
    has_old_logp: bool = False
    advantages: np.ndarray | Sequence[np.ndarray] | None = None

    def all(self, first: int = 0) -> list[Batch | None]:
        """Returns the micro-batches of all minibatches from number ``first`` on, in one list."""
        return [batch for part in self.minibatches[first:] for batch in part]


def keeps_reference(settings: TrainerSettings, context: WorkerContext) -> bool:
    """Returns whether the engine must hold a reference model.

    It must when the settings say so, or when the objective requires ``ref_logp`` and no other role
    supplies it.
    """
    required = "ref_logp" in context.parts["objective"].requires
    return (
        settings.reference
        or bool(settings.reference_path)
        or (required and "ref_logp" not in context.given)
    )


def check_objective(
    context: WorkerContext, supplied: Set[str] = _SUPPLIED, *, scores_tokens: bool = False
) -> None:
    """Raises ConfigError when the objective requires a column that nothing supplies.

    supplied: what this trainer computes.
    scores_tokens: whether the engine is a ``ScoresTokens``.
    """
    required = frozenset(context.parts["objective"].requires)
    if scores_tokens:
        required = frozenset(ids_column(name) or name for name in required)
    unknown = sorted(required - supplied - frozenset(context.given))
    if unknown:
        raise ConfigError(
            f"the objective requires {', '.join(unknown)}, which this trainer does not compute.",
            where=f"roles.{context.role}.use",
            why=f"It computes {', '.join(sorted(supplied))}.",
        )


class LanguageTrainer:
    """One rank of a policy; see ``gcore_core.contract.trainer.Trainer``.

    A plugin's trainer makes the engine and passes it in. It overrides ``pack`` if its actions are
    not tokens. What a step calls, in this order:

        prepare      packs the records into micro-batches (``pack``); reference's log-probs, scalars
        train        advantages; old log-probs of all minibatches but the first; then the updates
        _update      one for each minibatch and epoch: forward and backward of its micro-batches,
                     checks, one step of the optimizer
        _loss        between the two passes of each micro-batch: the objective's loss, and what the
                     checks need

    The update checks are ``_check_terms`` in ``_loss``, and after the backward passes
    ``_check_ratio``, ``_check_reference``, the direction, ``_check_resplit`` and whether the loss
    is finite. The distance is checked after the optimizer's step (``_updated``).
    """

    _output = "logp"  # what the engine gives for each action, by its name in ``Objective.loss``

    def __init__(
        self, settings: TrainerSettings, context: WorkerContext, engine: TrainingEngine
    ) -> None:
        self.version = 0
        self._settings = settings
        self._context = context
        self._engine = engine
        self._objective = context.parts["objective"]
        self._code = PluginCode(
            made=self._objective,
            kind="objective",
            where="objective.use",
            contract="ObjectiveContract",
        )
        self._has_reference = keeps_reference(settings, context)
        # Of which tokens, besides the actions, the objective wants log-probs; "": of none.
        self._ids = _ids_of(self._objective.requires, context.role)
        self._supplied = frozenset(context.given) & self._wanted()
        self._whole_groups = "group" in self._objective.requires
        self._layouts = self._allowed_layouts()
        self._updates = 0
        # Steps that have trained: a resumed run may make more or fewer updates in one.
        self._scheduled_steps = 0
        self._last_rate = 0.0  # of the latest update
        self._prepared: _Prepared | None = None
        # Whether an update of this step has changed the weights for sure, and whether one may have:
        # without a gradient the optimizer still follows its moments.
        self._moved = self._may_have_moved = False
        self._changed = False  # the same of this process
        self._trained_steps = 0  # by this process
        self._at_start = AtStart()
        self._cut = CutRecords.of([])  # the records that the step began with

    def _wanted(self) -> frozenset[str]:
        """Returns the columns of other roles that batches get where they are there."""
        # A reference's log-probs serve scalars too.
        return frozenset({*self._objective.requires, "ref_logp", self._ids})

    def _allowed_layouts(self) -> frozenset[Layout]:
        """Returns the layouts that ``packing`` allows, of those that are right for the model.

        Raises ConfigError where it allows none of them.
        """
        layouts = self._engine.layouts
        packing = self._settings.packing
        if packing == "padded":
            return frozenset({"padded"})
        if packing == "auto":
            return layouts
        if layouts == {"padded"}:
            raise ConfigError(
                "packing: shared_prompt does not give this model's log-probs.",
                where=f"roles.{self._context.role}.config.packing",
                why=(
                    "It takes images, or its positions or attention windows ignore position_ids "
                    "or a 4-D mask."
                ),
                todo="Use packing: auto or padded.",
            )
        return layouts - {"padded"}

    # -- preparation -------------------------------------------------------------------------------

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """Packs the step's records and computes scalars of each; see ``Trainer.prepare``.

        A reference's log-probs are computed here, where another role has not given them. Old
        log-probs are computed here only for scalars, else in ``train``.

        scalars: any of kl_k1, kl_k2 and kl_k3, in nats, summed over a record's trained actions.
        Raises ConfigError for other scalars, or for any without a reference model.
        """
        self._check_scalars(scalars)
        self._prepared = prepared = self._packed(records)
        needed = scalars or "ref_logp" in self._objective.requires
        if needed and "ref_logp" not in self._supplied:
            self._fill(prepared.all(), "ref_logp", "reference")
        if scalars:
            self._fill(prepared.all(), "old_logp", "policy")
            prepared.has_old_logp = True
        return _scalar_rows(prepared, scalars)

    def _check_scalars(self, scalars: frozenset[str]) -> None:
        """Raises ConfigError for scalars that are not known, or for any without a reference."""
        unknown = sorted(scalars - _SCALARS.keys())
        if unknown:
            raise ConfigError(
                f"no preparation scalar named {', '.join(unknown)}.",
                where=f"roles.{self._context.role}.use",
                why=f"This trainer computes {', '.join(_SCALARS)}.",
            )
        if scalars and not self._has_reference and "ref_logp" not in self._supplied:
            raise ConfigError(
                f"{', '.join(sorted(scalars))} need a reference model.",
                where=f"roles.{self._context.role}.config.reference",
                todo="Set it to true.",
            )

    def pack(self, minibatches: Sequence[Sequence[Placed]]) -> list[list[Batch]]:
        """Returns the micro-batches of each minibatch; an empty minibatch has none.

        ``prepare`` calls it on every rank. Records without actions are left out. A policy whose
        actions are not tokens overrides it: the result reaches the engine unchanged, and the
        training program itself uses only ``index`` and ``columns``, which must be as in ``Batch``.
        """
        parts = [
            [
                Sample(
                    index=place,
                    ordinal=record.ordinal,
                    prompt=record.columns["prompt_ids"],
                    columns=record.columns,
                    images=Images.of(record.columns, record.media),
                    number=record.sample,
                )
                for place, record in minibatch
                if len(
                    record.columns.get("action_ids", ())
                )  # a record without actions teaches nothing
            ]
            for minibatch in minibatches
        ]
        if self._engine.sums_exactly:
            tile_of = {place: record.tile for part in minibatches for place, record in part}
            return [self._packed_by_tile(part, tile_of) for part in parts]
        budget = self._settings.budget_tokens
        engine = self._engine
        whole = self._whole_groups
        if isinstance(engine, PacksRecords):
            packed = [engine.packed(part, budget, whole_groups=whole) for part in parts]
            if None not in packed:
                return [part for part in packed if part is not None]
        layout = self._layout([sample for part in parts for sample in part])
        # rows of the flat layout are short, so that micro-batches are all nearly full
        if engine.ranks.count == 1 or layout == "flat" or whole:
            return [
                list(micro_batches(part, layout, budget, engine.device, whole_groups=whole))
                for part in parts
            ]
        return self._packed_in_lockstep(parts, layout)

    def _packed_by_tile(self, samples: Sequence[Sample], tile_of: Mapping[int, int]) -> list[Batch]:
        """Returns the micro-batches of one minibatch, none of which has records of two tiles.

        What a micro-batch holds, and its layout, follow from its tile alone: so the pass has the
        same bits on whichever rank, with whichever other tiles.

        tile_of: the tile of each record, by ``Sample.index``.
        """
        tiles: dict[int, list[Sample]] = {}
        for sample in samples:
            tiles.setdefault(tile_of[sample.index], []).append(sample)
        return [
            batch
            for _, tile in sorted(tiles.items())
            for batch in steady_batches(
                tile,
                self._layouts,
                self._settings.budget_tokens,
                self._engine.device,
                whole_groups=self._whole_groups,
            )
        ]

    def _packed_in_lockstep(
        self, parts: Sequence[Sequence[Sample]], layout: Layout
    ) -> list[list[Batch]]:
        """Returns micro-batches that cost all ranks the same; see ``lockstep``."""
        budget = self._settings.budget_tokens
        engine = self._engine
        rows = [rows_of(part, layout, budget) for part in parts]
        widths = [np.array(list(map(width_of, part)), np.int64) for part in rows]
        cuts = sizes_in_lockstep(widths, budget, engine.hidden_size, engine.ranks)
        return [
            [build([part[row] for row in cut], layout, engine.device) for cut in minibatch]
            for part, minibatch in zip(rows, cuts, strict=True)
        ]

    def _packed(self, records: Sequence[TrainRecord]) -> _Prepared:
        """Packs the records' rows, with the columns that other roles gave them."""
        return self._packed_rows(CutRecords.of(records))

    def _packed_rows(self, cut: CutRecords) -> _Prepared:
        batches = self._in_minibatches(cut.rows)
        for batch in filter(None, (batch for part in batches for batch in part)):
            self._attach_supplied(batch, cut.rows)
            if cut.has_several:
                counts = torch.from_numpy(cut.counts()[batch.index]).to(self._engine.device)
                batch.columns["rows"] = counts[batch.columns["record"]]
        return _Prepared(cut=cut, records=cut.rows, minibatches=batches)

    def _in_minibatches(self, records: Sequence[TrainRecord]) -> list[list[Batch | None]]:
        """Packs the records so that all ranks have equally many minibatches and micro-batches.

        Ranks that have fewer get None in their place, for all ranks must make the same calls.
        """
        parts: list[list[Placed]] = []
        for place, record in enumerate(records):
            while len(parts) <= record.minibatch:
                parts.append([])
            parts[record.minibatch].append((place, record))
        ranks = self._engine.ranks
        batches: list[list[Batch | None]] = [list(packed) for packed in self.pack(parts)]
        minibatches = int(ranks.max([len(batches)])[0])
        batches += [[] for _ in range(minibatches - len(batches))]
        counts = ranks.max([len(minibatch) for minibatch in batches])
        for minibatch, count in zip(batches, counts, strict=True):
            minibatch += [None] * (int(count) - len(minibatch))
        return batches

    def _attach_supplied(self, batch: Batch, records: Sequence[TrainRecord]) -> None:
        """Adds the columns that other roles computed for the batch's records.

        Raises ConfigError when such a column does not have one value for each action.
        """
        for name in sorted(self._supplied):
            parts = [records[place].columns[name] for place in batch.index.tolist()]
            column = _as_tensor(np.concatenate(parts))
            if len(column) != len(batch.columns["record"]):
                raise ConfigError(
                    f"column {name} has one value for each action, but the objective of this "
                    "trainer has terms of another number.",
                    where=f"roles.{self._context.role}.use",
                )
            batch.columns[name] = column.to(self._engine.device)

    def _layout(self, samples: Sequence[Sample]) -> Layout:
        """Returns this rank's layout. Flat is taken by all ranks or by none: where any has long
        rows, all pack in lock-step.
        """
        own_longest = (
            max(len(s.prompt) for s in samples) + max(s.fed for s in samples) if samples else 0
        )
        longest = self._engine.ranks.max([own_longest])[0]
        if "flat" in self._layouts and longest <= FLAT_ROW_TOKENS:
            return "flat"
        if not samples:
            return "padded"
        if self._layouts >= {"shared", "padded"}:
            return cheapest_layout(samples, self._engine.hidden_size)
        return "shared" if "shared" in self._layouts else "padded"

    def _fill(
        self, batches: Sequence[Batch | None], name: str, model: Literal["policy", "reference"]
    ) -> None:
        # computes log-probs and stores them as the column ``name`` of each batch
        self._context.progress()
        for batch, logp in zip(batches, self._engine.logprobs(batches, model), strict=True):
            if batch is not None and logp is not None:
                batch.columns[name] = logp

    # -- training ----------------------------------------------------------------------------------

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """Trains on the prepared records; see ``Trainer.train``.

        advantages: float[R], one for each prepared record. With an advantage of level "action"
            these are rewards, from which it is computed here.
        Returns the metrics of the contract, those of the objective, ``actions`` and ``updates``; on
        an accelerator ``busy_s``, as ``DeviceClock`` measures it.
        ``kl``, unless the objective gives one, is the k3 estimate of KL(rollout || current policy).
        Raises ValueError when there are not as many advantages as prepared records, NonFiniteLoss
        when a loss or a gradient's norm is not finite, RecordMismatch when a loss is computed of
        other terms than a record has, and TrainingError when the log-probs that ratios compare with
        are not those of before the step, when the reference is not the policy that the run began
        with, or when an update that is looked at fails a check (see ``resplit_every``).
        """
        prepared = self._prepared
        if prepared is None or len(advantages) != len(prepared.cut.given):
            count = "none" if prepared is None else str(len(prepared.cut.given))
            raise ValueError(f"{len(advantages)} advantages for {count} prepared records")
        prepared.advantages = self._give_advantages(prepared, advantages)
        self._engine.clock.forget()  # what ``prepare`` ran is not part of this
        # What is counted and compared over the step.
        progress = Progress(step=step)
        self._moved = self._may_have_moved = False
        self._at_start = AtStart(records=len(prepared.records))
        self._cut = prepared.cut
        self._give_fresh(prepared)
        self._give_ages(prepared, step)
        if "old_logp" in self._objective.requires:
            self._give_old_logprobs(prepared, progress)
        # All ranks make as many updates, also those that have no record in some of them.
        for epoch in range(epochs):
            for minibatch in range(minibatches):
                part = (
                    prepared.minibatches[minibatch] if minibatch < len(prepared.minibatches) else []
                )
                self._update(prepared, part, progress, first=epoch == 0 and minibatch == 0)
        self._prepared = None
        self._trained_steps += 1
        self._scheduled_steps += 1
        self.version = step + 1
        ranks = self._engine.ranks
        metrics = progress.metrics(ranks.add_up(progress.terms), ranks.max([progress.gap])[0])
        if isinstance(self._objective, AdaptsToSteps):
            self._code.call(self._objective.observe, metrics)
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()  # generators that slept meanwhile take their memory again
        busy_s = self._engine.clock.read_s()
        # without ``busy_s`` the shell takes the processor time
        return metrics if busy_s is None else {**metrics, "busy_s": busy_s}

    def _give_fresh(self, prepared: _Prepared) -> None:
        """Adds the column ``fresh``: whether the weights that the step begins with sampled it."""
        for batch in filter(None, prepared.all()):
            by_record = torch.tensor(
                [prepared.records[i].fresh for i in batch.index], device=self._engine.device
            )
            batch.columns["fresh"] = by_record[batch.columns["record"]]

    def _give_ages(self, prepared: _Prepared, step: int) -> None:
        """Adds the column ``age`` where the objective requires it.

        step: the version of the weights that the step begins with.
        """
        if "age" not in self._objective.requires:
            return
        for batch in filter(None, prepared.all()):
            records = [prepared.records[place] for place in batch.index.tolist()]
            terms = counts_of(batch.columns["record"], len(records)).tolist()
            ages = [
                action_ages(record.columns, count, record.version, step)
                for record, count in zip(records, terms, strict=True)
            ]
            batch.columns["age"] = torch.from_numpy(np.concatenate(ages)).to(self._engine.device)

    def _give_old_logprobs(self, prepared: _Prepared, progress: Progress) -> None:
        """Adds the column ``old_logp`` to all minibatches but the first, and compares it.

        The first needs no pass of its own: its first update starts from these very weights.
        """
        later = prepared.all(first=1)
        if not prepared.has_old_logp:
            self._fill(later, "old_logp", "policy")
        for batch in filter(None, later):
            progress.compare(batch.columns["old_logp"], batch)
            self._at_start.add(batch, batch.columns["old_logp"])

    def _give_advantages(
        self, prepared: _Prepared, numbers: np.ndarray
    ) -> np.ndarray | Sequence[np.ndarray]:
        """Adds the column ``advantage`` to all batches; returns what stands in it, by row.

        numbers: float[R], what ``train`` got.
        """
        advantage = self._context.parts.get("advantage")
        if advantage is None:
            self._give_by_record(prepared, numbers)
            return prepared.cut.spread(numbers)
        computed = per_action(advantage, prepared.cut.given, numbers, self._engine.ranks)
        of_rows = prepared.cut.cut(computed.advantages)
        self._give_by_action(prepared, "advantage", of_rows)
        return of_rows

    def _give_by_record(self, prepared: _Prepared, numbers: np.ndarray) -> None:
        """Adds the column ``advantage``: each record's number, repeated."""
        numbers = prepared.cut.spread(numbers)
        for batch in filter(None, prepared.all()):
            by_record = torch.from_numpy(numbers[batch.index].astype(np.float32))
            by_record = by_record.to(self._engine.device)
            batch.columns["advantage"] = by_record[batch.columns["record"]]

    def _give_by_action(
        self, prepared: _Prepared, name: str, numbers: Sequence[np.ndarray]
    ) -> None:
        """Adds a column of which each row has a float[A]."""
        for batch in filter(None, prepared.all()):
            column = np.concatenate([numbers[place] for place in batch.index.tolist()])
            batch.columns[name] = torch.from_numpy(column.astype(np.float32)).to(
                self._engine.device
            )

    def start_logprobs(self) -> Sequence[StartLogprobs | None]:
        """Returns what was computed before the first update; see ``ComparesLogprobs``.

        Records without actions have none, nor have those of later minibatches where the objective
        does not require ``old_logp``. With pipeline stages the first minibatch is missing on all
        stages but the last.
        """
        return self._cut.join_start(self._at_start.by_record())

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """Returns float32[A] of each record's actions; see ``ScoresLogprobs``.

        All ranks call it at the same time. Records with images are refused with ContractError,
        since columns do not hold the images. With pipeline stages too every rank gets them.
        """
        if any(GRID in columns for columns in records):
            raise ContractError(
                "log-probs of records with images are asked for without their images.",
                where="logprobs",
            )
        return by_rows(records, self._logprobs_of_rows)

    def _logprobs_of_rows(self, records: Sequence[Columns]) -> list[np.ndarray]:
        placed = [
            (place, TrainRecord(ordinal=place, sample=0, minibatch=0, columns=columns))
            for place, columns in enumerate(records)
        ]
        batches: list[Batch | None] = list(self.pack([placed])[0])
        count = int(self._engine.ranks.max([len(batches)])[0])
        batches += [None] * (count - len(batches))
        scored = AtStart(records=len(records))
        for batch, logp in zip(batches, self._engine.logprobs(batches, "policy"), strict=True):
            if batch is not None and logp is not None:
                scored.add(batch, logp)
        return [np.zeros(0, np.float32) if own is None else own.logp for own in scored.by_record()]

    def evaluate(
        self, records: Sequence[TrainRecord], advantages: np.ndarray
    ) -> dict[str, tuple[float, float]]:
        """Returns the objective's sums without an update; see ``EvaluatesLoss``.

        Raises ConfigError for an objective that requires entropies, which it does not compute.
        """
        if "entropy" in self._objective.requires:
            raise ConfigError(
                "the objective requires entropy, which evaluation does not compute.",
                where="evaluation.data",
                todo="leave evaluation.data out",
            )
        progress = Progress(step=0)
        prepared = self._packed_to_evaluate(
            [replace(record, minibatch=0, tile=0) for record in records]
        )
        self._give_by_record(prepared, advantages)
        self._give_ages(prepared, self.version)
        batches = prepared.all()
        outputs = self._engine.logprobs(batches, "policy")
        for batch, output in zip(batches, outputs, strict=True):
            if batch is None or output is None:
                continue
            batch.columns.setdefault(f"old_{self._output}", output)
            with torch.no_grad():
                loss, metrics = self._loss_of(batch, {self._output: output})
            progress.add("loss", float(loss), self._weight(batch))
            for name, (value, weight) in metrics.items():
                progress.add(name, float(value), float(weight))
        return self._engine.ranks.add_up(progress.terms)

    def _packed_to_evaluate(self, records: Sequence[TrainRecord]) -> _Prepared:
        """Packs records of one minibatch, with what the objective requires of a reference."""
        prepared = self._packed(records)
        if "ref_logp" in self._objective.requires and "ref_logp" not in self._supplied:
            self._fill(prepared.all(), "ref_logp", "reference")
        return prepared

    def skip(self, step: int) -> None:
        """Ends a step that has nothing to train on; see ``Trainer.skip``."""
        self.version = step + 1

    def _update(
        self, prepared: _Prepared, part: Sequence[Batch | None], progress: Progress, *, first: bool
    ) -> None:
        """Makes one update of the weights from one minibatch.

        First the update's weight is summed over all ranks, then every micro-batch goes forward and
        backward, then the update is checked, and last the optimizer steps. All ranks make the same
        calls, also those without a micro-batch: sums and checks need all of them.

        part: the minibatch's micro-batches; None where only other ranks have one.
        first: whether it is the step's first update.
        Raises NonFiniteLoss or TrainingError; the gradient is then discarded or stays unused.
        """
        per_step = self._context.updates_per_step
        update = self._scheduled_steps * per_step + len(progress.rates)
        rate = rate_at(self._settings, update, self._context.steps * per_step)
        # What losses are divided by.
        weight = self._engine.ranks.sum_terms([self._weight(b) for b in part if b is not None])
        pass_ = _Pass(weight=weight, progress=progress, first=first, prepared=prepared)
        if part:
            self._accumulate(part, lambda *arguments: self._loss(pass_, *arguments))
        # Is this gradient to be trusted? No weight has changed yet.
        loss = self._engine.ranks.sum_terms(pass_.losses)
        if not math.isfinite(loss):
            self._engine.discard()
            raise self._not_finite(prepared, pass_.broken, progress, f"loss {loss}")
        self._check_ratio(pass_)
        if first:
            self._check_reference(pass_)
        is_looked_at = first and self._is_looked_at()
        if is_looked_at:
            pass_.direction.check(self._engine.ranks, f"step {progress.step}, update 0")
            if part and weight > 0:
                self._check_resplit(pass_, part)
        # The optimizer's step.
        norm = 0.0
        if weight > 0:
            norm = self._updated(rate, progress.step, is_looked_at=is_looked_at)
        elif part:  # no trained action anywhere: there is a gradient, and all of it is zero
            self._engine.discard()
        if not math.isfinite(norm):
            raise self._not_finite(prepared, part, progress, f"gradient norm {norm}")
        self._updates += 1
        self._last_rate = rate
        self._may_have_moved = self._may_have_moved or (rate > 0 and weight > 0)
        self._moved = self._moved or (rate > 0 and norm > 0)
        self._changed = self._changed or self._moved
        progress.updated(loss / weight if weight > 0 else 0.0, norm, rate)

    def _accumulate(self, part: Sequence[Batch | None], loss: Callable[..., Tensor]) -> None:
        """Has the engine go forward and backward over a minibatch, for what the objective requires.

        loss: called with a batch and what the engine computed of it.
        """
        entropy: Entropy = "gradient" if "entropy" in self._objective.requires else "metric"
        if not self._ids:
            self._engine.accumulate(part, loss, entropy)
            return
        engine = cast(ScoresTokens, self._engine)  # ``check_objective`` has refused others
        engine.accumulate_tokens(part, loss, entropy, self._ids)

    def _current(
        self, logp: Tensor, entropies: Any, tokens: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns ``current`` of ``Objective.loss``; tokens: the log-probs of other tokens."""
        current = {"logp": logp}
        if entropies.requires_grad:
            current["entropy"] = entropies
        if tokens is not None:
            current[LOGP_OF + self._ids] = tokens
        return current

    def _is_looked_at(self) -> bool:
        """Whether this step's first update is looked at closely; see ``resplit_every``."""
        every = self._settings.resplit_every
        return bool(every) and self._trained_steps % every == 0

    def _updated(self, rate: float, step: int, *, is_looked_at: bool) -> float:
        """Takes one step of the optimizer; returns the gradient's norm before clipping.

        Raises TrainingError where weights moved further than AdamW can move them.
        """
        engine = self._engine
        settings = self._settings
        if not (is_looked_at and isinstance(engine, ShowsWeights)):
            return engine.update(rate, settings.clip_grad_norm)
        before = some_of(engine.weights())
        norm = engine.update(rate, settings.clip_grad_norm)
        check_distance(
            before,
            engine.weights(),
            rate=rate,
            decay=settings.weight_decay,
            bound=adamw_bound(settings.betas, self._updates + 1),
            ranks=engine.ranks,
            where=f"step {step}, update 0",
        )
        return norm

    @torch.no_grad()
    def _weight(self, batch: Batch) -> float:
        """Returns the normaliser of one micro-batch, by which its loss is to be divided."""
        return float(self._code.call(self._objective.weight, batch.columns))

    def _loss(
        self,
        pass_: _Pass,
        batch: Batch,
        logp: Tensor,
        entropies: Tensor,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Returns one micro-batch's part of the normalised loss, 0-d, and adds to the metrics."""
        self._context.progress()
        if pass_.first:  # the weights are still those of the rollout and of ``old_logp``
            pass_.progress.compare(logp.detach(), batch)
            self._at_start.add(batch, logp.detach(), entropies.detach())
            batch.columns.setdefault("old_logp", logp.detach())
        self._check_terms(pass_, batch)
        pass_.measure_ratio(batch, logp.detach())
        is_looked_at = pass_.first and self._is_looked_at()
        if is_looked_at:
            # The direction asks for the derivative by this copy. Asked for that by the original,
            # the module that gave it would begin its backward pass; sharded, with the other ranks.
            logp = logp.clone()
        loss, metrics = self._loss_of(batch, self._current(logp, entropies, tokens))
        if is_looked_at:
            pass_.direction.add(loss, logp, self._advantages(batch), batch.columns["mask"])
        pass_.progress.observe(logp.detach(), entropies.detach(), batch, metrics)
        return pass_.part_of(loss, batch)

    def _advantages(self, batch: Batch) -> Tensor:
        """Returns the advantages, float32[A], that the objective's loss is to follow."""
        objective = self._objective
        if not isinstance(objective, MakesAdvantages):
            return batch.columns["advantage"]
        made: Tensor = self._code.call(objective.advantages, batch.columns)
        return made

    def _check_terms(self, pass_: _Pass, batch: Batch) -> None:
        prepared = pass_.prepared
        if prepared.advantages is not None:
            progress = pass_.progress
            where = f"step {progress.step}, update {len(progress.rates)}, rank {self._context.rank}"
            check_terms(batch, prepared.records, prepared.advantages, where)

    def _check_ratio(self, pass_: _Pass) -> None:
        """Raises TrainingError when an update compares with other log-probs than those of the
        step's beginning.

        Until an update may have changed the weights, the ratio to them is 1; once one has, it is
        not 1 everywhere. In bfloat16 an update may be too small to show in any log-prob.

        Raises NonFiniteLoss when log-probs of either side are not finite.
        """
        if "old_logp" not in self._objective.requires:
            return
        furthest, actions = self._engine.ranks.max([pass_.furthest, pass_.actions])
        self._check_finite(pass_, furthest)
        band = self._settings.traits().logprob_band
        exact = self._settings.dtype == "float32"
        if not self._may_have_moved and furthest > band:
            problem = (
                f"before any update log-probs differ by {furthest:.3g} from those that ratios "
                f"compare with, the band is {band:g}"
            )
            why = "scoring the same tokens twice gives other log-probs: dropout, or another batch"
        elif self._moved and exact and actions and furthest == 0:
            problem = "after an update every ratio is exactly 1"
            why = "old log-probs were computed anew for this update, so nothing is ever clipped"
        else:
            return
        progress = pass_.progress
        raise TrainingError(
            problem,
            where=f"step {progress.step}, update {len(progress.rates)}",
            why=why,
            todo="old_logp is computed once, before the first update of a step",
        )

    def _check_finite(self, pass_: _Pass, furthest: float) -> None:
        """Raises NonFiniteLoss when a difference of log-probs, the largest of all ranks, is
        infinite: an objective may give a finite loss of them.
        """
        if math.isfinite(furthest):
            return
        self._engine.discard()
        what = "log-probs that are not finite"
        raise self._not_finite(pass_.prepared, pass_.broken, pass_.progress, what)

    def _check_reference(self, pass_: _Pass) -> None:
        """Raises TrainingError when the reference is not the policy that the run began with.

        Before the first update both give the same log-probs, within the band. After an update they
        are not all equal, in float32: else the reference shares the policy's weights. A reference
        of another model is not compared, nor one that another role gives.

        Raises NonFiniteLoss when log-probs of either side are not finite.
        """
        own = self._has_reference and not self._settings.reference_path
        if not own or "ref_logp" in self._supplied:
            return
        furthest, actions = self._engine.ranks.max([pass_.from_reference, pass_.referred])
        self._check_finite(pass_, furthest)
        band = self._settings.traits().logprob_band
        if self._updates == 0 and furthest > band:
            problem = f"before any update the reference differs by {furthest:.3g}, band {band:g}"
            why = "it is not the policy that the run began with: its log-probs are of other weights"
        elif self._changed and self._settings.dtype == "float32" and actions and furthest == 0:
            problem = "after an update the reference still gives the policy's log-probs"
            why = "it shares the policy's weights, so a penalty by it is always 0"
        else:
            return
        raise TrainingError(
            problem,
            where=f"step {pass_.progress.step}, update 0",
            why=why,
            todo=f"roles.{self._context.role}.config.reference_path names another reference",
        )

    def _check_resplit(self, pass_: _Pass, part: Sequence[Batch | None]) -> None:
        """Computes the gradient of a minibatch again, cut otherwise; raises where it is another.

        Engines that show their gradient do it. The update goes on with the first gradient.
        """
        engine = self._engine
        if not isinstance(engine, ShowsGradient):
            return
        # The first gradient is kept aside, and the engine is emptied.
        gradient = engine.gradient()
        engine.discard()
        return_free_pages()  # else passes of other sizes lie between what the first ones have left
        # The same records go through the same objective, in other micro-batches.
        again = self._resplit(pass_.prepared, part)
        weight = engine.ranks.sum([sum(map(self._weight, filter(None, again)))])[0]

        def loss(
            batch: Batch, logp: Tensor, entropies: Any, tokens: Tensor | None = None
        ) -> Tensor:
            self._context.progress()
            return self._loss_of(batch, self._current(logp, entropies, tokens))[0] / weight

        self._accumulate(again, loss)
        # The first one is put back: the update goes on as if nothing had happened.
        second = engine.gradient()
        engine.discard()
        return_free_pages()
        engine.set_gradient(gradient)
        where = f"step {pass_.progress.step}, update 0"
        # Where no record has an advantage, the gradient is a penalty's alone; see PENALTY_NORM.
        advantages = [float(batch.columns["advantage"].abs().max()) for batch in filter(None, part)]
        (largest,) = engine.ranks.max([max(advantages, default=0.0)])
        check_same(
            gradient,
            second,
            engine.ranks,
            TOLERANCES[self._settings.dtype],
            where,
            ignored=0.0 if largest > 0 else PENALTY_NORM,
            config=self._model_config(),
        )

    def _model_config(self) -> dict[str, Any] | None:
        """Returns the language model's config; None where its directory is not known."""
        model = self._context.model
        directory = directory_here(str(model.get("path") or ""), model.get("revision"))
        if directory is None or not (directory / "config.json").is_file():
            return None
        config = read_config(directory)
        return dict(config.get("text_config", config))

    def _resplit(self, prepared: _Prepared, part: Sequence[Batch | None]) -> list[Batch | None]:
        """Returns a minibatch's records in reverse order, in at least two micro-batches."""
        places = [place for batch in filter(None, part) for place in batch.index.tolist()]
        placed = [(place, prepared.records[place]) for place in sorted(places, reverse=True)]
        half = len(placed) // 2
        if self._whole_groups:  # no cut inside a group
            while 0 < half < len(placed) and placed[half - 1][1].ordinal == placed[half][1].ordinal:
                half += 1
        batches: list[Batch | None] = []
        for packed in self.pack([placed[:half], placed[half:]]):
            count = int(self._engine.ranks.max([len(packed)])[0])
            batches += [*packed, *[None] * (count - len(packed))]
        carry_columns(part, batches)
        return batches

    def _loss_of(
        self, batch: Batch, current: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The objective's loss_sum and metrics of one micro-batch. Raises ContractError for a loss
        from which no gradient can come.
        """
        function = self._objective.loss
        answer = self._code.call(function, batch.columns, current)
        if not isinstance(answer, tuple) or len(answer) != 3:
            problem = f"loss() gave a {type(answer).__name__}, not (loss_sum, weight_sum, metrics)"
            raise self._code.broken(problem, function)
        loss, _, metrics = answer
        if not isinstance(loss, Tensor) or loss.ndim:
            raise self._code.broken("loss() gave a loss_sum that is no 0-d tensor", function)
        if any(t.requires_grad for t in current.values()) and not loss.requires_grad:
            raise self._code.broken("loss() gave a loss_sum without a gradient", function)
        return loss, metrics

    def _not_finite(
        self, prepared: _Prepared, batches: Sequence[Batch | None], progress: Progress, what: str
    ) -> NonFiniteLoss:
        """Writes the columns of the batches' records to a file and returns an error that names it.

        The file is in ``dump_dir``, or else in the worker's directory.
        """
        from safetensors.numpy import save_file

        rank = self._context.rank
        update = len(progress.rates)
        directory = Path(self._settings.dump_dir or self._context.directory).expanduser()
        path = directory / f"nonfinite-step{progress.step}-update{update}-rank{rank}.safetensors"
        arrays: dict[str, np.ndarray] = {}
        for batch in batches:
            for index in [] if batch is None else batch.index.tolist():
                record = prepared.cut.given[prepared.cut.owners[index]]
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
        """Yields the weights by Hugging Face name.

        An array may be a view of live memory: it is valid until the next ``train``.
        """
        return self._engine.export_weights()

    def diagnose_export(self) -> list[Finding]:
        """See ``DiagnosesExport``; nothing of engines that do not show their weights."""
        engine = self._engine
        if not isinstance(engine, ShowsWeights):
            return []
        bound = adamw_bound(self._settings.betas, max(1, self._updates))
        step = self._last_rate * bound
        weights = engine.weights()
        if isinstance(engine, NamesExports):
            weights = engine.weights_by_export()
        findings: list[Finding] = diagnose_export(engine.export_weights(), weights, step)
        return findings

    def numbers(self) -> dict[str, Any]:
        """Returns the numbers that a checkpoint holds besides the engine's state."""
        learned = objective_state.learned(self._objective)
        return {
            "version": self.version,
            "updates": self._updates,
            "scheduled_steps": self._scheduled_steps,
            "objective": learned,
        }

    def save(self, directory: Path) -> None:
        """See ``Trainer.save``."""
        self._engine.save(directory, self.numbers())

    def load(self, directory: Path) -> None:
        numbers = self._engine.load(directory)
        self.version = int(numbers["version"])
        self._updates = int(numbers["updates"])
        # Older checkpoints count updates alone.
        steps = self._updates // self._context.updates_per_step
        self._scheduled_steps = int(numbers.get("scheduled_steps", steps))
        objective_state.restore(self._objective, numbers.get("objective", {}))

    def save_pretrained(self, directory: Path) -> None:
        self._engine.save_pretrained(directory)

    def close(self) -> None:
        self._prepared = None
        self._engine.close()


@dataclass(kw_only=True)
class _Pass:
    """The forward and backward passes of one update, and what the checks need of them.

    All but ``weight`` is of this rank; the checks ask all ranks for it afterwards.

    weight: the normaliser, summed over all ranks.
    progress: the step's metrics.
    first: whether this is the first update of the step.
    prepared: the step's records.
    losses: of this rank's micro-batches so far, before normalisation.
    furthest: the largest difference so far between log-probs and ``old_logp``, of trained actions;
        infinite where one is no number.
    actions: this rank's trained actions so far.
    from_reference, referred: the same two numbers, of ``ref_logp``.
    broken: this rank's micro-batches whose loss was not finite, or whose log-probs.
    direction: of the loss, where it is looked at.
    """

    weight: float
    progress: Progress
    first: bool
    prepared: _Prepared
    losses: list[float] = field(default_factory=list)
    furthest: float = 0.0
    actions: float = 0.0
    from_reference: float = 0.0
    referred: float = 0.0
    broken: list[Batch] = field(default_factory=list)
    direction: Direction = field(default_factory=Direction)

    def part_of(self, loss: Tensor, batch: Batch) -> Tensor:
        """Notes the loss of a micro-batch and returns its part of the normalised loss, 0-d."""
        value = float(loss.detach())
        self.losses.append(value)
        if not math.isfinite(value):
            self.broken.append(batch)
        return loss / self.weight if self.weight > 0 else loss * 0.0

    def measure_ratio(self, batch: Batch, logp: Tensor) -> None:
        """Notes how far log-probs, float32[A], are from ``old_logp`` and ``ref_logp``, if any."""
        mask = batch.columns["mask"]
        if (old_logp := batch.columns.get("old_logp")) is not None:
            self.furthest = max(self.furthest, self._gap(batch, logp, old_logp))
            self.actions += float(mask.sum())
        if (ref_logp := batch.columns.get("ref_logp")) is not None:
            self.from_reference = max(self.from_reference, self._gap(batch, logp, ref_logp))
            self.referred += float(mask.sum())

    def _gap(self, batch: Batch, logp: Tensor, other: Tensor) -> float:
        """Returns the largest difference of log-probs, float32[A], over trained actions.

        It is infinite where one is no number: in Python NaN is no larger than any number, and would
        be taken for no difference.
        """
        gaps = (logp - other).abs().masked_fill(batch.columns["mask"] == 0, 0.0)
        gap = float(gaps.max())
        if not math.isfinite(gap):
            self.broken.append(batch)
            return math.inf
        return gap


def _scalar_rows(prepared: _Prepared, scalars: frozenset[str]) -> list[dict[str, float]]:
    """Returns name -> value of the preparation scalars, for each prepared record.

    A record without actions is in no batch; its scalars are 0. Those of rows add up.
    """
    cut = prepared.cut
    scalar_rows: list[dict[str, float]] = [dict.fromkeys(scalars, 0.0) for _ in cut.given]
    for batch in filter(None, prepared.all()):
        for name in scalars:
            values = _sum_terms(batch, name)
            for owner, value in zip(cut.owners[batch.index].tolist(), values, strict=True):
                scalar_rows[owner][name] += value
    return scalar_rows


def _sum_terms(batch: Batch, name: str) -> list[float]:
    """Returns a preparation scalar of each of the batch's records, summed over trained actions."""
    columns = batch.columns
    terms = _SCALARS[name](columns["old_logp"] - columns["ref_logp"]) * columns["mask"]
    sums = torch.zeros(len(batch.index), device=terms.device)
    values: list[float] = sums.index_add_(0, columns["record"], terms).tolist()
    return values


def _ids_of(required: Iterable[str], role: str) -> str:
    """Returns the column whose tokens' log-probs an objective requires; "" where it requires none.

    Raises ConfigError for more than one.
    """
    columns = sorted(filter(None, map(ids_column, required)))
    if len(columns) > 1:
        raise ConfigError(
            f"the objective requires log-probs of the tokens of {len(columns)} columns.",
            where=f"roles.{role}.use",
            why=f"This trainer computes those of one: {', '.join(columns)}.",
        )
    return columns[0] if columns else ""


def _as_tensor(column: np.ndarray) -> Tensor:
    """Returns a role's column as float32, or, where it holds whole numbers, as int64."""
    is_whole = np.issubdtype(column.dtype, np.integer)
    return torch.from_numpy(column.astype(np.int64 if is_whole else np.float32))
