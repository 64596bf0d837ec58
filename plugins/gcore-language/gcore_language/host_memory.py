"""Has the C library give the memory of large tensors back to the system when they are freed.

glibc takes a large block from the system by itself, and gives it back by itself, only until the
first such block was freed. From then on blocks of up to 32 MiB come out of heaps of 64 MiB, of
which each thread has its own. A heap with a small block that lives on is never given back, and few
large blocks fit beside it. A rank whose tensors have 2 to 32 MiB then holds several times its
tensors.
"""

from __future__ import annotations

import ctypes

# mallopt(3): from which size a block is the system's own, and how much may be free at a heap's end
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: Blocks of so many bytes, or more, are given back. Smaller ones are reused: new pages take four
#: times as long to fill as old ones.
_LARGE = 4 << 20
#: As much as glibc itself comes to keep.
_KEPT = 64 << 20


def return_large_blocks() -> None:
    """Sets the size from which freed blocks go back to the system, for this process and for good.

    Without glibc nothing is set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_TRIM_THRESHOLD, _KEPT)


def return_free_pages() -> None:
    """Gives back what is free between blocks that live on; without glibc nothing is."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
