"""Trains a value head with the program of ``training``: states take the place of actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.columns import Columns
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.trainer import StartLogprobs, TrainRecord
from gcore_language.action_advantages import per_action
from gcore_language.cut_records import CutRecords
from gcore_language.packing import Batch
from gcore_language.ranks import Ranks
from gcore_language.training import LanguageTrainer, _Pass, _Prepared, check_objective
from gcore_language.values import by_record, is_end, trains_values, with_end

#: What an objective that requires ``values`` may require of the trainer.
SUPPLIED_WITH_VALUES = frozenset({"values", "old_values", "returns", "group", "sample"})
#: The columns that a value head gives of a record: the values before and after each action.
VALUES = "values"
NEXT_VALUES = "next_values"
#: Metrics of a policy, which a value head has nothing to say of.
_OF_A_POLICY = (
    "clip_share",
    "entropy",
    "kl",
    "logprob_gap_max",
    "logprob_gap_mean",
    "logprob_gap_share",
)


class ValueTraining(LanguageTrainer):
    """Trains a value head; a plugin's class of value trainers names it before its own trainer.

    The objective gets states where others get actions: S = A + R of them, each record's states
    before its actions, then the one after the last. ``columns`` has ``record`` int64[S], ``mask``
    bool[S] (false at the state after the last action), ``end`` bool[S] (true only there),
    ``advantage`` float32[S], the record's number repeated, and, if required, ``old_values``
    float32[S], under the weights before this step's first update, and ``returns`` float32[S], of an
    advantage of level "action", 0 where ``mask`` is false. ``current`` has ``values`` float32[S]
    alone, with a gradient. A reward model, whose reward is the value after the last action, reads
    ``values[end]`` float32[R], in the order of ``record``.

    Of a record without actions there is the state after its prompt.
    """

    _output = "values"
    _explained: Mapping[str, float] = MappingProxyType({})

    @property
    def _gives_values(self) -> bool:
        """Whether the role gives columns, so that prepared records have their values."""
        return bool(self._context.columns)

    def _wanted(self) -> frozenset[str]:
        return frozenset(self._objective.requires) - SUPPLIED_WITH_VALUES

    # -- preparation -------------------------------------------------------------------------------

    def values(self, records: Sequence[TrainRecord]) -> list[np.ndarray]:
        """Returns float32[A + 1] of each record: the values before each action and after the last.

        All ranks call it at the same time; a rank may have no records. Each record is read as one
        sequence; ``annotate`` reads the sequences of each.
        """
        # By minibatch and tile, as they are trained: so a deterministic run has the same bits on
        # any number of ranks.
        minibatches = self._in_minibatches([with_end(record) for record in records])
        batches = [batch for minibatch in minibatches for batch in minibatch]
        values = [np.zeros(0, np.float32) for _ in records]
        for batch, given in zip(batches, self._engine.logprobs(batches, "policy"), strict=True):
            if batch is not None and given is not None:
                for place, own in by_record(batch, given):
                    values[place] = own
        return values

    def annotate(self, records: Sequence[TrainRecord]) -> list[Mapping[str, np.ndarray]]:
        """Returns the values before and after each action, float32[A] each; see ``Annotates``.

        The last number of a sequence's ``next_values`` is the value after its last action.
        """
        cut = CutRecords.of(records)
        return [dict(own) for own in values_of_actions(cut, self.values(cut.rows))]

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """Packs the step's records. Raises ConfigError for scalars: a value head has none."""
        if scalars:
            raise ConfigError(
                f"a value head computes no {', '.join(sorted(scalars))}.",
                where=f"roles.{self._context.role}.use",
            )
        self._prepared = prepared = self._packed_with_ends(records)
        if "old_values" in self._objective.requires:
            if self._gives_values:  # what ``annotate`` gave has come back with the records
                known = list(map(old_values, prepared.records))
                self._give_by_action(prepared, "old_values", known)
            else:
                self._fill(prepared.all(), "old_values", "policy")
        return [{} for _ in records]

    def _packed_with_ends(self, records: Sequence[TrainRecord]) -> _Prepared:
        cut = CutRecords.of(records)
        prepared = self._packed_rows(replace(cut, rows=[with_end(row) for row in cut.rows]))
        for batch in filter(None, prepared.all()):
            batch.columns["end"] = is_end(batch)
        return prepared

    def _packed_to_evaluate(self, records: Sequence[TrainRecord]) -> _Prepared:
        return self._packed_with_ends(records)

    def _attach_supplied(self, batch: Batch, records: Sequence[TrainRecord]) -> None:
        """Adds the columns that other roles gave; after the last action is that one's value."""
        for name in sorted(self._supplied):
            given = [records[i].columns[name] for i in batch.index.tolist()]
            parts = [np.append(own, own[-1] if len(own) else 0.0) for own in given]
            column = torch.from_numpy(np.concatenate(parts).astype(np.float32))
            batch.columns[name] = column.to(self._engine.device)

    # -- training ----------------------------------------------------------------------------------

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """Trains on the prepared records; see ``LanguageTrainer.train``.

        Returns the same metrics but those that only a policy has. ``explained_variance`` is that of
        the returns by the values that they were computed of, over all trained actions.
        """
        self._explained = {}
        metrics = super().train(step, advantages, minibatches, epochs)
        own = {name: value for name, value in metrics.items() if name not in _OF_A_POLICY}
        return own | self._explained

    def _give_advantages(
        self, prepared: _Prepared, numbers: np.ndarray
    ) -> np.ndarray | Sequence[np.ndarray]:
        """Adds the columns ``advantage`` and, if required, ``returns``."""
        self._give_by_record(prepared, numbers)
        if "returns" in self._objective.requires:
            ranks = self._engine.ranks
            given = prepared.cut.given
            computed = per_action(self._context.parts["advantage"], given, numbers, ranks)
            returns = computed.returns
            of_rows = prepared.cut.cut(returns)
            self._give_by_action(prepared, "returns", [np.append(own, 0.0) for own in of_rows])
            if self._gives_values:
                explained = explained_variance(given, returns, ranks)
                self._explained = {"explained_variance": explained}
        return prepared.cut.spread(numbers)

    def _current(
        self, values: Tensor, entropies: Any, tokens: Tensor | None = None
    ) -> dict[str, Tensor]:
        return {"values": values}

    def _loss(
        self,
        pass_: _Pass,
        batch: Batch,
        values: Tensor,
        entropies: Any,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Returns one micro-batch's part of the normalised loss, 0-d, and adds to the metrics."""
        self._context.progress()
        self._check_terms(pass_, batch)
        loss, metrics = self._loss_of(batch, self._current(values, entropies))
        pass_.progress.count(batch, metrics)
        return pass_.part_of(loss, batch)

    # -- what only a policy gives ------------------------------------------------------------------

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """Raises ContractError: a value head gives no log-probs."""
        raise ContractError("a value head gives no log-probs.", where="logprobs")

    def start_logprobs(self) -> Sequence[StartLogprobs | None]:
        """Returns None for each record: there are no log-probs."""
        return [None] * len(self._cut.given)


def values_of_actions(
    cut: CutRecords, values: Sequence[np.ndarray]
) -> list[Mapping[str, np.ndarray]]:
    """Returns the columns ``VALUES`` and ``NEXT_VALUES`` of each record.

    values: float32[A + 1] of each row.
    """
    before = cut.join([own[:-1] for own in values])
    after = cut.join([own[1:] for own in values])
    return [{VALUES: b, NEXT_VALUES: a} for b, a in zip(before, after, strict=True)]


def old_values(record: TrainRecord) -> np.ndarray:
    """Returns float32[A + 1] of a record that has its values as columns; see ``annotate``."""
    values, following = record.columns[VALUES], record.columns[NEXT_VALUES]
    # Without actions nothing is trained, and there is no column that has the one value.
    return np.append(values, following[-1:] if len(following) else np.float32(0))


def explained_variance(
    records: Sequence[TrainRecord], returns: Sequence[np.ndarray], ranks: Ranks
) -> float:
    """Returns 1 - Var(return - value) / Var(return) over the trained actions of all ranks.

    1: the values say all of the returns; 0: no more than a constant; below: less. It is 0 where all
    returns are equal, so that there is nothing to explain.

    returns: float64[A] of each record.
    """
    terms = []
    for record, own in zip(records, returns, strict=True):
        trained = record.columns["action_mask"] != 0
        targets = own[trained]
        errors = targets - record.columns[VALUES][trained].astype(np.float64)
        numbers = targets, targets**2, errors, errors**2
        terms.append([float(targets.size), *(float(one.sum()) for one in numbers)])
    names = [str(place) for place in range(5)]
    sums = ranks.add_up({name: [(row[int(name)], 0.0) for row in terms] for name in names})
    count, *totals = (sums.get(name, (0.0, 0.0))[0] for name in names)
    if not count:
        return 0.0
    target, squares, error, error_squares = (total / count for total in totals)
    variance = squares - target**2
    return 1.0 - (error_squares - error**2) / variance if variance > 1e-12 * squares else 0.0


def check_value_objective(context: WorkerContext, *, scores_tokens: bool = False) -> None:
    """``check_objective``, also where the objective requires values.

    A value head gives nothing else: an objective cannot require log-probs beside values. Raises
    ConfigError for a role that gives other columns than values.

    scores_tokens: whether the engine is a ``ScoresTokens``.
    """
    if not trains_values(context):
        check_objective(context, scores_tokens=scores_tokens)
        return
    check_objective(context, SUPPLIED_WITH_VALUES)
    if context.columns and set(context.columns) != {VALUES, NEXT_VALUES}:
        raise ConfigError(
            f"a value head gives {VALUES} and {NEXT_VALUES}, not {', '.join(context.columns)}.",
            where=f"roles.{context.role}.use",
        )


def refuse_reference_of_values(context: WorkerContext) -> None:
    """Raises ConfigError where a trainer of values would hold a reference model."""
    if trains_values(context):
        raise ConfigError(
            "a model with a value head has no log-probs to compare with a reference's.",
            where=f"roles.{context.role}.config.reference",
            todo="Leave reference and reference_path out.",
        )
