"""How a round's records are dealt out to replicas."""

from __future__ import annotations

import numpy as np
import pytest

from gcore_core.contract.records import Lease
from gcore_core.controllers.generation.split_requests import LANES, lanes_of, shares


def leases(count: int, samples: int = 1) -> list[Lease]:
    return [Lease(ordinal, ordinal, 0, tuple(range(samples))) for ordinal in range(count)]


def records(part: list[Lease]) -> list[tuple[int, int]]:
    return [(lease.ordinal, sample) for lease in part for sample in lease.samples]


@pytest.mark.parametrize("count", [0, 1, 3, 64, 1000])
@pytest.mark.parametrize("replicas", [2, 4, 7, 128])
@pytest.mark.parametrize("shards", [1, 4, 64])
@pytest.mark.parametrize("samples", [1, 16])
def test_every_record_is_dealt_once_in_parts_of_nonincreasing_size(
    count: int, replicas: int, shards: int, samples: int
) -> None:
    parts = shares(leases(count, samples), replicas, shards)
    assert sorted(record for part in parts for record in records(part)) == records(
        leases(count, samples)
    )
    assert all(len({lease.ordinal for lease in part}) == len(part) for part in parts)
    sizes = [len(records(part)) for part in parts]
    assert all(later <= size + 1 for size, later in zip(sizes, sizes[1:], strict=False))
    assert 0 not in sizes
    assert len(parts) <= max(count, -(-2 * replicas // shards)), "a request each"


@pytest.mark.parametrize("replicas", [4, 64])
def test_samples_of_a_prompt_are_spread_over_concurrent_parts(replicas: int) -> None:
    """So that no replica has a long one to itself."""
    lanes = replicas * lanes_of(16)
    together = shares(leases(512, 16), replicas, 16)
    most = max(len(lease.samples) for part in list(together)[:lanes] for lease in part)
    assert most == max(1, 16 // lanes)


@pytest.mark.parametrize("replicas", [1, 3, 48, 96, 97, 128, 1000])
@pytest.mark.parametrize("shards", [1, 2, 4, 64])
@pytest.mark.parametrize("groups", [1, 6, 64, 512])
def test_all_replicas_work_and_none_has_twice_as_many_records_as_on_average(
    groups: int, shards: int, replicas: int
) -> None:
    """Also where there are fewer groups than replicas, as in a refill."""
    own = -(-groups // shards)
    records_of = np.zeros(replicas, int)
    for shard in range(shards):
        parts = shares(leases(own, 16), replicas, shards)
        first = shard * len(parts) % replicas
        for at, part in enumerate(parts):
            records_of[(first + at) % replicas] += len(records(part))
    mean = own * shards * 16 / replicas
    assert records_of.sum() == own * shards * 16
    assert records_of.max() <= max(2 * mean, 1)
    assert records_of.min() >= min(mean // 2, 1)
    if groups == 512 and replicas == 96:
        assert records_of.max() - records_of.min() <= shards, (
            "a record of each shard: they share out without a rest"
        )


@pytest.mark.parametrize("seed", range(5))
def test_replicas_finish_together_although_some_groups_are_four_times_as_long(seed: int) -> None:
    """Every fourth group is long, which would all be one replica's if ordinals decided."""
    replicas, count = 4, 512
    seconds = np.where(np.arange(count) % replicas == 0, 4.0, 1.0) * np.random.default_rng(
        seed
    ).uniform(0.5, 1.5, count)
    even = seconds.sum() / replicas
    fixed = max(seconds[i::replicas].sum() for i in range(replicas))
    parts = shares(leases(count), replicas, 1)
    assert (
        shared_out([sum(seconds[lease.ordinal] for lease in part) for part in parts], replicas)
        < 1.1 * even
    )
    assert fixed > 2 * even


def shared_out(parts: list[float], replicas: int) -> float:
    """When the last part ends, where those at a replica share its time and each that ends makes
    room for another.
    """
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
def test_parts_per_replica_do_not_depend_on_the_number_of_shards(shards: int) -> None:
    assert lanes_of(shards) * shards == max(LANES, shards)
