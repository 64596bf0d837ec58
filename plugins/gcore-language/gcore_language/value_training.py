"""Trains a value head with the program of ``training``: states take the place of actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gcore_core.contract.columns import Columns
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.trainer import StartLogprobs, TrainRecord
from gcore_language.packing import Batch
from gcore_language.training import LanguageTrainer, _Pass, _Prepared, check_objective
from gcore_language.values import by_record, is_end, trains_values, with_end

#: What an objective that requires ``values`` may require.
SUPPLIED_WITH_VALUES = frozenset({"values", "old_values", "group", "sample"})
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
    float32[S], under the weights before this step's first update. ``current`` has ``values``
    float32[S] alone, with a gradient. A reward model, whose reward is the value after the last
    action, reads ``values[end]`` float32[R], in the order of ``record``.

    Of a record without actions there is the state after its prompt.
    """

    _output = "values"

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
            self._fill(prepared.all(), "old_values", "policy")
        return [{} for _ in records]

    def _packed_with_ends(self, records: Sequence[TrainRecord]) -> _Prepared:
        prepared = self._packed([with_end(record, self._supplied) for record in records])
        for batch in filter(None, prepared.all()):
            batch.columns["end"] = is_end(batch)
        return prepared

    def _packed_to_evaluate(self, records: Sequence[TrainRecord]) -> list[Batch | None]:
        return self._packed_with_ends(records).all()

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """Trains on the prepared records; see ``LanguageTrainer.train``.

        Returns the same metrics but those that only a policy has.
        """
        metrics = super().train(step, advantages, minibatches, epochs)
        return {name: value for name, value in metrics.items() if name not in _OF_A_POLICY}

    def values(self, records: Sequence[TrainRecord]) -> list[np.ndarray]:
        """Returns float32[A + 1] of each record: the values before each action and after the last.

        All ranks call it at the same time; a rank may have no records.
        """
        batches = self._in_step([(i, with_end(record)) for i, record in enumerate(records)])
        values = [np.zeros(0, np.float32) for _ in records]
        for batch, given in zip(batches, self._engine.logprobs(batches, "policy"), strict=True):
            if batch is not None and given is not None:
                for place, own in by_record(batch, given):
                    values[place] = own
        return values

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """Raises ContractError: a value head gives no log-probs."""
        raise ContractError("a value head gives no log-probs.", where="logprobs")

    def start_logprobs(self) -> Sequence[StartLogprobs | None]:
        """Returns None for each record: there are no log-probs."""
        return [None] * self._at_start.records

    def _current(self, values: Tensor, entropies: Any) -> dict[str, Tensor]:
        return {"values": values}

    def _loss(self, pass_: _Pass, batch: Batch, values: Tensor, entropies: Any) -> Tensor:
        """Returns one micro-batch's part of the normalised loss, 0-d, and adds to the metrics."""
        self._context.progress()
        self._check_terms(pass_, batch)
        loss, metrics = self._loss_of(batch, self._current(values, entropies))
        pass_.progress.count(batch, metrics)
        return pass_.part_of(loss, batch)


def check_value_objective(context: WorkerContext) -> None:
    """``check_objective``, also where the objective requires values.

    A value head gives nothing else: an objective cannot require log-probs beside values.
    """
    if trains_values(context):
        check_objective(context, SUPPLIED_WITH_VALUES)
    else:
        check_objective(context)


def refuse_reference_of_values(context: WorkerContext) -> None:
    """Raises ConfigError where a trainer of values would hold a reference model."""
    if trains_values(context):
        raise ConfigError(
            "a model with a value head has no log-probs to compare with a reference's.",
            where=f"roles.{context.role}.config.reference",
            todo="Leave reference and reference_path out.",
        )
