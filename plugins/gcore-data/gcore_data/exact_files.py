"""Opens local CSV and JSON files so that a value is what the file says.

``datasets`` guesses the types of their columns: 007 of a CSV becomes 7 and an empty cell null, the
integers of a column become floats where one value is one, and texts in JSON that look like times
become times. Here every cell of a CSV is a text, and a JSON value is what JSON says it is.
"""

from __future__ import annotations

import copy
import csv
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec

from gcore_core.contract.errors import DataError
from gcore_core.contract.rows import (
    fields_of,
    json_lines,
    key_twice,
    open_unbuffered,
    read_again,
    repeated_key,
    shortened,
)

if TYPE_CHECKING:
    import datasets

_JSON_SUFFIXES = (".json", ".jsonl")
_BOM = b"\xef\xbb\xbf"


class Rows(Protocol):
    """Gives rows as column -> value, as ``datasets.Dataset`` does."""

    @property
    def column_names(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Mapping[str, Any]: ...


def exact_rows(builder: datasets.DatasetBuilder, split: str, limit: int | None) -> Rows | None:
    """Returns the rows of local files as they are written; None for files of other formats.

    builder: of the files, as ``datasets`` makes it.
    split: the wanted rows, as ``datasets`` names them.
    limit: most rows; None: all.
    """
    files = {str(name): list(paths) for name, paths in (builder.config.data_files or {}).items()}
    if builder.name == "csv":
        dialect = {"delimiter": builder.config.sep, "quotechar": builder.config.quotechar}
        return _csv_rows(files, split, limit, dialect)
    paths = [path for of_split in files.values() for path in of_split]
    if builder.name == "json" and all(Path(path).suffix in _JSON_SUFFIXES for path in paths):
        return FileRows(files, split, limit, _JsonFile)
    return None


def exact_file(path: Path, split: str, limit: int | None) -> Rows | None:
    """Returns the rows of one local file; None where ``datasets`` has to say which are meant.

    split, limit: as in ``exact_rows``.
    """
    if split != "train" or not path.is_file():
        return None
    files = {split: [str(path)]}
    if path.suffix == ".csv":
        return _csv_rows(files, split, limit, {})
    return FileRows(files, split, limit, _JsonFile) if path.suffix in _JSON_SUFFIXES else None


def _csv_rows(
    files: Mapping[str, Sequence[str]], split: str, limit: int | None, dialect: Mapping[str, Any]
) -> Rows:
    found = FileRows(files, split, limit, lambda path: _CsvFile(path, dialect))
    found.require_same_columns()
    return found


class _File(Protocol):
    """One file of rows, whose ``columns`` are the names that any of its rows has."""

    path: str
    columns: dict[str, None]

    def __len__(self) -> int: ...

    def values(self, row: int, /) -> dict[str, Any]: ...


class FileRows:
    """Gives the rows of files as they are written.

    Every row has the columns of all: null where it says nothing of one. A row is read when it is
    asked for.
    """

    def __init__(
        self,
        files: Mapping[str, Sequence[str]],
        split: str,
        limit: int | None,
        open_file: Callable[[str], _File],
    ) -> None:
        """Opens the files. Raises DataError where one is not of its format.

        files: split -> paths.
        split: the wanted rows, as ``datasets`` names them.
        limit: most rows; None: all.
        open_file: opens the file at a path.
        """
        self._limit = limit
        opened = {name: [open_file(path) for path in paths] for name, paths in files.items()}
        sizes = {name: sum(map(len, parts)) for name, parts in opened.items()}
        self._parts: list[tuple[_File, int, int]] = []  # file, its first row, how many
        for name, wanted in _wanted(split, sizes):
            start = 0
            for file in opened[name]:
                first = max(0, wanted.start - start)
                rows = min(len(file), wanted.stop - start) - first
                if rows > 0:
                    self._parts.append((file, first, rows))
                start += len(file)
        self._ends = list(accumulate(rows for _, _, rows in self._parts))
        self.column_names = list(
            dict.fromkeys(name for file, _, _ in self._parts for name in file.columns)
        )

    def require_same_columns(self) -> None:
        """Raises DataError where a file has other columns than the first: it may lack a header."""
        for file, _, _ in self._parts:
            if file.columns.keys() != self._parts[0][0].columns.keys():
                raise DataError(
                    f"has the columns {', '.join(file.columns)}",
                    where=file.path,
                    why=f"{self._parts[0][0].path} has {', '.join(self._parts[0][0].columns)}",
                    todo="give both files the same header",
                )

    def __len__(self) -> int:
        rows = self._ends[-1] if self._ends else 0
        return rows if self._limit is None else min(rows, self._limit)

    def __getitem__(self, row: int) -> dict[str, Any]:
        part = bisect_right(self._ends, row)
        file, first, rows = self._parts[part]
        values = file.values(first + row - (self._ends[part] - rows))
        return {**dict.fromkeys(self.column_names), **values}


def _wanted(split: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, range]]:
    """Yields the splits that a text names, each with its rows: "train[:10]", "train+test".

    sizes: split -> its rows.
    """
    if split in sizes:
        yield split, range(sizes[split])
        return
    from datasets import ReadInstruction

    for part in ReadInstruction.from_spec(split).to_absolute(sizes):
        yield part.splitname, range(part.from_, part.to)


