"""Cuts a shard's leases into parts, each of which is one request to a replica.

Everything here is pure.
"""

from __future__ import annotations

import math
from collections import deque

from msgspec.structs import replace

from gcore_core.contract.records import Lease

# How many parts of a round a replica works on at a time, over all shards, at most: enough that its
# batch stays full. With more shards than that, each has one part there, so a replica works on one
# part of each shard.
LANES = 16


def lanes_of(shards: int) -> int:
    """Returns how many parts one shard has at one replica at a time."""
    return max(1, LANES // shards)


def owned_by(shard: int, shards: int, replicas: int) -> list[int]:
    """Returns the numbers of the replicas that a shard owns.

    Every shard owns as many, to within one. Where there are fewer replicas than shards, which a
    placement policy may leave awake, several shards own the same one.
    """
    return list(range(shard, replicas, shards)) or [shard % replicas]


def deal(
    leases: list[Lease], replicas: int, shard: int, shards: int, fixed: bool
) -> list[tuple[int, deque[list[Lease]]]]:
    """Makes lanes: (number of a replica, the queue from which it gets one part after the other).

    Usually all lanes share one queue, so that long answers hold up only the lane that has them. A
    shard then speaks to no more replicas than it has parts.

    leases: this shard's.
    replicas: number of replicas to draw from.
    shard: number of this shard, of ``shards``.
    fixed: every ordinal has a fixed replica, and every replica gets one part from every shard,
        perhaps an empty one, so that batches repeat.
    """
    if fixed:
        parts: list[list[Lease]] = [[] for _ in range(replicas)]
        for lease in leases:
            parts[lease.ordinal % replicas].append(lease)
        return [(replica, deque([part])) for replica, part in enumerate(parts)]
    shared = shares(leases, replicas, shards)
    lanes = list(range(replicas)) * lanes_of(shards)
    # Each shard begins at the replica behind the last one of the shard before it.
    first = shard * len(shared) % replicas
    lanes = lanes[first:] + lanes[:first]
    return [(replica, shared) for replica in lanes[: len(shared)]]


def shares(leases: list[Lease], replicas: int, shards: int) -> deque[list[Lease]]:
    """Cuts the leases into parts, which free lanes take one after the other.

    Parts come in rounds. A round shares three quarters of the records that are left equally among
    the lanes, so parts are large at first and small in the end: replicas are full at first and end
    together (factoring: Hummel, Schonberg and Flynn 1992). For example, one shard, 2 replicas and
    so 32 lanes, 1000 leases of one sample:

        records left   size of a part   parts
                1000             23        32        3/4 of 1000, over 32 lanes
                 264              6        32
                  72              1        32
                  40              1        32
                   8              1         8

    A part is at least as large as a group, since each is a request; smaller only where replicas
    would have nothing to do. So groups make few rounds: 64 leases of 16 samples (1024 records) are
    32 parts of 24 records, then 16 of 16, and that is all.

    A last round that does not fill all lanes has a number of parts that, taken over all shards,
    gives every replica equally many, if they suffice.

    Records are dealt to the parts of a round in turn, beginning one part later each time: answers
    to one prompt are alike, and a part that had several long ones would end last.
    """
    records = [(lease, sample) for lease in leases for sample in lease.samples]
    lanes = replicas * lanes_of(shards)
    # Where every shard has this many parts, or a multiple, every replica gets equally many. With 8
    # replicas and 2 shards it is 4: 2 x 4 parts are one for each replica.
    even = replicas // math.gcd(replicas, shards)
    group = max((len(lease.samples) for lease in leases), default=1)
    a_replicas_records = shards * len(records) // replicas
    least = max(1, min(group, a_replicas_records))
    parts: deque[list[Lease]] = deque()
    while records:
        size = max(least, 3 * len(records) // (4 * lanes))
        count = min(lanes, -(-len(records) // size))
        if count < lanes:  # the last round
            count = count // even * even or count  # down to a multiple of ``even``, unless to 0
            size = -(-len(records) // count)
        parts += _dealt(records[: count * size], count)
        del records[: count * size]
    return parts


def _dealt(records: list[tuple[Lease, int]], count: int) -> list[list[Lease]]:
    """Deals the records to ``count`` parts in turn, beginning one part later each time."""
    samples: list[dict[Lease, tuple[int, ...]]] = [{} for _ in range(count)]
    for at, (lease, sample) in enumerate(records):
        row = at // count
        part = samples[(at + row) % count]
        part[lease] = (*part.get(lease, ()), sample)
    return [
        [replace(lease, samples=indexes) for lease, indexes in part.items()] for part in samples
    ]
