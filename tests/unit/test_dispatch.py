"""How a round's groups are dealt out to replicas."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from gcore_core.controllers.rollout import LANES, shares
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
    # a replica's lanes share it: each runs at half its speed
    lanes = [(0.0, lane) for lane in range(replicas * LANES)]
    for part in shares(leases(count), len(lanes)):
        ends, lane = heapq.heappop(lanes)
        heapq.heappush(lanes, (ends + LANES * sum(seconds[lease.ordinal] for lease in part), lane))
    assert max(lanes)[0] < 1.1 * even
    assert fixed > 2 * even
