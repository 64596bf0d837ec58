"""Takes host memory that a GPU reads and writes directly, without copies by the processor.

The system gives fresh pages one at a time, and a driver that asks for them takes a second for each
GB. So large blocks are of huge pages where the system has them, are touched by several threads, and
are shown to the driver only then.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

#: Smaller blocks are left to torch, which rounds their size up to a power of two.
_LARGE = 8 << 20
_THREADS = 8


def pinned_bytes(nbytes: int) -> Tensor:
    """Returns uint8[nbytes] of pinned host memory; without CUDA it is memory as any other."""
    if not torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8)
    if nbytes < _LARGE:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a system without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(block, np.uint8)
    _touch(memory)
    address = memory.ctypes.data
    failed = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
    if int(failed):  # such as by a limit on locked memory
        with contextlib.suppress(RuntimeError):  # the driver's error, which the next call raises
            torch.zeros(1, device="cuda")
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    tensor = torch.from_numpy(memory)
    # the storage holds the block; when it goes, the driver lets go of it first
    finalizer = weakref.finalize(memory, _release, address)
    finalizer.atexit = False  # a thread may still be writing to it when the process ends
    return tensor


def pinned_like(tensor: Tensor) -> Tensor:
    """Returns an empty contiguous tensor of the same shape and dtype in pinned host memory."""
    nbytes = tensor.numel() * tensor.element_size()
    return pinned_bytes(nbytes).view(tensor.dtype).view(tensor.shape)


def _touch(memory: np.ndarray) -> None:
    """Writes to all of a block by several threads; numpy lets others run meanwhile."""
    each = -(-len(memory) // _THREADS)
    parts = [memory[start : start + each] for start in range(0, len(memory), each)]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda part: part.fill(0), parts))


def _release(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
