"""Reads prompts from Parquet and Arrow files, a group of rows at a time.

No dataset is ever held in memory as a whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from gcore_language.floats import converted, converters

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import data_files_in, prompt_from, require_there
from gcore_data.config import ParquetConfig
from gcore_data.splits import split_of

_GROUPS_HELD = 4
_FILES_HELD = 64


class Parquet:
    """Gives the rows of Parquet or Arrow files as prompts.

    A row group is read when one of its rows is wanted; the last few stay in memory. Rows in random
    order are cheap from Arrow files, which are memory-mapped, and from row groups of a few thousand
    rows.
    """

    def __init__(self, config: ParquetConfig) -> None:
        path = Path(config.path)
        require_there(path)
        self._config = config
        self._parts = list(_parts(path))
        self._ends = list(accumulate(rows for _, _, rows in self._parts))
        self._rows = min(self._ends[-1] if self._ends else 0, config.limit or 1 << 62)
        if not self._rows:
            raise DataError("has no rows", where=str(path))
        self._table = lru_cache(maxsize=_GROUPS_HELD)(self._read)
        prompt_from(0, self._values(0), config, where=f"{path}, row 0")

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        return prompt_from(
            row, self._values(row), self._config, where=f"{self._config.path}, row {row}"
        )

    def _values(self, row: int) -> dict[str, Any]:
        """Returns column -> value of a row, found by binary search for the group that holds it."""
        part = bisect_right(self._ends, row)
        start = self._ends[part] - self._parts[part][2]
        table = self._table(part)
        values: dict[str, Any] = table.slice(row - start, 1).to_pylist()[0]
        return converted(values, converters(table.schema))

    def _read(self, part: int) -> Any:
        file, group, _ = self._parts[part]
        return _record_batches(file)[group] if file.suffix == ".arrow" else _row_group(file, group)


def _parts(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Yields file, number and rows of every row group or record batch, in order.

    Raises DataError where a file is damaged or of another kind.
    """
    for file in _files(path):
        try:
            if file.suffix == ".arrow":
                counts = [batch.num_rows for batch in _record_batches(file)]
            else:
                metadata = pq.read_metadata(file)
                counts = [
                    metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)
                ]
        except (pa.ArrowInvalid, OSError) as error:
            kind = "Arrow" if file.suffix == ".arrow" else "Parquet"
            raise DataError(
                f"is not a {kind} file: {str(error).splitlines()[0]}", where=str(file)
            ) from error
        yield from ((file, group, rows) for group, rows in enumerate(counts))


def _row_group(file: Path, group: int) -> Any:
    with pq.ParquetFile(file) as reader:
        return reader.read_row_group(group)


@lru_cache(maxsize=_FILES_HELD)
def _record_batches(file: Path) -> list[Any]:
    """Returns views of the mapped file; nothing is copied until a row is taken."""
    return list(pa.ipc.open_stream(pa.memory_map(str(file))))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = msgspec.json.decode((path / "dataset_dict.json").read_bytes()).get("splits", [])
        raise DataError(
            f"holds the splits {', '.join(splits)}",
            where=str(path),
            todo="set data.config.path to the one to use",
        )
    if (path / "state.json").is_file():
        state = msgspec.json.decode((path / "state.json").read_bytes())
        return [path / entry["filename"] for entry in state["_data_files"]]
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise DataError(
            "no Parquet files in this directory", where=str(path), why=data_files_in(path)
        )
    splits = {split_of(file) for file in files} - {""}
    if len(splits) > 1:
        raise DataError(
            f"its files are of several splits: {', '.join(sorted(splits))}",
            where=str(path),
            why=f"they would be read as one: {', '.join(file.name for file in files[:8])}",
            todo=(
                "set data.config.path to one file, or to a directory with the files of one split; "
                "or take data/hub, whose data.config.split chooses one"
            ),
        )
    return files
