"""Columns in shared memory: written once by their producer, opened by reference.

A slab is a file in the run's private directory in shared memory, owned by the node agent and written by one worker,
chunk after chunk (see ``columns``). Chunks of a step are freed together, when the controllers say that it is over; a
slab whose chunks are all freed is written again. A reference carries a MAC under the run's secret; whoever opens one
checks MAC, bounds and content hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import mmap
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from gcore_core.errors import DataError
from gcore_core.processes.columns import Chunk, Columns, pack
from gcore_core.records import Ref

SLAB_BYTES = 8 << 20


def sign(secret: bytes, ref: Ref) -> bytes:
    told = f"{ref.node}|{ref.slab}|{ref.offset}|{ref.nbytes}|{ref.digest}|{ref.dtype}|{ref.shape}"
    return hashlib.blake2b(told.encode(), key=secret[:64], digest_size=16).digest()


@dataclass
class _Slab:
    name: str
    memory: mmap.mmap
    used: int = 0
    live: dict[int, int] = field(default_factory=dict)  # step -> chunks not freed yet


def map_file(path: Path, writable: bool) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        return mmap.mmap(handle, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(handle)


class StoreReader:
    """Opens references of one node. Keeps slabs mapped; views stay valid until their step is over."""

    def __init__(self, directory: Path, node: str, secret: bytes) -> None:
        self._directory, self._node, self._secret = directory, node, secret
        self._mapped: dict[str, mmap.mmap] = {}

    def open(self, ref: Ref) -> Chunk:
        """The records of the chunk. Raises DataError when the reference is not what the run signed or stored."""
        if not hmac.compare_digest(sign(self._secret, ref), ref.mac):
            raise DataError("a reference carries a wrong MAC", where=f"slab {ref.slab}")
        if ref.node != self._node:
            raise DataError(f"the reference is of node {ref.node!r}, this is {self._node!r}", where=f"slab {ref.slab}")
        if ref.slab not in self._mapped:
            self._mapped[ref.slab] = map_file(self._directory / Path(ref.slab).name, writable=False)
        memory = self._mapped[ref.slab]
        if ref.offset < 0 or ref.offset + ref.nbytes > len(memory):
            raise DataError("a reference points outside its slab", where=f"slab {ref.slab}")
        chunk = memoryview(memory)[ref.offset : ref.offset + ref.nbytes]
        if xxhash.xxh3_64_intdigest(chunk) != ref.digest:
            raise DataError("the content is not what the reference says", where=f"slab {ref.slab}")
        return Chunk(chunk)

    def close(self) -> None:
        for memory in self._mapped.values():
            with contextlib.suppress(BufferError):  # a view is still held; the mapping goes with the process
                memory.close()
        self._mapped.clear()


class StoreWriter:
    """Writes chunks into slabs it leases from the node agent through ``lease(nbytes) -> (name, path)``."""

    def __init__(self, node: str, secret: bytes, lease: Callable[[int], Awaitable[tuple[str, str]]]) -> None:
        self._node, self._secret, self._lease = node, secret, lease
        self._slabs: list[_Slab] = []

    async def put(self, step: int, records: Sequence[Columns]) -> Ref:
        """Copies the records' columns into a slab and returns the reference of the chunk."""
        parts = pack(records)
        nbytes = sum(len(part) for part in parts)
        slab = await self._room(nbytes)
        start = slab.used
        for part in parts:
            slab.memory[slab.used : slab.used + len(part)] = part
            slab.used += len(part)
        slab.used += -slab.used % 8
        slab.live[step] = slab.live.get(step, 0) + 1
        digest = xxhash.xxh3_64_intdigest(memoryview(slab.memory)[start : start + nbytes])
        bare = Ref(self._node, slab.name, start, nbytes, digest, b"")
        return Ref(self._node, slab.name, start, nbytes, digest, sign(self._secret, bare))

    async def _room(self, nbytes: int) -> _Slab:
        for slab in self._slabs:
            if slab.used + nbytes <= len(slab.memory):
                return slab
        name, path = await self._lease(max(SLAB_BYTES, nbytes))
        slab = _Slab(name, map_file(Path(path), writable=True))
        self._slabs.append(slab)
        return slab

    def release_before(self, step: int) -> None:
        """Frees the chunks of all earlier steps; a slab without live chunks is written from its start again."""
        for slab in self._slabs:
            for old in [s for s in slab.live if s < step]:
                del slab.live[old]
            if not slab.live:
                slab.used = 0
