"""One rank of attention that ranks share, and how far it is from torch's own, as JSON.

``python -m tests.support.context_ranks RANK RANKS WORK``, by tests of gcore-language. Each rank
makes the same queries, keys and values, computes its own part together with the others, and
compares result and gradients with attention of each whole record by torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from gcore_language.context.attention import SharedRow, attend
from gcore_language.context.groups import make_groups
from gcore_language.context.kernels import BlockKernel, FlashKernel, Kernel
from gcore_language.context.layout import Layout, shared_by_all
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

#: (ring, ulysses) of each case; with fewer than all ranks there are several context groups.
MESHES = ((2, 1), (1, 2), (4, 1), (1, 4), (2, 2))
LENGTHS = {
    "one record": [1200],
    "packed": [17, 1, 700, 64, 3, 1030],
    "shorter than the ranks": [1, 2, 9],
}
_KERNELS: dict[str, Callable[[], Kernel]] = {"flash": FlashKernel, "blocks": BlockKernel}
_HEADS, _KEY_HEADS, _CHANNELS = 4, 2, 8


def partly_whole(lengths: list[int], ring: int, ulysses: int) -> Layout:
    """Returns a layout in which every other record is whole, and the rest have all members."""
    members = [
        tuple(range(ring)) if number % 2 else (number // 2 % ring,)
        for number in range(len(lengths))
    ]
    return Layout(np.array(lengths), tuple(members), ring, ulysses)


def main(rank: int, ranks: int, work: Path) -> None:
    """Writes gaps-RANK.json: the largest difference of each case."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(work / "meet"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    gaps = {}
    for ring, ulysses in MESHES:
        groups = make_groups(ring, ulysses, rank, ranks)
        for kind, lengths in LENGTHS.items():
            for split in (shared_by_all, partly_whole):
                for name, kernel in _KERNELS.items():
                    row = SharedRow(split(lengths, ring, ulysses), groups, kernel())
                    case = f"ring {ring}, ulysses {ulysses}, {kind}, {split.__name__}, {name}"
                    gaps[case] = _gap(row, lengths)
    (work / f"gaps-{rank}.json").write_text(json.dumps(gaps))
    dist.barrier()


def _gap(row: SharedRow, lengths: list[int]) -> float:
    """Returns the largest difference, in float64, of this rank's results and gradients."""
    torch.manual_seed(sum(lengths))
    whole = [
        torch.randn(sum(lengths), heads, _CHANNELS, dtype=torch.float64, requires_grad=True)
        for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS)
    ]
    slope = torch.randn_like(whole[0])
    expected = _by_record(whole, lengths)
    expected.backward(slope)
    own = torch.from_numpy(row.layout.own(row.groups.member, row.groups.place))
    parts = [x.detach()[own].requires_grad_() for x in whole]
    result = attend(*parts, row, _CHANNELS**-0.5)
    result.backward(slope[own])
    gaps = [_most(result, expected[own])]
    for part, full in zip(parts, whole, strict=True):
        assert part.grad is not None and full.grad is not None
        gaps.append(_most(part.grad, full.grad[own]))
    return max(gaps)


def _by_record(whole: list[Tensor], lengths: list[int]) -> Tensor:
    """Returns causal attention of each record by itself, by torch, [tokens, H, E]."""
    results = []
    for parts in zip(*(x.split(lengths) for x in whole), strict=True):
        heads = [part.transpose(0, 1)[None] for part in parts]
        results.append(scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True))
    return torch.cat([result[0].transpose(0, 1) for result in results])


def _most(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max()) if x.numel() else 0.0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may abort a rank that unwinds
