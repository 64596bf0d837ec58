"""Plain tables; rich would cost more than the rest of a listing."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints left-aligned columns; a column that is empty in all rows is left out."""
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[row[i] for i in used] for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    for line in lines:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
