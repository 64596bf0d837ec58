"""Cuts a record of several sequences into rows, each of which a model reads by itself.

Such a record comes from an environment that rewrote its history, or asked twice from one point. Its
column ``sequences`` int32[S, 3] has of each sequence

    begin    where its own part begins among the record's actions
    parent   number of an earlier sequence whose beginning it shares; -1 for none
    shared   how many ids, of prompt and actions, it has in common with its parent; for the first
             sequence: how many ids the record's prompt has

The own parts stand one behind the other, and together they are all actions of the record. To train
on such a record, or to score it, it is cut into *rows*, one for each sequence: the ids that it
shares are the row's prompt, and its own part is the row's actions. A column with a value for each
action of all rows, joined, is that column of the record:

    record   prompt p q   actions a b r s c t d   mask 1 1 0 0 1 0 1   sequences (0 -1 2) (5 0 4)
    row 0    prompt p q          actions a b r s c
    row 1    prompt p q a b      actions t d

A record without the column is one row, and so is one with a single sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gcore_core.contract.columns import ROUTING, SEQUENCES, Columns
from gcore_core.contract.errors import DataError

#: Columns that tell of the record as a whole; no row has them.
_OF_RECORD = frozenset({"text", "turns", "episode", SEQUENCES})
#: Columns with a value for each token that is read. They cannot be cut, and no environment has one.
_OF_TOKENS = frozenset({ROUTING, "image_grid_thw"})


@dataclass(frozen=True, kw_only=True)
class Row:
    """Holds one sequence of a record as a record of its own.

    begin, end: where its actions lie among the record's.
    columns: of the row. ``prompt_ids`` has what the sequence reads before its first action. A
        column with a value for each action has the values of the row's actions. All others are the
        record's, but ``text``, ``turns``, ``episode`` and ``sequences`` are left out.
    """

    begin: int
    end: int
    columns: Columns

    @property
    def is_trained(self) -> bool:
        """Whether a policy sampled any of its actions."""
        return bool(np.any(self.columns["action_mask"]))


def rows_of(columns: Columns) -> list[Columns]:
    """Returns the columns of each row.

    A record of one sequence has one row: its own columns, unchanged.

    Raises DataError where the column ``sequences`` cannot be.
    """
    return [row.columns for row in cut(columns)]


def cut(columns: Columns) -> list[Row]:
    """Cuts a record into one row for each sequence.

    A later sequence that shares nothing has no prompt in the record. The given ids with which it
    begins are then the row's prompt, and no actions of the row.

    Raises DataError where the column ``sequences`` cannot be.
    """
    actions = len(columns.get("action_ids", ()))
    if len(columns.get(SEQUENCES, ())) == 0 or columns[SEQUENCES].shape == (1, 3):
        return [Row(begin=0, end=actions, columns=columns)]
    if problem := _problem_of(columns):
        raise DataError(
            f"a record's column {SEQUENCES!r} {problem}.",
            where="action_ids",
            why="Trainers read each sequence for itself, and must know what it begins with.",
            todo="Make it as gcore_language.sequences says.",
        )
    of_actions = {
        name: column
        for name, column in columns.items()
        if name not in _OF_RECORD and name != "prompt_ids" and column.shape[:1] == (actions,)
    }
    others = {n: c for n, c in columns.items() if n not in _OF_RECORD and n not in of_actions}
    rows = []
    for begin, end, prompt in _parts(columns):
        own = {name: column[begin:end] for name, column in of_actions.items()}
        rows.append(Row(begin=begin, end=end, columns={**others, **own, "prompt_ids": prompt}))
    return rows


def trained_rows(columns: Columns) -> list[Row]:
    """Returns the rows in which a policy sampled an action; the first row where there is none.

    A trainer trains on these. Each weighs 1 / (their number) of the record.

    Raises DataError where the column ``sequences`` cannot be.
    """
    rows = cut(columns)
    if len(rows) == 1:
        return rows  # also a record without a mask
    return [row for row in rows if row.is_trained] or rows[:1]


def join(columns: Columns, rows: Sequence[Row], values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns what was computed of a record's rows as one column of the record, [A, ...].

    An action that is in no row gets 0.

    columns: of the record.
    values: of each row an array [A, ...], where A is how many actions the row has.
    """
    if len(rows) == 1 and rows[0].columns is columns:
        return values[0]
    joined = np.zeros((len(columns["action_ids"]), *values[0].shape[1:]), values[0].dtype)
    for row, own in zip(rows, values, strict=True):
        joined[row.begin : row.end] = own
    return joined


