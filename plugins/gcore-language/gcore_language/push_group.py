"""The process group of one push: the sender is rank 0, receivers are the others, all on one
machine.

It stands beside whatever groups a process has, and one that breaks is no reason for a process to
end.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gcore_core.contract.errors import ContractError

#: For the others, to meet and in each broadcast. What they do between two takes less; and who waits
#: here must not be taken for the one that hangs, which is found after twice that
#: (``run.patience_s``).
WAIT_S = 30.0
_POLL_S = 2e-4


def group_library(device: torch.device) -> str:
    """What carries it there, with its version: those that differ do not understand each other."""
    if device.type == "cpu":
        return f"gloo {torch.__version__.partition('+')[0]}"
    return "nccl " + ".".join(map(str, torch.cuda.nccl.version()))


class PushGroup:
    """place: a file that exists for this group alone. Raises ContractError when the others do not
    come.
    """

    def __init__(
        self, device: torch.device, place: Path, rank: int, ranks: int, wait_s: float = WAIT_S
    ) -> None:
        self._device, self._wait_s = device, wait_s
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with _told("meet"):
            store = dist.FileStore(str(place), ranks)
            store.set_timeout(timedelta(seconds=wait_s))
            self._group = _make(device, store, rank, ranks, wait_s)

    def broadcast(self, memory: Tensor) -> None:
        """Rank 0's flat uint8 to all others; returns when it is there."""
        if not memory.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with _told("broadcast"):
            work = self._group.broadcast([memory], options)
            until_s = time.monotonic() + self._wait_s
            while not work.is_completed():
                if time.monotonic() > until_s:
                    raise RuntimeError(f"it took longer than {self._wait_s:g} s")
                time.sleep(_POLL_S)
            work.wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """The others' broadcasts fail from here on, if they still wait."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        self._group = None


def _make(device: torch.device, store: Any, rank: int, ranks: int, wait_s: float) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=wait_s))
    # Not tested: needs CUDA. By default a process ends when a collective of it fails: the trainer
    # must go on.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, ranks)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # DistError is one
        raise ContractError(
            f"the processes of a weight push could not {what}",
            where="push",
            why=str(error).partition("\n")[0],
        ) from error
