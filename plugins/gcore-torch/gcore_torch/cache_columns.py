"""How many columns the cache of a ``GraphDecoder`` has; apart, so that planning needs no torch."""

from __future__ import annotations

#: Attention reads a multiple of so many columns, and the first cache has so many.
COLUMNS = 128


def cache_columns(needed: int, there: int = 0) -> int:
    """Returns the columns of a cache for so many: it doubles.

    there: how many it has by now.
    """
    columns = max(there, COLUMNS)
    while columns < needed:
        columns *= 2
    return columns
