"""Which part of a whole tensor a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gcore_language.cuts import copies_of, cut_of, cut_twice, rows_of_rank
from torch.distributed.tensor import Replicate, Shard


@dataclass
class Mesh:
    """A rank's place in a mesh; what ``cut_of`` asks of torch's."""

    sizes: tuple[int, ...]
    place: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.place


@dataclass
class Sharded:
    """A tensor that is only looked at."""

    shape: tuple[int, ...]
    device_mesh: Mesh
    placements: tuple[Any, ...]


def parts(shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Any, ...]) -> Any:
    """Yields every rank's part of a tensor."""
    for place in torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes)).tolist():
        yield Sharded(shape, Mesh(sizes, tuple(place)), placements)


@pytest.mark.parametrize(
    ("sizes", "placements", "copies"),
    [
        ((4,), (Shard(0),), 1),
        ((2, 2), (Replicate(), Shard(0)), 2),
        ((2, 2), (Shard(0), Shard(0)), 1),
        ((2, 3), (Shard(0), Shard(1)), 1),
        ((2, 3), (Shard(0), Replicate()), 3),
    ],
)
def test_parts_of_all_ranks_cover_a_tensor_as_often_as_there_are_copies(
    sizes: tuple[int, ...], placements: tuple[Any, ...], copies: int
) -> None:
    """Also where rows do not divide evenly, and where there are fewer rows than ranks."""
    for shape in ((8, 6), (7, 5), (3, 2)):
        seen = torch.zeros(shape)
        for part in parts(shape, sizes, placements):
            seen[cut_of(part)] += 1  # type: ignore[arg-type]
            ranks = torch.Size(sizes).numel()
            assert copies_of(part, ranks) == copies  # type: ignore[arg-type]
        assert bool((seen == copies).all())


def test_rows_that_two_dimensions_cut_go_to_the_last_dimension_first() -> None:
    (part,) = [
        part
        for part in parts((8, 1), (2, 2), (Shard(0), Shard(0)))
        if part.device_mesh.place == (1, 0)
    ]
    assert cut_of(part)[0] == slice(2, 4)


@pytest.mark.parametrize(
    ("placements", "twice"),
    [
        ((Shard(0), Shard(0)), True),
        ((Shard(0), Shard(1)), True),
        ((Replicate(), Shard(0)), False),
        ((Shard(0), Replicate()), False),
    ],
)
def test_a_tensor_is_cut_twice_where_two_dimensions_of_the_mesh_cut_it(
    placements: tuple[Any, ...], twice: bool
) -> None:
    for part in parts((8, 6), (2, 2), placements):
        assert cut_twice(part) is twice  # type: ignore[arg-type]
    assert not cut_twice(torch.zeros(2))


def test_saved_rows_of_all_ranks_are_the_whole_tensor_in_the_order_of_ranks() -> None:
    for rows in (1, 5, 8):
        whole = torch.arange(2 * rows).reshape(rows, 2)
        saved = [rows_of_rank(whole, rank, 4) for rank in range(4)]
        assert torch.equal(torch.cat([part for part in saved if part is not None]), whole)
    assert rows_of_rank(torch.tensor(1.0), 1, 4) is None
