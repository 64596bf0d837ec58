"""Columns and blobs in shared memory: written once by their producer, in place or by one copy,
opened by reference.

They lie in slabs, files in the run's private directory that the node agent owns (see ``slabs``). A
slab is written by one worker, for one step, and held by the shards that have records of that step.
Chunks are groups' columns (see ``columns``); a blob is one array, stored once however many records
share it. A reference carries a MAC under the run's secret; whoever opens one checks MAC, bounds and
content: by its hash where it comes from a disk or another node, in memory by the stamp in front of
it, the same hash, which whoever writes there next overwrites first.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from gcore_core.contract.errors import ContractError, DataError
from gcore_core.contract.launching import Peer
from gcore_core.contract.records import Header, Ref
from gcore_core.runtime.messages import (
    BLOB,
    FETCH,
    RELEASE,
    SLAB,
    BlobRequest,
    Nothing,
    Released,
    ReleaseRequest,
    SlabRequest,
    TrainItem,
)
from gcore_core.runtime.process.spawn import SHARED_MEMORY, STREAMED_BYTES
from gcore_core.runtime.rpc.retry import insist
from gcore_core.runtime.rpc.service import encode
from gcore_core.runtime.store.columns import MOST_AXES, NUMBERS, Chunk, Columns, pack

NOTHING_RELEASED = (0, 0)
STAMP_BYTES = 8  # the digest of what comes behind it
# copied past the caches, then hashed where the copy has left it in the core's own cache
_PIECE_BYTES = STREAMED_BYTES


def sign(secret: bytes, ref: Ref) -> bytes:
    """The MAC of a reference: over every other field, each delimited."""
    bare = encode(msgspec.structs.replace(ref, mac=b""))
    return hashlib.blake2b(bare, key=secret[:64], digest_size=16).digest()


def map_file(path: Path, writable: bool) -> mmap.mmap:
    """What is to be written is mapped page by page at once: a fault for each takes longer than its
    copy.
    """
    handle = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        at_once = getattr(mmap, "MAP_POPULATE", 0) if writable else 0
        return mmap.mmap(
            handle,
            0,
            mmap.MAP_SHARED | at_once,
            mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
        )
    finally:
        os.close(handle)


def copy_hashed(parts: Iterable[bytes | memoryview], target: memoryview) -> int:
    """Copies flat bytes, one part after the other, and returns the xxh3-64 of them all."""
    digest, offset = xxhash.xxh3_64(), 0
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            piece = part[start : start + _PIECE_BYTES]
            target[offset : offset + len(piece)] = piece
            digest.update(piece)
            offset += len(piece)
    return int(digest.intdigest())


def is_over(released: Released, held: Mapping[int, int]) -> bool:
    """Whether every shard has released the step up to which it holds something. held: shard -> that
    step.
    """
    return all(released.get(shard, NOTHING_RELEASED)[1] > step for shard, step in held.items())


class MappedSlabs:
    """The slabs of a directory as uint8 arrays, mapped on first use. A mapping lives as long as a
    view of it does.
    """

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self._directory, self._writable = directory, writable
        self._in_memory = directory.resolve().is_relative_to(SHARED_MEMORY)
        self._mapped: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._mapped:
            for gone in [known for known in self._mapped if not (self._directory / known).exists()]:
                del self._mapped[gone]
            try:
                mapped = map_file(self._directory / Path(name).name, self._writable)
            except (OSError, ValueError) as error:  # ValueError: it is empty, or its name is none
                why = getattr(error, "strerror", None) or error
                raise DataError(f"it cannot be opened: {why}", where=f"slab {name}") from None
            self._mapped[name] = np.frombuffer(mapped, np.uint8)
        return self._mapped[name]

    def in_memory(self, name: str) -> bool:
        """Not on a disk: neither the store nor, by itself, this slab."""
        return self._in_memory and not (self._directory / Path(name).name).is_symlink()


class StoreReader:
    """Opens references. Its views are read-only and valid until their step is over.

    ``agent``: of this node; without it, references of other nodes cannot be followed.
    """

    def __init__(
        self, directory: Path, node: str, secret: bytes, agent: Peer | None = None
    ) -> None:
        self._slabs, self._node, self._secret = MappedSlabs(directory, writable=False), node, secret
        self._agent = agent

    async def records(self, items: Sequence[Header | TrainItem]) -> list[tuple[Columns, Columns]]:
        """(columns, media) of each record. A reference is opened once; what another node has is
        copied here first.
        """
        refs = dict.fromkeys(ref for item in items for ref in (item.columns, *item.media.values()))
        opened = dict(zip(refs, await self.arrays(refs), strict=True))
        return [
            (
                opened[item.columns][item.slot],
                {name: opened[ref] for name, ref in item.media.items()},
            )
            for item in items
        ]

    async def arrays(self, refs: Iterable[Ref | None]) -> list[Any]:
        """The blobs of any node, and chunks, in order. Raises like ``open`` and ``open_array``."""
        return await asyncio.gather(*map(self._anywhere, refs))

    async def _anywhere(self, ref: Ref | None) -> Any:
        if ref is None:
            raise DataError("a record without columns cannot be opened", where="store")
        if ref.node != self._node and self._agent is not None:
            ref = await insist(self._agent, FETCH, ref)
        return self.open(ref) if ref.dtype == "columns" else self.open_array(ref)

    def open(self, ref: Ref) -> Chunk:
        """The records of the chunk. Raises DataError when the reference is not what the run signed
        or stored.
        """
        return Chunk(self._verified(ref).data)

    def open_array(self, ref: Ref) -> np.ndarray:
        """A blob, as an array of the reference's dtype and shape. Raises like ``open``."""
        content = self._verified(ref)
        sound = (
            NUMBERS.fullmatch(ref.dtype)
            and len(ref.shape) <= MOST_AXES
            and all(size >= 0 for size in ref.shape)
        )
        try:
            if sound and np.dtype(ref.dtype).itemsize * math.prod(ref.shape) == ref.nbytes:
                return content.view(ref.dtype).reshape(ref.shape)
        except (
            TypeError,
            ValueError,
            OverflowError,
        ):  # no dtype of numpy's, or sizes beyond its own
            pass
        shown = f"{ref.dtype[:20]} of shape {ref.shape[:8]}"
        raise DataError(f"{ref.nbytes} bytes are no {shown}", where=f"slab {ref.slab}")

    def content(self, ref: Ref) -> np.ndarray:
        """uint8[nbytes]: MAC and bounds are checked, the content is not."""
        self.check(ref)
        if ref.node != self._node:
            raise DataError(
                f"the reference is of node {ref.node!r}, this is {self._node!r}",
                where=f"slab {ref.slab}",
            )
        memory = self._slabs[ref.slab]
        if ref.offset < 0 or ref.nbytes < 0 or ref.offset + ref.nbytes > len(memory):
            raise DataError("a reference points outside its slab", where=f"slab {ref.slab}")
        return memory[ref.offset : ref.offset + ref.nbytes]

    def check(self, ref: Ref) -> None:
        if not hmac.compare_digest(sign(self._secret, ref), ref.mac):
            raise DataError("a reference carries a wrong MAC", where=f"slab {ref.slab}")

    def _verified(self, ref: Ref) -> np.ndarray:
        content = self.content(ref)
        stamp = self._slabs[ref.slab][max(0, ref.offset - STAMP_BYTES) : ref.offset].tobytes()
        stamped = self._slabs.in_memory(ref.slab)
        digest = (
            int.from_bytes(stamp, "little") if stamped else xxhash.xxh3_64_intdigest(content.data)
        )
        if digest != ref.digest:
            raise DataError("the content is not what the reference says", where=f"slab {ref.slab}")
        return content


