"""Opens local CSV and JSON files so that a value is what the file says.

``datasets`` guesses the types of their columns: 007 of a CSV becomes 7 and an empty cell null, the
integers of a column become floats where one value is one, and texts in JSON that look like times
become times. Here every cell of a CSV is a text, and a JSON value is what JSON says it is.
"""

from __future__ import annotations

import csv
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import datasets
import msgspec

from gcore_core.contract.errors import DataError
from gcore_core.contract.rows import fields_of, json_lines, open_unbuffered, read_again, shortened

_JSON_SUFFIXES = (".json", ".jsonl")
_BOM = b"\xef\xbb\xbf"


class Rows(Protocol):
    """Gives rows as column -> value, as ``datasets.Dataset`` does."""

    @property
    def column_names(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Mapping[str, Any]: ...


def exact_rows(
    builder: datasets.DatasetBuilder, split: str, limit: int | None, **options: Any
) -> Rows | None:
    """Returns the rows of local files as they are written; None for files of other formats.

    builder: of the files, as ``datasets`` makes it.
    split: the wanted rows, as ``datasets`` names them.
    limit: most rows of JSON; None: all.
    options: what the builder was made with.
    """
    files = {str(name): list(paths) for name, paths in (builder.config.data_files or {}).items()}
    if builder.name == "csv":
        texts = {name: datasets.Value("string") for name in _header(builder, files, split)}
        # Also "NA" and an empty cell are texts.
        found: Rows = datasets.load_dataset(
            split=split, features=datasets.Features(texts), na_filter=False, **options
        )
        return found
    paths = [path for of_split in files.values() for path in of_split]
    if builder.name == "json" and all(Path(path).suffix in _JSON_SUFFIXES for path in paths):
        return JsonRows(files, split, limit)
    return None


def _header(
    builder: datasets.DatasetBuilder, files: Mapping[str, Sequence[str]], split: str
) -> list[str]:
    """Returns the names of the columns of a CSV, from the first file of its split."""
    (instruction, *_) = datasets.ReadInstruction.from_spec(split).to_absolute(
        dict.fromkeys(files, 1)
    )
    with open(files[instruction.splitname][0], encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=builder.config.sep, quotechar=builder.config.quotechar)
        return next(row for row in rows if row)


class JsonRows:
    """Gives the rows of files of JSON lines, or of lists of objects, as they are written.

    Every row has the columns of all: null where it says nothing of one. A line is read when it is
    asked for. Raises DataError for what is no JSON, and for a row that is no object.
    """

    def __init__(self, files: Mapping[str, Sequence[str]], split: str, limit: int | None) -> None:
        """Opens the files.

        files: split -> paths.
        split: the wanted rows, as ``datasets`` names them.
        limit: most rows; None: all.
        """
        self._limit = limit
        opened = {name: [_JsonFile(path) for path in paths] for name, paths in files.items()}
        sizes = {name: sum(map(len, parts)) for name, parts in opened.items()}
        self._parts: list[tuple[_JsonFile, int, int]] = []  # file, its first row, how many
        for wanted in datasets.ReadInstruction.from_spec(split).to_absolute(sizes):
            start = 0
            for file in opened[wanted.splitname]:
                first = max(0, wanted.from_ - start)
                rows = min(len(file), wanted.to - start) - first
                if rows > 0:
                    self._parts.append((file, first, rows))
                start += len(file)
        self._ends = list(accumulate(rows for _, _, rows in self._parts))
        self.column_names = list(
            dict.fromkeys(name for file, _, _ in self._parts for name in file.columns)
        )

    def __len__(self) -> int:
        rows = self._ends[-1] if self._ends else 0
        return rows if self._limit is None else min(rows, self._limit)

    def __getitem__(self, row: int) -> dict[str, Any]:
        part = bisect_right(self._ends, row)
        file, first, rows = self._parts[part]
        values = file.values(first + row - (self._ends[part] - rows))
        return {**dict.fromkeys(self.column_names), **values}


class _JsonFile:
    """One file: where its lines begin and end, or the objects of its list.

    columns: the names that any of its rows has, in their order.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._places = array("q")
        self._listed: list[dict[str, Any]] | None = None
        self.columns: dict[str, None] = {}
        if _begins_list(path):
            self._listed = list(self._read_list())
            for values in self._listed:
                self.columns.update(dict.fromkeys(values))
            return
        with open_unbuffered(Path(path)) as file:
            for line in json_lines(file, path, None):
                values = fields_of(line.values, f"{path}, line {line.number}")
                self.columns.update(dict.fromkeys(values))
                self._places.extend((line.start, line.end))

    def __len__(self) -> int:
        return len(self._places) // 2 if self._listed is None else len(self._listed)

    def values(self, row: int) -> dict[str, Any]:
        if self._listed is not None:
            return self._listed[row]
        start, end = self._places[2 * row : 2 * row + 2]
        with open_unbuffered(Path(self._path)) as file:
            return read_again(file, row, start, end, dict, self._path)

    def _read_list(self) -> Iterator[dict[str, Any]]:
        content = Path(self._path).read_bytes().removeprefix(_BOM)
        try:
            listed = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"not JSON: {shortened(content[:200])}", where=self._path, why=str(error)
            ) from error
        for row, values in enumerate(listed):
            # A list of texts is a column of them, as ``datasets`` has it.
            yield (
                {"text": values}
                if isinstance(values, str)
                else fields_of(values, f"{self._path}, row {row}")
            )


def _begins_list(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
