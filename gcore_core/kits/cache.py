"""Says where what outlives a run is kept, and how a file there is replaced.

Each folder belongs to one reader.
"""

from __future__ import annotations

from gcore_core.runtime.cache import cache_root
from gcore_core.runtime.replacing import replacing

__all__ = ["cache_root", "replacing"]
