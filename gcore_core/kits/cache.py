"""Says where what outlives a run is kept, and how a file there is replaced.

Each folder belongs to one reader. ``VARIABLE`` names the environment variable that says where, and
``DEFAULT`` is the place without it.
"""

from __future__ import annotations

from gcore_core.runtime.files import DEFAULT, VARIABLE, cache_root, replacing

__all__ = ["DEFAULT", "VARIABLE", "cache_root", "replacing"]
