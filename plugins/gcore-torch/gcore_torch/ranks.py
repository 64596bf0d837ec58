"""The data-parallel ranks of one trainer: how they meet, shard a model and add numbers up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gcore_core.protocols import WorkerContext

Sums = dict[str, tuple[float, float]]


class Ranks:
    """A group of ``count`` ranks; with one rank every method does nothing and costs nothing."""

    def __init__(self, context: WorkerContext, device: torch.device) -> None:
        self.rank, self.count, self.device = context.rank, context.ranks, device
        self._mesh: Any = None
        if self.count == 1:
            return
        # ranks that share a directory are on one machine: gloo may keep to the loopback interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(Path(context.rendezvous) / f"{context.role}.store"), self.count)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.count)
        self._mesh = dist.init_device_mesh(device.type, (self.count,))

    def shard(self, policy: nn.Module, blocks: set[str]) -> None:
        """FSDP2: each module whose class is named in ``blocks`` is gathered by itself, the rest with the root."""
        if self._mesh is None:
            return
        from torch.distributed.fsdp import fully_shard

        for module in [m for m in policy.modules() if type(m).__name__ in blocks]:
            fully_shard(module, mesh=self._mesh)
        fully_shard(policy, mesh=self._mesh)

    def sum(self, values: list[float]) -> list[float]:
        """Element by element over the ranks."""
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def max(self, values: list[float]) -> list[float]:
        """Element by element over the ranks."""
        if self.count == 1:
            return values
        most = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.tolist()

    def add_up(self, sums: Sums) -> Sums:
        """Adds pairs by name; a rank need not know all names."""
        if self.count == 1:
            return sums
        mine = np.frombuffer(json.dumps(sums).encode(), np.uint8)
        longest = int(self.max([len(mine)])[0])
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = torch.from_numpy(mine.copy()).to(self.device)
        everyone = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(everyone, padded)
        total: Sums = {}
        for part in everyone:
            for name, (value, weight) in json.loads(part.cpu().numpy().tobytes()).items():
                before = total.get(name, (0.0, 0.0))
                total[name] = (before[0] + value, before[1] + weight)
        return total

    def like(self, whole: Tensor, sharded: Tensor) -> Tensor:
        """``whole``, which every rank has, laid out as ``sharded`` is."""
        whole = whole.to(sharded.device, sharded.dtype)
        if not hasattr(sharded, "placements"):
            return whole
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)

    def wait(self) -> None:
        """Until all ranks are here."""
        self.sum([0.0])

    def close(self) -> None:
        if self._mesh is not None:
            dist.destroy_process_group()
            self._mesh = None
