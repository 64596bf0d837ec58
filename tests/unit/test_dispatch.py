"""How a round's groups are dealt out to replicas."""

from __future__ import annotations

import numpy as np
import pytest

from gcore_core.controllers.rollout import LANES, lanes_of, shares
from gcore_core.records import Lease


def leases(count: int) -> list[Lease]:
    return [Lease(ordinal, ordinal, 0, (0,)) for ordinal in range(count)]


@pytest.mark.parametrize("count", [0, 1, 3, 64, 1000])
@pytest.mark.parametrize("lanes", [2, 4, 128])
def test_every_lease_is_dealt_once_in_parts_that_never_grow(count: int, lanes: int) -> None:
    parts = shares(leases(count), lanes)
    assert [lease for part in parts for lease in part] == leases(count)
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 not in sizes


@pytest.mark.parametrize("seed", range(5))
def test_replicas_end_together_although_some_groups_are_four_times_as_long(seed: int) -> None:
    """Every fourth group is long, which would all be one replica's if ordinals decided."""
    replicas, count = 4, 512
    seconds = np.where(np.arange(count) % replicas == 0, 4.0, 1.0) * np.random.default_rng(seed).uniform(
        0.5, 1.5, count
    )
    even = seconds.sum() / replicas
    fixed = max(seconds[i::replicas].sum() for i in range(replicas))
    parts = shares(leases(count), replicas * lanes_of(shards=1))
    assert shared_out([sum(seconds[lease.ordinal] for lease in part) for part in parts], replicas) < 1.1 * even
    assert fixed > 2 * even


def shared_out(parts: list[float], replicas: int) -> float:
    """When the last part ends, where those at a replica share its time and each that ends makes room for another."""
    running = [parts[i::replicas][: lanes_of(1)] for i in range(replicas)]
    waiting, now = parts[replicas * lanes_of(1) :], 0.0
    while any(running):
        next_s = [min(own) * len(own) if own else np.inf for own in running]
        first = int(np.argmin(next_s))
        passed = next_s[first]
        now += passed
        running = [[left - passed / len(own) for left in own] for own in running]
        running[first].remove(min(running[first]))
        if waiting:
            running[first].append(waiting.pop(0))
    return now


@pytest.mark.parametrize("shards", [1, 2, 8, 64])
def test_a_replica_works_on_as_many_parts_whatever_the_number_of_shards(shards: int) -> None:
    assert lanes_of(shards) * shards == max(LANES, shards)
