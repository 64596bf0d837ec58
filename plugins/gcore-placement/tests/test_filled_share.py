"""Shares of a role's places that were taken, as a placement policy sees them."""

from __future__ import annotations

import numpy as np
import pytest
from gcore_placement.measuring import filled_share, most_at_once

from gcore_core.contract.measurements import Requests


def requests(*served: tuple[int, float, float]) -> Requests:
    """(replica, start, end) each."""
    replica, start_s, end_s = (np.array(column) for column in zip(*served, strict=True))
    count = len(served)
    zeros = np.zeros(count, np.int64)
    return Requests(
        step=zeros,
        group=np.arange(count),
        arrival_s=start_s.astype(float),
        start_s=start_s.astype(float),
        end_s=end_s.astype(float),
        prompt=zeros,
        actions=zeros,
        parent=zeros - 1,
        kept=np.ones(count, bool),
        replica=replica.astype(np.int64),
    )


SERVED = requests((0, 0, 10), (0, 0, 5), (0, 5, 10), (1, 2, 4))


def test_capacity_is_the_most_concurrent_requests_of_one_replica() -> None:
    assert most_at_once(SERVED, [0, 1]) == 2
    assert most_at_once(SERVED, [1]) == 1
    assert most_at_once(SERVED, []) == 0


def test_a_request_starting_when_another_ends_counts_one_place() -> None:
    assert most_at_once(requests((0, 0, 5), (0, 5, 10)), [0]) == 1


@pytest.mark.parametrize(
    ("replicas", "places", "share"),
    [
        ([0], 2, 1.0),  # two at any time
        ([0], 4, 0.5),
        ([1], 2, 0.1),  # one for 2 of 10 seconds
        ([0, 1], 2, 0.55),
    ],
)
def test_the_filled_share_is_of_all_places_of_all_replicas(
    replicas: list[int], places: int, share: float
) -> None:
    assert filled_share(SERVED, replicas, 10.0, places) == pytest.approx(share)


def test_requests_waiting_for_a_place_do_not_count() -> None:
    assert filled_share(SERVED, [0], 10.0, 1) == pytest.approx(1.0)


def test_a_role_without_requests_has_filled_share_zero() -> None:
    nothing = SERVED.take(np.zeros(4, bool))
    assert filled_share(nothing, [0], 10.0, 2) == 0.0
    assert most_at_once(nothing, [0]) == 0
