"""Says which part of a whole tensor a rank holds, and cuts it out.

A sharded tensor is a DTensor: a mesh of ranks, and for each dimension of the mesh a placement,
which names the dimension of the tensor that is cut there, or says that it is whole.

Legend: of a mesh (data 2, tensor 2) and a matrix of 8 rows whose rows both cut, rank (1, 0) holds
rows 2 and 3. ``tensor`` cuts first, into 0..3 and 4..7, then ``data`` cuts 0..3 into 0..1 and 2..3.
FSDP2 cuts what tensor parallelism has left, so the last dimension of the mesh always cuts first.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Where a part lies in the whole: a slice for each dimension of the tensor.
Cut = tuple[slice, ...]


def cut_of(tensor: Tensor) -> Cut:
    """Returns which part of a tensor this rank holds; all of one that is not sharded.

    Parts are those of ``torch.chunk``: all but the last ones are equally long, and those behind the
    last row are empty.
    """
    spans = [(0, size) for size in tensor.shape]
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None:
        place = mesh.get_coordinate()
        for axis in reversed(range(mesh.ndim)):
            placement = tensor.placements[axis]
            if hasattr(placement, "dim"):
                spans[placement.dim] = _chunk(spans[placement.dim], place[axis], mesh.size(axis))
    return tuple(slice(first, end) for first, end in spans)


def _chunk(span: tuple[int, int], number: int, count: int) -> tuple[int, int]:
    """Returns one of ``count`` chunks of a span."""
    first, end = span
    length = -(-(end - first) // count)
    return min(end, first + number * length), min(end, first + (number + 1) * length)


def cut_twice(tensor: Tensor) -> bool:
    """Returns whether several dimensions of a mesh cut a tensor; parts may then be in any order."""
    placements = getattr(tensor, "placements", ())
    return sum(hasattr(placement, "dim") for placement in placements) > 1


def copies_of(tensor: Tensor, ranks: int) -> int:
    """Returns how many of so many ranks hold the same part of a tensor as this one."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ranks
    parts = 1
    for axis, placement in enumerate(tensor.placements):
        parts *= mesh.size(axis) if hasattr(placement, "dim") else 1
    return ranks // parts


def rows_of_rank(whole: Tensor, rank: int, ranks: int) -> Tensor | None:
    """Returns the rows of a whole tensor that a rank saves; None where none are left for it.

    A number without dimensions is saved by rank 0.
    """
    if not whole.dim():
        return whole if rank == 0 else None
    first, end = _chunk((0, len(whole)), rank, ranks)
    return whole[first:end].clone() if end > first else None


def with_part(whole: Tensor, sharded: Tensor) -> Tensor:
    """Returns a tensor sharded as another one is, of which each rank has the whole.

    whole: on the device and in the dtype of ``sharded``, which must be a DTensor.
    """
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        whole[cut_of(sharded)].contiguous(),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=torch.Size(whole.shape),
        stride=sharded.stride(),
    )
    return made
