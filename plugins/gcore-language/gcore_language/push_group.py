"""The process group of one push.

The sender is rank 0, the receivers are the other ranks, and all are on one machine. The group is
independent of the other groups of a process, and a process does not end when it breaks.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gcore_core.contract.errors import ContractError

#: Deadline for the other ranks to meet, and for each broadcast. What they do between two broadcasts
#: takes less. A process that hangs is found after twice this (``run.patience_s``), so that one that
#: only waits here is not mistaken for it.
WAIT_S = 30.0
_POLL_S = 2e-4


def group_library(device: torch.device) -> str:
    """Names the library that carries a push on this device, with its version.

    Processes whose libraries differ cannot communicate.
    """
    if device.type == "cpu":
        return f"gloo {torch.__version__.partition('+')[0]}"
    return "nccl " + ".".join(map(str, torch.cuda.nccl.version()))


class PushGroup:
    """One rank of a push's process group."""

    def __init__(
        self, device: torch.device, place: Path, rank: int, ranks: int, wait_s: float = WAIT_S
    ) -> None:
        """Meets the other ranks.

        place: a file that exists for this group alone; the sender makes and removes it.
        wait_s: deadline to meet, and for each broadcast.

        Raises ContractError when the sender has removed the file, or the other ranks do not come in
        time.
        """
        self._device = device
        self._wait_s = wait_s
        self._place = place
        self._group: Any = None
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with _as_contract_error("meet"):
            self._file = os.open(place, os.O_RDONLY)
            try:
                self._group = _make(device, place, rank, ranks, wait_s)
            except RuntimeError as error:
                traceback.clear_frames(error.__traceback__)  # they hold the store
                self._clear_up()
                raise

    def broadcast(self, memory: Tensor) -> None:
        """Copies rank 0's memory to all other ranks; returns when it has arrived.

        memory: flat uint8 of the same size on all ranks; the others' is overwritten.

        Raises ContractError when it fails or takes longer than ``wait_s``.
        """
        if not memory.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with _as_contract_error("broadcast"):
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
        """Aborts the group, so that a broadcast that still waits on another rank fails.

        Does nothing when called again.
        """
        if self._group is None:
            return
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        self._group = None
        self._clear_up()

    def _clear_up(self) -> None:
        """Removes the file if the group's store has made it anew.

        A store does that where it writes after the sender has removed the file; it writes when it
        begins, meets and ends. ``_file`` is the file that the sender made: once it has no link,
        what has its name is not the sender's.
        """
        if not os.fstat(self._file).st_nlink:
            self._place.unlink(missing_ok=True)
        os.close(self._file)


def _make(device: torch.device, place: Path, rank: int, ranks: int, wait_s: float) -> Any:
    """Makes the group, by gloo on a CPU and by NCCL on CUDA; its ranks meet in the file."""
    store = dist.FileStore(str(place), ranks)
    store.set_timeout(timedelta(seconds=wait_s))
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=wait_s))
    # Not tested, because it needs CUDA. By default a process ends when one of its collectives
    # fails; here the trainer must go on.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    former = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, ranks)
    finally:
        if former is None:
            del os.environ[name]
        else:
            os.environ[name] = former


@contextlib.contextmanager
def _as_contract_error(what: str) -> Iterator[None]:
    """Raises a RuntimeError or OSError of the block as ContractError: could not ``what``."""
    try:
        yield
    except (RuntimeError, OSError) as error:  # DistError is a RuntimeError
        raise ContractError(
            f"the processes of a weight push could not {what}",
            where="push",
            why=str(error).partition("\n")[0],
        ) from error
