"""Replaces a file as a whole: it is written next to its place and renamed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """Gives the path at which the block writes a file; it is moved to its place after the block.

    So no reader sees half of it. Several processes and threads may do it at once: the last one
    counts. Where the block raises, what it wrote is removed and the place stays as it is. Nothing
    is synced to the disk.

    Raises OSError.
    """
    fresh = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}.new")
    try:
        yield fresh
        fresh.replace(place)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
