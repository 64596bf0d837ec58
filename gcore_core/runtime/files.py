"""Says where files of all runs lie, and replaces a file as a whole.

What outlives a run is in the cache: indexes, hashes of files, models that jobs make.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The environment variable that names the directory, and where it is without that.
VARIABLE = "G_CORE_CACHE"
DEFAULT = Path("~/.cache/g-core")
SHARED_MEMORY = Path("/dev/shm")
#: Copies of so many bytes or more go past the caches (glibc, x86), see ``spawn``.
STREAMED_BYTES = 256 << 10


def cache_root() -> Path:
    """Returns the directory that ``G_CORE_CACHE`` names, or else ``~/.cache/g-core``."""
    return Path(os.environ.get(VARIABLE) or DEFAULT).expanduser()


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
