"""Defines columns: the arrays of one record, by name.

``gcore_core.contract.records`` lists the columns of records whose actions are tokens.
``ColumnSpec`` describes those that roles add, with a value or a row of values for each action.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Columns = Mapping[str, np.ndarray]

#: What a column of a role may be made of.
COLUMN_DTYPES = ("float32", "int32")
#: The column that says which experts of a mixture computed each token; see ``routing_problem``.
ROUTING = "routing"
#: The column that says which version of the weights sampled each action; see ``SampledBy``.
VERSION = "version"
#: The column that tells the sequences of a record; ``gcore_language.sequences`` reads it.
SEQUENCES = "sequences"
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


#: The columns that every record has whose actions are tokens, as ``records`` lists them.
TOKEN_COLUMNS: Mapping[str, np.dtype[Any]] = {
    "prompt_ids": np.dtype(np.int32),
    "action_ids": np.dtype(np.int32),
    "logp": np.dtype(np.float32),
    "action_mask": np.dtype(np.uint8),
    "temperature": np.dtype(np.float32),
    "text": np.dtype(np.uint8),
}
_PER_ACTION = ("action_ids", "logp", "action_mask")


def token_columns_problem(columns: Columns) -> str:
    """Returns what is wrong with the columns of a record; empty when nothing is.

    A record without ``action_ids`` has actions of another kind, and is not looked at.
    """
    if "action_ids" not in columns:
        return ""
    for name, dtype in TOKEN_COLUMNS.items():
        if name not in columns:
            return f"column {name!r} is missing; there are {', '.join(sorted(columns))}"
        if columns[name].dtype != dtype:
            return f"column {name!r} is {columns[name].dtype}, it must be {dtype}"
    actions = columns["action_ids"].size
    if any(columns[name].shape != (actions,) for name in _PER_ACTION):
        told = ", ".join(f"{name} {list(columns[name].shape)}" for name in _PER_ACTION)
        return f"each action has one entry in three columns, and they have the shapes {told}"
    if columns["temperature"].shape != ():
        return f"column 'temperature' is one number, its shape is {columns['temperature'].shape}"
    return ""


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


@dataclass
class SampledBy:
    """Notes which versions of the weights sample a sample that runs, from push to push.

    A generator that has samples go on through pushes makes the column ``VERSION`` by it. Where one
    version sampled all actions of a record there is no such column: ``versions`` names it.

    ends: (actions that there were at a push, version that sampled the latest of them), of each push
        before which there were new ones.
    """

    ends: list[tuple[int, int]] = field(default_factory=list)

    def pushed(self, actions: int, version: int) -> None:
        """Notes a push.

        actions: that the sample has so far.
        version: of the weights that sampled until now.
        """
        if actions > (self.ends[-1][0] if self.ends else 0):
            self.ends.append((actions, version))

    @property
    def older(self) -> int:
        """How many of its first actions were there at the latest push."""
        return self.ends[-1][0] if self.ends else 0

    def first(self, version: int) -> int:
        """Returns the version of the first action.

        version: of the weights that sample now.
        """
        return self.ends[0][1] if self.ends else version

    def columns(self, actions: int, version: int) -> dict[str, np.ndarray]:
        """Returns the column of a record with so many actions; nothing where it needs none.

        version: of the weights that sample now.
        """
        if not self.ends:
            return {}
        column = np.full(actions, version, np.int32)
        begin = 0
        for end, older in self.ends:
            column[begin:end] = older
            begin = end
        return column_of_versions(column)


def column_of_versions(versions: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the column ``VERSION`` of versions int32[A]; nothing where all are equal."""
    is_cut = bool(versions.size) and bool((versions != versions[0]).any())
    return {VERSION: versions} if is_cut else {}


def action_versions(columns: Columns, actions: int, first: int) -> np.ndarray:
    """Returns which version of the weights sampled each action of a record, int32[A].

    actions: how many the record has.
    first: the version of its first one, which is that of all where the column is absent.
    """
    return columns[VERSION] if VERSION in columns else np.full(actions, first, np.int32)


def action_ages(columns: Columns, actions: int, first: int, step: int) -> np.ndarray:
    """Returns the column "age" that an objective may require of a record, int64[A].

    actions, first: as of ``action_versions``. A record that nobody sampled has version -1.
    step: the version of the weights that the step begins with.
    """
    versions = action_versions(columns, actions, first).astype(np.int64)
    return np.where(versions < 0, 0, np.maximum(step - versions, 0))


def version_problem(
    column: np.ndarray, actions: int, versions: tuple[int, int], begins: Sequence[int] = ()
) -> str:
    """Returns what is wrong with a record's column ``VERSION``; empty when nothing is.

    It is int32[A] and never falls within a sequence. The oldest is the record's first version, and
    none is behind the last one.

    actions: A, at least 1.
    versions: the record's.
    begins: the actions with which further sequences of the record begin.
    """
    if column.dtype != np.int32 or column.shape != (actions,):
        actual = f"{column.dtype}{list(column.shape)}"
        return f"column {VERSION!r} is {actual}, it must be int32[{actions}]"
    falls = np.flatnonzero(np.diff(column) < 0) + 1
    if not np.isin(falls, begins).all():
        return f"column {VERSION!r} falls: weights get newer while an answer is sampled"
    oldest, newest = column.min(), column.max()
    if oldest != versions[0] or newest > versions[1]:
        return (
            f"column {VERSION!r} goes from {oldest} to {newest}, and the record says that "
            f"versions {versions[0]} to {versions[1]} sampled it"
        )
    return ""
