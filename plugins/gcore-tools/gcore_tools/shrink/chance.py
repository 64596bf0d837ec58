"""A reward that is drawn by lot, beside a shrunk job's own.

A random model earns none of those, and then no group teaches and no advantage differs from 0.
"""

from __future__ import annotations

import zlib

from gcore_core.contract.scorer import ScoredRecord


def chance(record: ScoredRecord) -> float:
    """Returns a number from 0 to 1, always the same for the same completion or image.

    Of 0 and 1 alone the answers to a prompt would often have the same one. Then a small minibatch
    may have no gradient but rounding, and trainers refuse one that depends on how it is cut.
    """
    drawn = zlib.crc32(record.text.encode())
    if "image" in record.media:
        drawn = zlib.crc32(record.media["image"].tobytes(), drawn)
    return drawn / 2**32
