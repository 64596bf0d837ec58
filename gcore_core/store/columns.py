"""A chunk: the columns of some records as bytes, column by column.

    length    uint32, of the table
    table     msgpack: name -> [dtype, offset, shape per record]
    padding   up to a multiple of 8 bytes
    columns   each: the arrays of all records, one behind the other; padded to a multiple of 8

An offset counts from the first column. A record that lacks a column has null for its shape. Arrays
are numbers or bools; nothing is pickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from gcore_core.contract.errors import ContractError, DataError

Columns = Mapping[str, np.ndarray]
NUMBERS = re.compile(r"[<>|][biufc][0-9]{1,2}")  # numbers and bools, as numpy writes them
MOST_AXES = 64  # numpy's; the product of more sizes would take long
_JOIN_BYTES = 1 << 20  # a smaller column is joined: one more copy is cheaper than many parts


class _Column(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    offset: int
    shapes: list[tuple[int, ...] | None]


_encode_table = msgspec.msgpack.Encoder().encode
_decode_table = msgspec.msgpack.Decoder(dict[str, _Column]).decode


def pack(records: Sequence[Columns]) -> list[bytes | memoryview]:
    """Returns the parts of one chunk, in order.

    Raises ContractError for an array that cannot be stored.
    """
    table: dict[str, _Column] = {}
    parts: list[bytes | memoryview] = []
    offset = 0
    for name in dict.fromkeys(name for record in records for name in record):
        by_record = [np.asarray(record[name]) if name in record else None for record in records]
        arrays = [array for array in by_record if array is not None]
        dtypes = {array.dtype.str for array in arrays}
        if len(dtypes) > 1 or not NUMBERS.fullmatch(min(dtypes)):
            raise ContractError(
                f"column {name!r} has dtypes {sorted(dtypes)}; it must be one, of numbers or bools"
            )
        flat = [np.ascontiguousarray(array.reshape(-1)) for array in arrays]
        nbytes = sum(array.nbytes for array in flat)
        if len(flat) > 1 and nbytes < _JOIN_BYTES:
            # With its dtype, or numpy would turn the bytes into the machine's order.
            flat = [np.concatenate(flat, dtype=flat[0].dtype)]
        padding_bytes = -nbytes % 8
        parts += [array.view(np.uint8).data for array in flat]
        parts.append(bytes(padding_bytes))
        shapes = [None if array is None else array.shape for array in by_record]
        table[name] = _Column(min(dtypes), offset, shapes)
        offset += nbytes + padding_bytes
    head = _encode_table(table)
    return [len(head).to_bytes(4, "little"), head, bytes(-(len(head) + 4) % 8), *parts]


class Chunk:
    """Gives the records of a chunk, as read-only views of it. Opening one reads the table only.

    Raises DataError for a table that cannot be read or points outside the chunk.
    """

    def __init__(self, memory: memoryview) -> None:
        length = int.from_bytes(memory[:4], "little")
        try:
            self._table = _decode_table(memory[4 : 4 + length])
        # ValueError: text that is no UTF-8
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DataError(f"a chunk of columns is malformed: {error}", where="store") from None
        self._body = memory[4 + length + -(length + 4) % 8 :].toreadonly()
        self._size = max((len(column.shapes) for column in self._table.values()), default=0)
        # name of an opened column -> (all its arrays, flat; where each record's begins and ends)
        self._flat: dict[str, tuple[np.ndarray, list[int]]] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, slot: int) -> dict[str, np.ndarray]:
        """Returns the columns that a record has. Raises DataError where one is malformed."""
        if not 0 <= slot < self._size:
            raise IndexError(slot)  # also ends an iteration
        shapes = {
            name: column.shapes[slot]
            for name, column in self._table.items()
            if slot < len(column.shapes)
        }
        return {
            name: self._array(name, slot, shape)
            for name, shape in shapes.items()
            if shape is not None
        }

    def _array(self, name: str, slot: int, shape: tuple[int, ...]) -> np.ndarray:
        try:
            if name not in self._flat:
                self._flat[name] = self._open(name)
            flat, bounds = self._flat[name]
            part = flat[bounds[slot] : bounds[slot + 1]]
            return part if len(shape) == 1 else part.reshape(shape)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"column {name!r} is malformed: {error}", where="store") from None

    def _open(self, name: str) -> tuple[np.ndarray, list[int]]:
        column = self._table[name]
        if not NUMBERS.fullmatch(column.dtype):
            raise ValueError(f"dtype {column.dtype!r}")
        if any(
            len(shape) > MOST_AXES or min(shape, default=0) < 0 for shape in column.shapes if shape
        ):
            raise ValueError("a shape that no array has")
        sizes = [0 if shape is None else math.prod(shape) for shape in column.shapes]
        bounds = list(accumulate(sizes, initial=0))
        return np.frombuffer(self._body, column.dtype, bounds[-1], column.offset), bounds