def sampled_alone(columns: Columns, logp: np.ndarray) -> np.ndarray:
    """Returns log-probs, or entropies, with 0 at the actions that were given, not sampled.

    A record without the column ``sequences`` keeps all of them.

    logp: float32[A].
    """
    if SEQUENCES not in columns:
        return logp
    return np.where(columns["action_mask"] != 0, logp, np.zeros_like(logp))


def by_rows(
    records: Sequence[Columns], score: Callable[[Sequence[Columns]], list[np.ndarray]]
) -> list[np.ndarray]:
    """Returns the log-probs of each record's actions, float32[A], which it computes row by row.

    score: takes the columns of all rows, and returns float32[A] of each. It is called once.

    Raises DataError where a column ``sequences`` cannot be.
    """
    rows = [cut(record) for record in records]
    scored = iter(score([row.columns for own in rows for row in own]))
    return [
        sampled_alone(record, join(record, own, [next(scored) for _ in own]))
        for record, own in zip(records, rows, strict=True)
    ]


def _parts(columns: Columns) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (begin, end, prompt) of each row."""
    ids, mask = columns["action_ids"], columns["action_mask"]
    whole: list[np.ndarray] = []  # all ids of each sequence
    table = columns[SEQUENCES].tolist()
    ends = [begin for begin, _, _ in table[1:]] + [len(ids)]
    for (begin, parent, shared), end in zip(table, ends, strict=True):
        read = columns["prompt_ids"] if parent < 0 and not whole else whole[parent][:shared]
        if parent < 0 and whole:
            sampled = np.flatnonzero(mask[begin:end])
            first = begin + (int(sampled[0]) if len(sampled) else max(end - begin - 1, 0))
            read, begin = ids[begin:first], first
            whole.append(np.concatenate([read, ids[first:end]]))
        else:
            whole.append(np.concatenate([read, ids[begin:end]]))
        yield begin, end, read


def _problem_of(columns: Columns) -> str:
    """Returns what is wrong with the table of sequences; empty when nothing is."""
    table, actions = columns[SEQUENCES], len(columns["action_ids"])
    if table.ndim != 2 or table.shape[1] != 3:
        return f"has the shape {list(table.shape)}, it must be [S, 3]"
    if tokens := sorted(_OF_TOKENS & columns.keys()):
        return f"stands beside {tokens[0]!r}, which has a value for each token that was read"
    begins = table[:, 0]
    if begins[0] != 0 or (np.diff(begins) < 0).any() or begins[-1] > actions:
        return f"has the begins {begins.tolist()}, for {actions} actions"
    lengths: list[int] = []  # ids of each sequence
    ends = np.append(begins[1:], actions)
    for number, (begin, parent, shared) in enumerate(table.tolist()):
        if number == 0 and parent < 0:
            shared = len(columns["prompt_ids"])
        elif parent >= number or (parent >= 0 and not 1 <= shared <= lengths[parent]):
            return f"says that sequence {number} begins with {shared} ids of sequence {parent}"
        elif parent < 0 and ends[number] > begin and columns["action_mask"][begin]:
            return f"says that sequence {number} shares nothing, and its first id was sampled"
        lengths.append((shared if number == 0 or parent >= 0 else 0) + int(ends[number]) - begin)
    return ""
