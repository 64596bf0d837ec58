"""Says where what outlives a run is kept; each of its folders belongs to one reader."""

from __future__ import annotations

from gcore_core.runtime.cache import cache_root

__all__ = ["cache_root"]
