"""A reward that is drawn by lot, beside a shrunk job's own.

A random model earns none of those, and then no group teaches and no advantage differs from 0.
"""

from __future__ import annotations

import zlib

from gcore_core.contract.scorer import ScoredRecord


def chance(record: ScoredRecord) -> float:
    """Returns 0 or 1, always the same for the same completion."""
    return float(zlib.crc32(record.text.encode()) % 2)
