"""Defines what the core calls on a model that gives per-action columns, such as a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from gcore_core.contract.trainer import TrainRecord


@runtime_checkable
class Annotates(Protocol):
    """Gives per-action columns.

    Also trait ``annotates`` of a trainer, whose role then names the columns. It is called on all
    ranks at once in the preparation of a step, before ``Trainer.prepare``; each rank gets the
    records that it will train on, and may get none.
    """

    def annotate(self, records: Sequence[TrainRecord]) -> list[Mapping[str, np.ndarray]]:
        """Returns for each record, in order, the columns named by ``WorkerContext.columns`` and no
        others.

        Each has the dtype and the shape, [A] or [A, k], of its ``ColumnSpec``, A the record's
        actions, and is finite, also where ``action_mask`` is 0. A record gets the same whatever
        else is in the call, and however often it is asked for.
        """


@runtime_checkable
class Annotator(Annotates, Protocol):
    """Gives per-action columns from a model that is not trained.

    version: of the weights that it holds. All workers of a role must hold the same.
    """

    version: int

    def close(self) -> None: ...
