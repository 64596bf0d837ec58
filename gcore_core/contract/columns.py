"""Defines columns: the arrays of one record, by name.

``gcore_core.contract.records`` lists those of records whose actions are tokens. ``ColumnSpec``
describes those that roles add, with a value or a row of values for each action.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Columns = Mapping[str, np.ndarray]

#: What a column of a role may be made of.
COLUMN_DTYPES = ("float32", "int32")
#: The column that says which experts of a mixture computed each token; see ``routing_problem``.
ROUTING = "routing"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class ColumnSpec:
    """Describes a per-action column that a role gives.

    name: lower case words joined by "_".
    dtype: one of ``COLUMN_DTYPES``.
    wide: whether each action has a row of k values, so that the array is [A, k]; else it is [A]. k
        is what the settings of the role's backend say (``SaysWidths``); where they say none, the
        role gives no such column in that run.
    k: numbers of a row; 0 of a column that is not wide, or whose backend is not known yet.
    """

    name: str
    dtype: str = "float32"
    wide: bool = False
    k: int = 0

    def shape(self, actions: int) -> tuple[int, ...]:
        """Returns the shape of the column of a record with so many actions."""
        return (actions, self.k) if self.wide else (actions,)

    def problem_of(self, column: np.ndarray, actions: int) -> str:
        """Returns what is wrong with the column of a record; empty when nothing is.

        actions: how many the record has, masked ones included.
        """
        shape = self.shape(actions)
        if column.dtype != np.dtype(self.dtype) or column.shape != shape:
            actual = f"{column.dtype}{list(column.shape)}"
            return f"column {self.name!r} is {actual}, it must be {self.dtype}{list(shape)}"
        if not np.isfinite(column).all():
            return f"column {self.name!r} is not finite"
        return ""

    def problems(self) -> list[str]:
        """Returns the reasons why this description is not valid; none when it is."""
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(f"column {self.name!r} is not lower case words joined by '_'")
        if self.dtype not in COLUMN_DTYPES:
            known = ", ".join(COLUMN_DTYPES)
            problems.append(f"column {self.name!r}: dtype {self.dtype!r} is none of {known}")
        if self.k:
            problems.append(f"column {self.name!r}: k is said by the backend's settings")
        return problems


def routing_problem(column: np.ndarray, prompt: int, actions: int) -> str:
    """Returns what is wrong with a record's column ``ROUTING``; empty when nothing is.

    It is uint8, or uint16 where a layer has more than 256 experts, of the shape [P + A - 1, L, k]:
    for each token that was read, of each layer with experts the k that computed it, numbered from
    0, in any order. A record's last action is never read.

    prompt, actions: P and A; A is at least 1.
    """
    if column.dtype not in (np.uint8, np.uint16):
        return f"column {ROUTING!r} is {column.dtype}, it must be uint8 or uint16"
    tokens = prompt + actions - 1
    if column.ndim != 3 or len(column) != tokens:
        return (
            f"column {ROUTING!r} has the shape {list(column.shape)}, it must be [{tokens}, L, k]: "
            f"{prompt} tokens of the prompt and {actions} actions, without the last"
        )
    ordered = np.sort(column, -1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        return f"column {ROUTING!r} names an expert twice for one token and layer"
    return ""
