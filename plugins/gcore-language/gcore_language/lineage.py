"""Checks that a loss is computed of what was sampled and sent: the last link of a record's lineage.

The ids of a record are known up to here; in a micro-batch only its place is. So what every
micro-batch says of its records is held against the records themselves, at the moment in which the
loss is computed. It costs a comparison of four arrays with one number for each action.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gcore_core.contract.errors import RecordMismatch
from gcore_core.contract.lineage import name_of
from gcore_core.contract.trainer import TrainRecord
from gcore_language.packing import Batch


def check_terms(
    batch: Batch,
    records: Sequence[TrainRecord],
    advantages: np.ndarray | Sequence[np.ndarray],
    where: str,
) -> None:
    """Raises RecordMismatch when a micro-batch has other terms than its records.

    Looked at are tokens, ``action_mask``, the generator's log-probs and the advantage. Batches of
    records without ``action_ids`` are passed: their terms are not tokens.

    batch: its column ``advantage`` is set.
    records, advantages: the prepared ones, and float64[records], or a float64[A] for each record;
        ``batch.index`` counts in them.
    """
    sources = [records[place] for place in batch.index.tolist()]
    if not sources or any("action_ids" not in source.columns for source in sources):
        return
    lengths = np.array([len(source.columns["action_ids"]) for source in sources], np.int64)
    expected = {
        "tokens": np.concatenate([s.columns["action_ids"] for s in sources]),
        "action_mask": np.concatenate([s.columns["action_mask"] for s in sources]) != 0,
        "logp": np.concatenate([s.columns["logp"] for s in sources]).astype(np.float32),
        "advantage": _by_action(advantages, batch.index, lengths).astype(np.float32),
    }
    given = {
        "tokens": batch.targets,
        "action_mask": batch.columns["mask"],
        "logp": batch.columns["rollout_logp"],
        "advantage": batch.columns["advantage"],
    }
    for name, column in given.items():
        values = column.detach().cpu().numpy()
        wrong = (
            _differ(values, expected[name])
            if values.shape == expected[name].shape
            else np.ones(int(lengths.sum()), np.bool_)
        )
        if wrong.any():
            at = int(wrong.argmax())
            place = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            raise _mismatch(
                sources[place], name, int(wrong.sum()), values, expected[name], at, where
            )


def _by_action(
    advantages: np.ndarray | Sequence[np.ndarray], index: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Returns the advantages of the actions of some records, one after the other."""
    if isinstance(advantages, np.ndarray):
        repeated: np.ndarray = np.repeat(advantages[index], lengths)
        return repeated
    return np.concatenate([advantages[place] for place in index.tolist()])


def _differ(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns bool[A]: where two arrays differ. A NaN equals a NaN: its loss has its own error."""
    same = values == expected
    if values.dtype.kind == "f":
        same |= np.isnan(values) & np.isnan(expected)
    return np.asarray(~same)


def _mismatch(
    record: TrainRecord,
    column: str,
    count: int,
    values: np.ndarray,
    expected: np.ndarray,
    at: int,
    where: str,
) -> RecordMismatch:
    seen = f"{values[at]:g}" if at < len(values) else "nothing"
    return RecordMismatch(
        f"the loss of record {name_of(record.ordinal, record.sample)} is computed with another "
        f"{column} than it has",
        where=where,
        why=f"{seen} in place of {expected[at]:g}, at {count} of the micro-batch's actions",
        todo="look at what packs, sorts or joins records between preparation and loss",
        ordinal=record.ordinal,
        sample=record.sample,
        column=column,
    )
