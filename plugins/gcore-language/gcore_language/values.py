"""A value head on a causal language model: one number for every state of a record.

A record with A actions has A + 1 states: before each action, and after the last one. The hidden
state that predicts an action is the state before it. The last action predicts nothing, so log-probs
need not feed it; values do. So a record is packed with one more action, which is never fed: its
place is the state after the last action (``with_end``). Every layout then gives values without
knowing of them:

    actions    a b c            states    a b c END
    predicted by  p a b         values of  p a b c

The head has the form of transformers' sequence classifiers with one output: ``score.weight``
float32[1, D], without a bias. What is saved opens with AutoModelForSequenceClassification, which
reads the value after the last token; so do the servers of reward models. (A token classifier would
give all states, but has a bias and a dropout, and nothing else opens it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.columns import ROUTING
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.trainer import TrainRecord
from gcore_language import flat
from gcore_language.packing import Batch, counts_of
from gcore_language.policy import Entropy, Policy

#: The head's name in a model directory.
SCORE = "score.weight"


def trains_values(context: WorkerContext) -> bool:
    """Returns whether a trainer's model gets a value head: its objective requires ``values``."""
    return "values" in context.parts["objective"].requires


class ValueModel(Policy):
    """Wraps a sequence classifier of transformers with one output; see ``load_value_model``.

    It goes through the same batches as a policy, and gives values where that gives log-probs.
    """

    def __init__(self, model: object) -> None:
        super().__init__(model)
        self.head_apart = True

    def forward(
        self, batch: Batch, entropy: Entropy = "none", tokens: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Returns (values float32[S], None) of the batch's states.

        entropy, tokens: are not looked at; values have neither.

        Raises DataError when the batch has images.
        """
        if batch.images:
            raise DataError("records have images, and a value head takes none.", where="values")
        hidden = self._hidden(batch)
        # In float32 whatever the trunk computes in: bfloat16 has two digits, a value has more.
        with torch.autocast(hidden.device.type, enabled=False):
            return flat.of_enough_rows(self.model.score, hidden.float()).squeeze(-1), None

    def trial(self, batch: Batch) -> Tensor:
        """Returns what ``check_layouts`` compares: the hidden states [S, D].

        A new head may be 0, and then all values are equal whatever they are computed of.
        """
        return self._hidden(batch).float()


def with_end(record: TrainRecord) -> TrainRecord:
    """Returns a record with one more action, for the state after the last one.

    The action is not trained on, and neither its token nor its log-prob mean anything. Columns that
    other roles gave stay as they are. The experts of the policy's tokens are left out: this model
    is another one.
    """
    columns = record.columns
    end = {
        "action_ids": np.append(columns["action_ids"], np.int32(0)),
        "action_mask": np.append(columns["action_mask"], np.uint8(0)),
        "logp": np.append(columns["logp"], np.float32(0)),
    }
    kept = {name: column for name, column in columns.items() if name != ROUTING}
    return replace(record, columns={**kept, **end})


def is_end(batch: Batch) -> Tensor:
    """Returns bool[S], true at the last state of each record of a batch."""
    record = batch.columns["record"]
    following = torch.cat([record[1:], record.new_full((1,), -1)])
    return record != following


def by_record(batch: Batch, values: Tensor) -> Sequence[tuple[int, np.ndarray]]:
    """Returns (``Sample.index``, values float32[A + 1]) of each record of a batch.

    values: float32[S], of the batch's states.
    """
    counts = counts_of(batch.columns["record"], len(batch.index)).tolist()
    parts = values.detach().cpu().numpy().astype(np.float32)
    cuts = np.split(parts, np.cumsum(counts)[:-1])
    return list(zip(batch.index.tolist(), cuts, strict=True))
