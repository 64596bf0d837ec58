"""Holds a run to what it has consumed: every ordinal once, of the dataset that it began with.

A loader's state that is saved and not restored, saved at the wrong moment, or restored over other
rows shows in no metric: the run goes on, and trains on prompts twice or never. So each step says
where its ordinals begin and end, and a run that goes on opens some rows of its dataset again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import DataError, RecordMismatch
from gcore_core.contract.run_files import DATA, read_metrics
from gcore_core.run.directory import write_text
from gcore_core.workers.row_digest import prompt_digest

#: Metrics of a step: its first ordinal, and the one behind its last.
FIRST = "ordinals/first"
NEXT = "ordinals/next"
#: Rows that are opened, evenly spread over the dataset.
_ROWS = 16


class ConsumedOrdinals:
    """Checks that each step begins with the ordinal at which the one before it ended.

    next_ordinal: the one at which the next step has to begin; None where that is not known, as in a
        run that goes on from a step whose metrics are not there.
    """

    def __init__(self, next_ordinal: int | None = 0) -> None:
        self.next_ordinal = next_ordinal

    @classmethod
    def of_run(cls, directory: Path, resumed_from: int | None) -> ConsumedOrdinals:
        """Returns the check of a run that begins, or that goes on from a step."""
        if not resumed_from:
            return cls()
        rows = {row["step"]: row["metrics"] for row in read_metrics(directory)}
        end = rows.get(resumed_from, {}).get(NEXT)
        return cls(None if end is None else int(end))

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises RecordMismatch when a step begins with another ordinal than it has to.

        step: how many steps have ended with it.
        metrics: of the step; without ``ordinals/first`` it consumed nothing.
        """
        if FIRST not in metrics:
            return
        first = int(metrics[FIRST])
        awaited = self.next_ordinal
        self.next_ordinal = int(metrics[NEXT])
        if awaited is None or first == awaited:
            return
        lost = first > awaited
        span = f"{awaited} to {first - 1}" if lost else f"{first} to {awaited - 1}"
        raise RecordMismatch(
            f"the step begins at ordinal {first}, the one before it ended at {awaited}",
            where=f"step {step - 1}",
            why=(
                f"the prompts of ordinals {span} were "
                + ("never trained on" if lost else "trained on before")
            ),
            todo="the place in the data was not restored, or is not that of the checkpoint",
            ordinal=first,
        )


def check_data(directory: Path, dataset: Dataset, *, resumed: bool) -> None:
    """Notes digests of some rows when a run begins; compares them when it goes on.

    It costs the opening of at most 16 rows. Raises DataError when a row is another one than at the
    beginning. Nothing is compared where ``data.json`` is missing or only half there. The number of
    rows is compared elsewhere: ``gcore_core.run.preflight.check_same``.
    """
    path = directory / DATA
    count = len(dataset)
    rows = sorted({row * count // _ROWS for row in range(_ROWS)})
    if resumed:
        if path.exists():
            _compare(path, dataset)
        return
    digests = {str(row): f"{prompt_digest(dataset[row]):016x}" for row in rows if row < count}
    noted = msgspec.json.encode({"rows": count, "digests": digests})
    write_text(path, noted.decode() + "\n")


class _Noted(msgspec.Struct, frozen=True):
    rows: int
    digests: dict[str, str]


def _compare(path: Path, dataset: Dataset) -> None:
    try:
        noted = msgspec.json.decode(path.read_bytes(), type=_Noted)
    except msgspec.MsgspecError:
        return  # half a file, as a killed run may leave it
    for name, digest in noted.digests.items():
        row = int(name)
        if row < len(dataset) and f"{prompt_digest(dataset[row]):016x}" != digest:
            raise DataError(
                f"row {row} is another one than when the run began.",
                where="data",
                why=f"{path} has its digest: {digest}. Ordinals would mean other prompts.",
                todo="give the run its rows back, or begin a new run from the exported weights",
                row=row,
            )