@dataclass
class Room:
    """Space in a slab, to be filled in place and committed before its step is released. ``memory``:
    uint8.
    """

    memory: memoryview
    _stamp: memoryview
    _bare: Ref
    _secret: bytes

    def commit(self, digest: int | None = None) -> Ref:
        """The reference of what was written; ``digest``: its xxh3-64 where the writer has it
        already.
        """
        told = xxhash.xxh3_64_intdigest(self.memory) if digest is None else digest
        self._stamp[:] = told.to_bytes(STAMP_BYTES, "little")
        ref = msgspec.structs.replace(self._bare, digest=told)
        return msgspec.structs.replace(ref, mac=sign(self._secret, ref))


@dataclass
class _Slab:
    """A slab that this writer fills, for records of ``shards``."""

    memory: memoryview
    name: str
    shards: frozenset[int]
    used: int = 0


Kind = tuple[str, tuple[int, ...]]  # dtype and shape
_Blob = tuple[
    int, frozenset[int], Kind, bytes
]  # step and shards for which it is held, kind, some of its bytes


class StoreWriter:
    """Writes into slabs that it asks its node's agent for. ``owner``: this process, by a name of
    its own.
    """

    def __init__(self, directory: Path, node: str, secret: bytes, agent: Peer, owner: str) -> None:
        self._slabs, self._node, self._secret = MappedSlabs(directory, writable=True), node, secret
        self._directory, self._agent, self._owner = directory, agent, owner
        self._open: dict[tuple[int, bool], _Slab] = {}  # by step, and whether it is for blobs
        self._blobs: dict[_Blob, Ref] = {}
        self._released: Released = {}
        self._telling = set[asyncio.Future[Nothing]]()

    def reader(self) -> StoreReader:
        """Opens what any writer of the run stored."""
        return StoreReader(self._directory, self._node, self._secret, self._agent)

    async def put(self, step: int, shards: frozenset[int], records: Sequence[Columns]) -> Ref:
        """Copies the columns of records that belong to ``shards`` and returns the reference of the
        chunk.
        """
        parts = pack(records)
        room = await self.reserve(step, shards, sum(len(part) for part in parts))
        return room.commit(copy_hashed(parts, room.memory))

    async def put_blobs(
        self, step: int, shards: frozenset[int], arrays: Sequence[np.ndarray]
    ) -> list[Ref]:
        """Stores each array once: the same bytes, dtype and shape have one reference on this node.

        Some bytes find the candidate among this writer's own, xxh3 among the node's, a comparison
        of all decides: what was made to collide is merely stored twice. They are stored before the
        agent is asked, once for all of them, and
        given back if the node has them: most are new, and calls are slow.
        """
        found, fresh, made = list[Ref](), dict[_Blob, Ref](), dict[Ref, np.ndarray]()
        for array in arrays:
            kind = array.dtype.str, array.shape
            if not NUMBERS.fullmatch(kind[0]):
                raise ContractError(
                    f"a blob has dtype {kind[0]}; it must be of numbers or bools", where="store"
                )
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            key = step, shards, kind, flat[:: flat.size // 64 + 1].tobytes()
            ref = fresh.get(key) or self._blobs.get(key)
            if ref is None or not self._holds(ref, flat):
                room = await self.reserve(step, shards, flat.nbytes, kind)
                ref = fresh[key] = room.commit(copy_hashed([flat.data], room.memory))
                made[ref] = flat
            found.append(ref)
        kept = await self._registered(step, shards, made) if made else {}
        self._blobs |= {key: kept[ref] for key, ref in fresh.items()}
        return [kept.get(ref, ref) for ref in found]

    async def _registered(
        self, step: int, shards: frozenset[int], made: dict[Ref, np.ndarray]
    ) -> dict[Ref, Ref]:
        """Of each blob that was just made the one to keep: the node's, where it had one."""
        request, slab = BlobRequest(dict.fromkeys(shards, step), list(made)), self._open[step, True]
        end, told = slab.used, await insist(self._agent, BLOB, request)
        pairs = zip(made.items(), told, strict=True)
        kept = {
            own: ref if ref == own or self._holds(ref, flat) else own for (own, flat), ref in pairs
        }
        for own in reversed(kept):  # the last ones are given back
            if kept[own] == own or own.slab != slab.name or slab.used != end:
                break
            slab.used = end = own.offset - STAMP_BYTES
        return kept

    def _holds(self, ref: Ref, flat: np.ndarray) -> bool:
        return np.array_equal(self._slabs[ref.slab][ref.offset : ref.offset + ref.nbytes], flat)

    async def reserve(
        self, step: int, shards: frozenset[int], nbytes: int, kind: Kind = ("columns", ())
    ) -> Room:
        """Room for a chunk, or for a blob of ``kind``. Waits while the store is full."""
        key = step, kind[0] != "columns"
        slab = self._open.get(key)
        if (
            slab is None
            or not slab.shards >= shards
            or slab.used + STAMP_BYTES + nbytes > len(slab.memory)
        ):
            asked = SlabRequest(self._owner, STAMP_BYTES + nbytes, dict.fromkeys(shards, step))
            name = await insist(self._agent, SLAB, asked)
            if is_over(self._released, asked.held):  # the agent may have given it to another by now
                raise ContractError(f"its shards have released step {step}", where="store")
            slab = self._open[key] = _Slab(self._slabs[name].data, name, shards)
        stamp, start = slab.used, slab.used + STAMP_BYTES
        slab.used = start + nbytes + -nbytes % 8
        bare = Ref(self._node, slab.name, start, nbytes, 0, b"", *kind)
        return Room(
            slab.memory[start : start + nbytes], slab.memory[stamp:start], bare, self._secret
        )

    async def close(self) -> None:
        """Nothing more is written; what there is stays for as long as shards hold it."""
        await insist(self._agent, RELEASE, ReleaseRequest(self._owner, {}))

    def release(self, told: Released) -> None:
        """Shards need no record of earlier steps. A later epoch of one takes over, from whatever
        step.
        """
        fresh = {
            shard: at
            for shard, at in told.items()
            if at > self._released.get(shard, NOTHING_RELEASED)
        }
        if not fresh:
            return
        released = self._released = self._released | fresh
        self._open = {
            k: s
            for k, s in self._open.items()
            if not is_over(released, dict.fromkeys(s.shards, k[0]))
        }
        self._blobs = {
            k: r for k, r in self._blobs.items() if not is_over(released, dict.fromkeys(k[1], k[0]))
        }
        request = ReleaseRequest(self._owner, fresh)
        telling = asyncio.ensure_future(insist(self._agent, RELEASE, request))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
