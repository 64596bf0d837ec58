"""Cuts a minibatch into tiles, and deals whole tiles to ranks.

A gradient is a sum of rounded numbers, so its last bits depend on which records share a forward
pass. In a deterministic run the records that share one are therefore chosen without a look at the
number of ranks: every minibatch is cut into the same number of tiles, and each rank gets whole
tiles. A trainer that computes each tile by itself, and adds tiles up exactly, has the same bits
with any number of ranks.
"""

from __future__ import annotations

import numpy as np


def cut_into_tiles(groups: np.ndarray, tiles: int) -> np.ndarray:
    """Returns the tile of each record of a minibatch: int64[N], counted from 0.

    A tile is a run of neighbouring groups; the numbers of groups differ by at most one. There are
    as many tiles as asked for, or one for each group where there are fewer groups.

    groups: int64[N], the ordinal of each record.
    """
    ordinals, place = np.unique(groups, return_inverse=True)
    count = min(tiles, len(ordinals))
    sizes = [len(part) for part in np.array_split(ordinals, count)]
    tile_of: np.ndarray = np.repeat(np.arange(count), sizes)[place]
    return tile_of


def deal_tiles(tile_of: np.ndarray, costs: np.ndarray, ranks: int) -> np.ndarray:
    """Returns the rank of each record: int64[N]; records of one tile have one rank.

    The costliest tile goes first, each to the rank that has the least so far (Graham 1969, "Bounds
    on multiprocessing timing anomalies"). Among equals the first tile and the first rank are taken.

    tile_of: int64[N], what ``cut_into_tiles`` returned; or any numbers from 0 on, where equal ones
        go to one rank.
    costs: float64[N], what each record costs.
    """
    tile_costs = np.bincount(tile_of, weights=costs)
    rank_of_tile = np.zeros(len(tile_costs), np.int64)
    loads = np.zeros(ranks)
    for tile in np.argsort(-tile_costs, kind="stable"):
        rank = int(np.argmin(loads))
        rank_of_tile[tile] = rank
        loads[rank] += tile_costs[tile]
    rank_of: np.ndarray = rank_of_tile[tile_of]
    return rank_of
