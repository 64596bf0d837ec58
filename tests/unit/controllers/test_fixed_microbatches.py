from __future__ import annotations

import numpy as np
import pytest

from gcore_core.builtin.balancer import InOrder
from gcore_core.contract.records import Facts
from gcore_core.controllers.training import PlannedUpdate, cut_into_tiles, deal_tiles, make_plan

#: 12 groups of 3 records, whose lengths differ.
FACTS = [
    Facts(ordinal, sample, 5, 1 + (7 * ordinal + sample) % 11, 0.0)
    for ordinal in range(12)
    for sample in range(3)
]


def planned(ranks: int, tiles: int | None = 3) -> PlannedUpdate:
    return make_plan(FACTS, ranks, 2, 7, InOrder(), tiles=tiles)


def test_tiles_do_not_depend_on_the_number_of_ranks() -> None:
    tiles_of = [
        {key: (place.minibatch, place.tile) for key, place in planned(ranks).plan.items()}
        for ranks in (1, 2, 4, 7)
    ]
    assert tiles_of[0] == tiles_of[1] == tiles_of[2] == tiles_of[3]
    assert set(tiles_of[0].values()) == {(part, tile) for part in (0, 1) for tile in (0, 1, 2)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_tile_is_on_one_rank_as_a_whole(ranks: int) -> None:
    ranks_of: dict[tuple[int, int], set[int]] = {}
    for place in planned(ranks).plan.values():
        ranks_of.setdefault((place.minibatch, place.tile), set()).add(place.rank)
    assert all(len(found) == 1 for found in ranks_of.values())
    used = {rank for found in ranks_of.values() for rank in found}
    assert used == set(range(min(ranks, 3))), "ranks beyond the tiles have nothing to do"


def test_a_group_is_never_split_over_tiles() -> None:
    plan = planned(2).plan
    for ordinal in range(12):
        assert len({plan[ordinal, sample].tile for sample in range(3)}) == 1


def test_fewer_groups_than_tiles_make_a_tile_each() -> None:
    assert cut_into_tiles(np.array([4, 4, 9, 4]), 8).tolist() == [0, 0, 1, 0]


def test_the_costliest_tile_is_dealt_first() -> None:
    tile_of = np.array([0, 1, 2, 2])
    ranks = deal_tiles(tile_of, np.array([1.0, 2.0, 2.0, 2.0]), 2)
    assert ranks.tolist() == [1, 1, 0, 0], "4 for the one, 2 + 1 for the other"


def test_other_runs_deal_records_and_have_no_tiles() -> None:
    places = planned(2, tiles=None).plan.values()
    assert {place.tile for place in places} == {0}
    assert {place.rank for place in places} == {0, 1}