class _JsonFile:
    """One file of JSON: where its lines begin and end, or the objects of its list.

    Raises DataError for what is no JSON, and for a row that is no object.
    """

    def __init__(self, path: str) -> None:
        self.path = path
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
            return copy.deepcopy(self._listed[row])  # whose caller may change it
        start, end = self._places[2 * row : 2 * row + 2]
        with open_unbuffered(Path(self.path)) as file:
            return read_again(file, row, start, end, dict, self.path)

    def _read_list(self) -> Iterator[dict[str, Any]]:
        content = Path(self.path).read_bytes().removeprefix(_BOM)
        try:
            listed = msgspec.json.decode(content)
            repeated = repeated_key(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"not JSON: {shortened(content[:200])}", where=self.path, why=str(error)
            ) from error
        raw = msgspec.json.decode(content, type=list[msgspec.Raw]) if repeated is not None else []
        for row, values in enumerate(listed):
            if repeated is not None and (key := repeated_key(bytes(raw[row]))) is not None:
                raise key_twice(row, key, self.path)
            # A list of texts is a column of them, as ``datasets`` has it.
            yield (
                {"text": values}
                if isinstance(values, str)
                else fields_of(values, f"{self.path}, row {row}")
            )


class _CsvFile:
    """One CSV file with a header: where its rows begin and end.

    A first column without a name is left out, since it names the rows. So is one that the header
    lacks, as R writes it, where it numbers two rows or more. So is an empty column without a name.

    Raises DataError for quotes that are not those of CSV, for two columns of one name, and for a
    row that has not as many cells as the header.
    """

    def __init__(self, path: str, dialect: Mapping[str, Any]) -> None:
        """Finds the rows.

        dialect: ``delimiter`` and ``quotechar``, as ``csv.reader`` takes them.
        """
        self.path = path
        self._dialect = dialect
        self._places = array("q")
        rows = self._rows()
        where, _, _, self._names = next(rows, ("", 0, 0, []))
        self.columns = dict.fromkeys(filter(None, self._names))
        twice = next((name for name in self._names if self._names.count(name) > 1), None)
        if twice is not None:
            raise DataError(
                f"two columns are named {twice!r}",
                where=where,
                todo="give each column a name of its own",
            )
        counted_from: int | None = None
        header = len(self._names)
        for where, start, end, cells in rows:
            if len(cells) == 1 != len(self._names) and not cells[0].strip():
                continue  # a blank line
            if not len(self) and len(cells) == header + 1 and cells[0] in ("0", "1"):
                counted_from = int(cells[0])
                self._names = ["", *self._names]
            is_counted = counted_from is None or cells[0] == str(counted_from + len(self))
            if len(cells) != len(self._names) or not is_counted:
                raise _other_cells(where, cells, header)
            if any(
                cell and not name for name, cell in zip(self._names[1:], cells[1:], strict=True)
            ):
                raise DataError(
                    f"a cell stands in a column without a name: {_as_line(cells)}",
                    where=where,
                    todo="name the column in the header, or put a cell with a comma into quotes",
                )
            self._places.extend((start, end))
        if counted_from is not None and len(self) == 1:  # it may as well be a part of a text
            raise _other_cells(where, cells, header)

    def __len__(self) -> int:
        return len(self._places) // 2

    def values(self, row: int) -> dict[str, Any]:
        start, end = self._places[2 * row : 2 * row + 2]
        with open(self.path, "rb") as file:
            file.seek(start)
            content = file.read(end - start)
        with _cells_of_any_length():
            try:
                text = StringIO(content.decode(), newline="")
                (cells,) = csv.reader(text, strict=True, **self._dialect)
                named = dict(zip(self._names, cells, strict=True))
            except (csv.Error, ValueError) as error:
                raise DataError(
                    f"row {row} is no longer what it was when the file was indexed: "
                    f"{shortened(content)}",
                    where=self.path,
                    todo="do not write into a file that a run is reading; start the run again",
                ) from error
        named.pop("", None)
        return named

    def _rows(self) -> Iterator[tuple[str, int, int, list[str]]]:
        """Yields place for errors, start, end and cells of the rows, the header first."""
        with open(self.path, "rb") as file, _cells_of_any_length():
            lines = _Lines(file)
            reader = csv.reader(lines, strict=True, **self._dialect)
            while True:
                start, where = lines.end, f"{self.path}, line {reader.line_num + 1}"
                try:
                    cells = next(reader, None)
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"not UTF-8: {error}", where=where, todo="save the file as UTF-8"
                    ) from error
                except csv.Error as error:
                    raise DataError(
                        f"not CSV: {error}",
                        where=where,
                        todo='write a quote within a quoted cell twice, as in "say ""hi"" first"',
                    ) from error
                if cells is None:
                    return
                if cells:
                    yield where, start, lines.end, cells


class _Lines:
    """Decodes the lines of a file, which may end as on any system.

    end: where the last of them ends, in bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.end = 0
        self._lines = (line for part in file for line in part.splitlines(keepends=True))

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        is_first = not self.end
        self.end += len(line)
        return (line.removeprefix(_BOM) if is_first else line).decode()


@contextmanager
def _cells_of_any_length() -> Iterator[None]:
    """Has ``csv`` read cells of more than 128 KiB, such as prompts that hold documents."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _other_cells(where: str, cells: Sequence[str], header: int) -> DataError:
    return DataError(
        f"has {len(cells)} cells, and the header has {header}: {_as_line(cells)}",
        where=where,
        todo="put a cell with a comma in it into quotes; leave out commas behind the last cell",
    )


def _as_line(cells: Sequence[str]) -> str:
    return shortened(",".join(cells).encode())


def _begins_list(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
