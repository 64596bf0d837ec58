"""Makes digests of what a step does, by which two runs are compared (``g-core diff``).

Each is an xxh3-64. The digests of a step's records are summed modulo 2**64, so the sum depends
neither on the order of the records nor on the number of controllers. They find what differs by
accident; they prove nothing against somebody who means to deceive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import xxhash

from gcore_core.contract.generator import Finished
from gcore_core.contract.lineage import add_arrays
from gcore_core.contract.records import Header

#: Column of log-probs. It has a digest of its own, since engines differ in its last digits more
#: easily than in what they sample.
LOGP = "logp"
_MODULUS = 1 << 64
_encode = msgspec.msgpack.Encoder(order="sorted").encode


def sum_of(digests: Iterable[int]) -> int:
    """Adds digests up modulo 2**64, in any order."""
    return sum(digests) % _MODULUS


def digest_of(*values: object) -> int:
    """Returns the digest of plain values: numbers, texts, lists and mappings."""
    return xxhash.xxh3_64_intdigest(_encode(values))


def digests_of_columns(finished: Finished) -> tuple[int, int]:
    """Returns the digests of a record's content: without its log-probs, and of these alone.

    A digest covers names, dtypes, shapes and bytes of the columns; the first one media, too.
    """
    columns = finished.columns
    sampled = {name: array for name, array in columns.items() if name != LOGP}
    sampled |= {f"media/{name}": array for name, array in finished.media.items()}
    logp = {LOGP: columns[LOGP]} if LOGP in columns else {}
    return digest_of_arrays(sampled), digest_of_arrays(logp)


def digest_of_arrays(arrays: Mapping[str, np.ndarray]) -> int:
    """Returns the digest of named arrays, in whatever order they come."""
    digest = xxhash.xxh3_64()
    add_arrays(digest, arrays)
    return digest.intdigest()


def generation_digest(header: Header) -> int:
    """Returns the digest of a record as it was sampled."""
    drawn = (header.row, header.prompt_digest, header.seed, header.versions, header.status)
    return digest_of(header.ordinal, header.sample, *drawn, header.digests)


def rewarding_digest(header: Header) -> int:
    """Returns the digest of what the rewards said of a record."""
    return digest_of(header.ordinal, header.sample, header.rewards, header.reward_status)
