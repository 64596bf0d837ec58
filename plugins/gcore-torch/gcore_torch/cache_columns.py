"""How many columns the cache of a decoder has; apart, so that planning needs no torch."""

from __future__ import annotations

#: Attention on a GPU reads a multiple of so many columns, and the first cache there has so many.
COLUMNS = 128
#: A cache on a CPU has a multiple of so many columns, and grows by ``_MORE`` of them or by half.
_ON_CPU, _MORE = 16, 256
#: Bytes that parked rows may take where the cache takes fewer: rows that run one after the other
#: need but one row of it.
PARKED_BYTES = 256 << 20


def cache_columns(needed: int, there: int = 0) -> int:
    """Returns the columns of the cache of a ``GraphDecoder`` for so many: it doubles.

    there: how many it has by now.
    """
    columns = max(there, COLUMNS)
    while columns < needed:
        columns *= 2
    return columns


def columns_on_cpu(needed: int, most: int) -> int:
    """Returns the columns of a new cache of a ``FusedDecoder``.

    needed: for the next token of all rows.
    most: that these rows can ever need.
    """
    wanted = max(needed + _MORE, needed * 3 // 2)
    return -(-max(needed, min(wanted, most)) // _ON_CPU) * _ON_CPU


def most_columns_on_cpu(prompt: int, actions: int) -> int:
    """Returns the most columns that are held at a time for rows which begin and end together.

    While a cache grows, the former one is there until it is copied.
    """
    most = prompt + actions
    held, there = 0, columns_on_cpu(prompt + 1, most)
    while there < most:
        former, there = there, columns_on_cpu(there + 1, most)
        held = former + there
    return max(held, there)
