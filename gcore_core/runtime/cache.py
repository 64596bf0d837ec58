"""Says where G-Core keeps what outlives a run: indexes, hashes of files, models that jobs make."""

from __future__ import annotations

import os
from pathlib import Path

#: The environment variable that names the directory, and where it is without that.
VARIABLE = "G_CORE_CACHE"
DEFAULT = Path("~/.cache/g-core")


def cache_root() -> Path:
    """Returns the directory that ``G_CORE_CACHE`` names, or else ``~/.cache/g-core``."""
    return Path(os.environ.get(VARIABLE) or DEFAULT).expanduser()
