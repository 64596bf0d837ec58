"""Columns and blobs in shared memory: their producer writes them once, readers open them by
reference.

Slabs. Content lies in slabs: files in the run's private directory, owned by the node agent (see
``server``). One worker writes a slab, for one step. The slab is held by the shards that have
records of that step, and for a later step by those that have records with a blob of it.

Content. A chunk has the columns of a group's records (see ``columns``). A blob is one array; it is
stored once, however many records share it.

Checks. A reference carries a MAC under the run's secret. Who opens a reference checks its MAC,
its bounds and the content. Content from a disk or from another node is hashed and compared with
the reference's digest. Content in memory is not hashed again: its digest stands in front of it, as
a stamp of 8 bytes, and who writes there next overwrites the stamp first.

    slab:  | stamp | content ... | padding | stamp | content ... | padding | free ...
                   ^ Ref.offset                    ^ Ref.offset            ^ used
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import math
import mmap
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import xxhash

from gcore_core.contract.errors import ContractError, DataError, WorkerDied
from gcore_core.contract.launching import Peer
from gcore_core.contract.records import Header, Ref
from gcore_core.runtime.files import SHARED_MEMORY, STREAMED_BYTES
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
from gcore_core.store.columns import MOST_AXES, NUMBERS, Chunk, Columns, pack
from gcore_core.wire.retry import LOST, PATIENT, insist
from gcore_core.wire.service import encode

NOTHING_RELEASED = (0, 0)
# A copy of another node's content is fetched again so often, where it is gone before it is opened.
_COPY_TRIES = 20
STAMP_BYTES = 8  # the digest of what comes behind it
#: How the names of slabs begin that hold a copy of another node's content.
COPY = "copy-"
# copied past the caches, then hashed where the copy has left it in the core's own cache
_PIECE_BYTES = STREAMED_BYTES


def sign(secret: bytes, ref: Ref) -> bytes:
    """Returns the MAC of a reference: over every other field, each delimited."""
    bare = encode(msgspec.structs.replace(ref, mac=b""))
    return hashlib.blake2b(bare, key=secret[:64], digest_size=16).digest()


def map_file(path: Path, writable: bool, populate: bool = True, locked: bool = False) -> mmap.mmap:
    """Maps a whole file, shared with every process that maps it.

    populate: whether a mapping to write in gets all its pages here: a page fault at each page's
        first write would take longer than the copy itself.
    locked: whether a shared lock is held on the file for as long as it is mapped. The mapping has a
        descriptor of its own, of the same open file, and the lock goes with the last of them.

    Raises OSError where the file cannot be opened, BlockingIOError where another process has locked
    it for itself.
    """
    mode = os.O_RDONLY
    flags = mmap.MAP_SHARED
    access = mmap.PROT_READ
    if writable:
        mode = os.O_RDWR
        flags |= getattr(mmap, "MAP_POPULATE", 0) if populate else 0
        access |= mmap.PROT_WRITE
    handle = os.open(path, mode)
    try:
        if locked:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return mmap.mmap(handle, 0, flags, access)
    finally:
        os.close(handle)


def allocate(path: Path, nbytes: int, kind: str, *, make: bool = False) -> None:
    """Allocates the pages of a file: one that is missing later would kill its writer.

    kind: what the file is, for the error.
    make: makes the file where none exists.

    Raises DataError where memory is lacking.
    """
    try:
        handle = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
        try:
            os.posix_fallocate(handle, 0, nbytes)
        finally:
            os.close(handle)
    except (OSError, OverflowError) as error:
        raise no_memory(path, nbytes, kind, error) from error


def no_memory(path: Path, nbytes: int, kind: str, error: Exception) -> DataError:
    """Returns what to raise where a file of the store cannot be made."""
    why = getattr(error, "strerror", None) or str(error)
    return DataError(
        f"no {kind} of {nbytes} bytes can be made",
        where=f"{path.parent} on {socket.gethostname()}",
        why=why,
        todo="free some of it, or let the store have more: launcher.config.store_gib, spill_dir",
    )


def copy_hashed(parts: Iterable[bytes | memoryview], target: memoryview) -> int:
    """Copies flat bytes, one part after the other, and returns the xxh3-64 of them all."""
    digest = xxhash.xxh3_64()
    offset = 0
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            piece = part[start : start + _PIECE_BYTES]
            target[offset : offset + len(piece)] = piece
            digest.update(piece)
            offset += len(piece)
    return int(digest.intdigest())


def is_over(released: Released, held: Mapping[int, int]) -> bool:
    """Returns whether every shard has released what it holds.

    released: shard -> (epoch, first step that the shard still needs).
    held: shard -> last step for which the shard holds something.
    """
    for shard, held_step in held.items():
        _, needed_step = released.get(shard, NOTHING_RELEASED)
        if needed_step <= held_step:
            return False
    return True


class MappedSlabs:
    """The slabs of a directory as uint8 arrays, mapped on first use.

    A mapping lives as long as a view of it, also after its slab's file is gone. A mapping
    of a writer's slab is kept for later uses. One of a copy is kept only while somebody has a view
    of it: so long it is locked, and the agent gives its memory to no other copy.

    Raises DataError for a slab that cannot be opened.
    """

    def __init__(self, directory: Path, *, writable: bool) -> None:
        self._directory = directory
        self._writable = writable
        self._in_memory = directory.resolve().is_relative_to(SHARED_MEMORY)
        self._mapped: dict[str, np.ndarray] = {}
        self._copies: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    def __getitem__(self, name: str) -> np.ndarray:
        if (copy := self._copies.get(name)) is not None:
            return copy
        if name not in self._mapped:
            self._forget_removed()
            path = self._directory / Path(name).name
            is_copy = path.name.startswith(COPY)
            is_locked = is_copy and not path.is_symlink()  # one on disk is never written again
            try:
                mapped = map_file(path, self._writable, locked=is_locked)
            except (OSError, ValueError) as error:  # ValueError: it is empty, or its name is none
                why = getattr(error, "strerror", None) or error
                raise DataError(f"it cannot be opened: {why}", where=f"slab {name}") from None
            array = np.frombuffer(mapped, np.uint8)
            if is_copy:
                self._copies[name] = array  # a slice of an array keeps that array alive
                return array
            self._mapped[name] = array
        return self._mapped[name]

    def has(self, name: str) -> bool:
        """Returns whether the slab is there."""
        return (self._directory / Path(name).name).exists()

    def in_memory(self, name: str) -> bool:
        """Returns whether the slab lies in memory: the store does, and this slab is no link to a
        disk.
        """
        return self._in_memory and not (self._directory / Path(name).name).is_symlink()

    def _forget_removed(self) -> None:
        self._mapped = {
            name: array for name, array in self._mapped.items() if (self._directory / name).exists()
        }


class StoreReader:
    """Opens references. Its views are read-only and valid until their step is over.

    node: this node's name.
    agent: this node's agent. Without it, references of other nodes cannot be followed.
    """

    @property
    def node(self) -> str:
        return self._node

    def __init__(
        self, directory: Path, node: str, secret: bytes, agent: Peer | None = None
    ) -> None:
        self._slabs = MappedSlabs(directory, writable=False)
        self._node = node
        self._secret = secret
        self._agent = agent

    async def records(self, items: Sequence[Header | TrainItem]) -> list[tuple[Columns, Columns]]:
        """Returns (columns, media) of each record.

        A reference that several records share is opened once. Content of another node is copied
        here first. Each array is cut out of its chunk once, however often it is looked at.
        """
        refs = dict.fromkeys(ref for item in items for ref in (item.columns, *item.media.values()))
        contents = await self.arrays(refs)
        opened = dict(zip(refs, contents, strict=True))
        return [
            (
                opened[item.columns][item.slot],
                {name: opened[ref] for name, ref in item.media.items()},
            )
            for item in items
        ]

    async def arrays(self, refs: Iterable[Ref | None]) -> list[Any]:
        """Returns each reference's blob or chunk, in order, of this or another node.

        Raises like ``open`` and ``open_array``.
        """
        return await asyncio.gather(*map(self._open_of_any_node, refs))

    async def _open_of_any_node(self, ref: Ref | None) -> Any:
        """Opens a reference; one of another node by this node's copy of what it names."""
        if ref is None:
            raise DataError("a record without columns cannot be opened", where="store")
        if ref.node == self._node or self._agent is None:
            return self._opened(ref)
        for _ in range(_COPY_TRIES):
            copy = await self._copied(self._agent, ref)
            try:
                return self._opened(copy)
            except DataError:
                # A copy that nobody holds may make room for another content before it is opened.
                if self._slabs.has(copy.slab):
                    raise
        return self._opened(await self._copied(self._agent, ref))

    def _opened(self, ref: Ref) -> Any:
        return self.open(ref) if ref.dtype == "columns" else self.open_array(ref)

    async def _copied(self, agent: Peer, ref: Ref) -> Ref:
        """Returns the reference of this node's copy; the agent is asked as ``insist`` does.

        Raises WorkerDied at once when it is the other node that is gone: for that one the agent has
        waited already.
        """

        async def ask(attempt: int) -> Ref | WorkerDied:
            try:
                return await agent.call(FETCH, ref)
            except WorkerDied as error:
                if error.facts.get("process") == ref.node:
                    return error
                raise

        copy = await PATIENT.run(ask, LOST)
        if isinstance(copy, WorkerDied):
            raise copy
        return copy

    def open(self, ref: Ref) -> Chunk:
        """Returns the records of the chunk.

        Raises DataError when the run did not sign this reference, or the content is not what the
        reference says.
        """
        return Chunk(self._verified(ref).data)

    def open_array(self, ref: Ref) -> np.ndarray:
        """Returns a blob, as an array of the reference's dtype and shape. Raises like ``open``."""
        content = self._verified(ref)
        is_sound = (
            NUMBERS.fullmatch(ref.dtype)
            and len(ref.shape) <= MOST_AXES
            and all(size >= 0 for size in ref.shape)
        )
        try:
            if is_sound and np.dtype(ref.dtype).itemsize * math.prod(ref.shape) == ref.nbytes:
                return content.view(ref.dtype).reshape(ref.shape)
        except (TypeError, ValueError, OverflowError):
            pass  # numpy has no such dtype, or no array so large
        layout = f"{ref.dtype[:20]} of shape {ref.shape[:8]}"
        raise DataError(f"{ref.nbytes} bytes are no {layout}", where=f"slab {ref.slab}")

    def content(self, ref: Ref) -> np.ndarray:
        """Returns uint8[nbytes] that the reference points at.

        Checks MAC and bounds, not the content.
        """
        return self._stamped(ref)[1]

    def _stamped(self, ref: Ref) -> tuple[np.ndarray, np.ndarray]:
        """Returns the stamp in front of the content, and the content, of one mapping."""
        self.check(ref)
        self.check_node(ref)
        memory = self._slabs[ref.slab]
        if ref.offset < 0 or ref.nbytes < 0 or ref.offset + ref.nbytes > len(memory):
            raise DataError("a reference points outside its slab", where=f"slab {ref.slab}")
        stamp = memory[max(0, ref.offset - STAMP_BYTES) : ref.offset]
        return stamp, memory[ref.offset : ref.offset + ref.nbytes]

    def check(self, ref: Ref) -> None:
        """Raises DataError unless the run signed this reference."""
        if not hmac.compare_digest(sign(self._secret, ref), ref.mac):
            raise DataError("a reference carries a wrong MAC", where=f"slab {ref.slab}")

    def check_node(self, ref: Ref) -> None:
        """Raises DataError unless the reference is of this node."""
        if ref.node != self._node:
            raise DataError(
                f"the reference is of node {ref.node!r}, this is {self._node!r}",
                where=f"slab {ref.slab}",
            )

    def _verified(self, ref: Ref) -> np.ndarray:
        stamp, content = self._stamped(ref)
        if self._slabs.in_memory(ref.slab):
            digest = int.from_bytes(stamp.tobytes(), "little")
        else:
            digest = xxhash.xxh3_64_intdigest(content.data)
        if digest != ref.digest:
            raise DataError("the content is not what the reference says", where=f"slab {ref.slab}")
        return content


@dataclass
class Room:
    """Space in a slab, to be filled in place and committed before its step is released.

    memory: where the content goes, uint8.
    """

    memory: memoryview
    _stamp: memoryview
    _bare: Ref  # without digest and MAC
    _secret: bytes

    def commit(self, digest: int | None = None) -> Ref:
        """Returns the reference of what was written.

        digest: xxh3-64 of the content, where the writer has it already; else it is computed.
        """
        if digest is None:
            digest = xxhash.xxh3_64_intdigest(self.memory)
        self._stamp[:] = digest.to_bytes(STAMP_BYTES, "little")
        ref = msgspec.structs.replace(self._bare, digest=digest)
        return msgspec.structs.replace(ref, mac=sign(self._secret, ref))


@dataclass
class _OpenSlab:
    """A slab that this process appends to, as the writer sees it.

    shards: for whose records it is.
    used: bytes from the start that are taken; the next content goes behind them.
    """

    memory: memoryview
    name: str
    shards: frozenset[int]
    used: int = 0


Kind = tuple[str, tuple[int, ...]]  # dtype and shape


class _BlobKey(NamedTuple):
    """What finds a stored blob that may equal a new array; a full comparison decides.

    step, shards: for which the blob is held.
    kind: its dtype and shape.
    sampled: up to 64 of its bytes, at equal distances.
    """

    step: int
    shards: frozenset[int]
    kind: Kind
    sampled: bytes


class StoreWriter:
    """Writes into slabs that it gets from its node's agent.

    node: this node's name.
    agent: this node's agent.
    owner: a name of this process alone; a restarted worker has another.
    """

    def __init__(self, directory: Path, node: str, secret: bytes, agent: Peer, owner: str) -> None:
        self._slabs = MappedSlabs(directory, writable=True)
        self._directory = directory
        self._node = node
        self._secret = secret
        self._agent = agent
        self._owner = owner
        self._open: dict[tuple[int, bool], _OpenSlab] = {}  # by step, and whether it is for blobs
        self._blobs: dict[_BlobKey, Ref] = {}
        self._released: Released = {}
        self._announcing = set[asyncio.Future[Nothing]]()  # held, or they could be collected

    @property
    def place(self) -> tuple[str, Peer]:
        """This node's name, and its agent."""
        return self._node, self._agent

    def reader(self) -> StoreReader:
        """Opens what any writer of the run stored."""
        return StoreReader(self._directory, self._node, self._secret, self._agent)

    async def put(self, step: int, shards: frozenset[int], records: Sequence[Columns]) -> Ref:
        """Stores the columns of records that belong to ``shards``; returns the chunk's
        reference.
        """
        parts = pack(records)
        room = await self.reserve(step, shards, sum(len(part) for part in parts))
        return room.commit(copy_hashed(parts, room.memory))

    async def put_blobs(
        self, step: int, shards: frozenset[int], arrays: Sequence[np.ndarray]
    ) -> list[Ref]:
        """Stores each array once: the same bytes, dtype and shape have one reference on this node.

        1. An array that this process has stored for this step and these shards is not stored again.
        2. All others are written at once, before anybody is asked: most are new to the node as
           well, and a call takes longer than a copy.
        3. One call for all of them asks the agent which ones the node has already: another process
           stored them, or this one for other shards, in another step or in a call that ran next to
           this one. Those get the reference that the node has, and the space just written is taken
           back.

        A candidate is found by up to 64 bytes in this process, by xxh3 on the node. A comparison of
        all bytes decides, so arrays made to collide are stored twice, and never confused.
        """
        refs: list[Ref] = []
        new_refs: dict[_BlobKey, Ref] = {}
        written: dict[Ref, np.ndarray] = {}  # in the order in which they were written
        for array in arrays:
            kind = array.dtype.str, array.shape
            if not NUMBERS.fullmatch(kind[0]):
                raise ContractError(
                    f"a blob has dtype {kind[0]}; it must be of numbers or bools", where="store"
                )
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            distance = flat.size // 64 + 1
            key = _BlobKey(step, shards, kind, flat[::distance].tobytes())
            ref = new_refs.get(key) or self._blobs.get(key)
            if ref is None or not self._content_equals(ref, flat):
                room = await self.reserve(step, shards, flat.nbytes, kind)
                ref = room.commit(copy_hashed([flat.data], room.memory))
                new_refs[key] = ref
                written[ref] = flat
            refs.append(ref)
        kept = await self._register(step, shards, written) if written else {}
        # Only now may others of this process find them: what was taken back has no reference.
        self._blobs |= {key: kept[ref] for key, ref in new_refs.items()}
        return [kept.get(ref, ref) for ref in refs]

    async def _register(
        self, step: int, shards: frozenset[int], written: dict[Ref, np.ndarray]
    ) -> dict[Ref, Ref]:
        """Tells the agent of blobs just written: reference of each -> the reference to use for it.

        That is the node's where the node has the same already, from whatever process, else its own.
        """
        request = BlobRequest(dict.fromkeys(shards, step), list(written))
        # Both are read before the call: nothing was awaited since the last blob was written, so
        # this is its slab, and the slab ends behind it. During the call others may append.
        slab = self._open[step, True]
        end = slab.used
        node_refs = await insist(self._agent, BLOB, request)
        kept: dict[Ref, Ref] = {}
        for (ref, flat), node_ref in zip(written.items(), node_refs, strict=True):
            is_same = node_ref == ref or self._content_equals(node_ref, flat)
            kept[ref] = node_ref if is_same else ref
        _take_back(slab, end, kept)
        return kept

    def _content_equals(self, ref: Ref, flat: np.ndarray) -> bool:
        stored = self._slabs[ref.slab][ref.offset : ref.offset + ref.nbytes]
        return np.array_equal(stored, flat)

    async def reserve(
        self, step: int, shards: frozenset[int], nbytes: int, kind: Kind = ("columns", ())
    ) -> Room:
        """Returns room for a chunk, or for a blob of ``kind``. Waits while the store is full.

        Other tasks of this process run only where a new slab is asked for. So what a task reserves
        in one slab, without awaiting anything else, lies side by side.
        """
        key = step, kind[0] != "columns"
        slab = self._open.get(key)
        if (
            slab is None
            or not slab.shards >= shards
            or slab.used + STAMP_BYTES + nbytes > len(slab.memory)
        ):
            slab = await self._new_slab(step, shards, STAMP_BYTES + nbytes)
            self._open[key] = slab
        stamp_at = slab.used
        start = stamp_at + STAMP_BYTES
        end = start + nbytes
        padding = -nbytes % 8
        slab.used = end + padding
        # First of all the stamp of what lay here before goes: no reference to that opens this.
        stamp = slab.memory[stamp_at:start]
        stamp[:] = bytes(byte ^ 0xFF for byte in stamp)
        bare = Ref(self._node, slab.name, start, nbytes, 0, b"", *kind)
        return Room(slab.memory[start:end], stamp, bare, self._secret)

    async def _new_slab(self, step: int, shards: frozenset[int], nbytes: int) -> _OpenSlab:
        request = SlabRequest(self._owner, nbytes, dict.fromkeys(shards, step))
        name = await insist(self._agent, SLAB, request)
        # A release that came during the call may have freed the slab in the agent: it may be
        # another writer's by now.
        if is_over(self._released, request.held):
            raise ContractError(f"its shards have released step {step}", where="store")
        return _OpenSlab(self._slabs[name].data, name, shards)

    async def close(self) -> None:
        """Nothing more is written. What exists stays for as long as shards hold it."""
        await insist(self._agent, RELEASE, ReleaseRequest(self._owner, {}))

    def release(self, released: Released) -> None:
        """Takes note that shards need no record of earlier steps, and tells the agent.

        released: shard -> (epoch, first step that it still needs). A later epoch of a shard
            replaces an earlier one, whatever its step.

        This process forgets its slabs of those steps before the agent hears of it: the agent frees
        a slab only when its writer has said that it will not write there any more.
        """
        newer = {
            shard: step
            for shard, step in released.items()
            if step > self._released.get(shard, NOTHING_RELEASED)
        }
        if not newer:
            return
        self._released = self._released | newer
        self._open = {
            (step, for_blobs): slab
            for (step, for_blobs), slab in self._open.items()
            if not is_over(self._released, dict.fromkeys(slab.shards, step))
        }
        self._blobs = {
            key: ref
            for key, ref in self._blobs.items()
            if not is_over(self._released, dict.fromkeys(key.shards, key.step))
        }
        request = ReleaseRequest(self._owner, newer)
        announcement = asyncio.ensure_future(insist(self._agent, RELEASE, request))
        self._announcing.add(announcement)
        announcement.add_done_callback(self._announcing.discard)


def _take_back(slab: _OpenSlab, end: int, kept: Mapping[Ref, Ref]) -> None:
    """Frees the space of blobs at the slab's end that the node had already.

    end: where the slab ended when the last of them was written.
    kept: reference of each blob, in the order of writing -> the reference to use for it.

    Of A B C D, where the node had A, C and D: D and C are freed. B is in use, so the space of A,
    in front of it, stays taken until the step is released. Where somebody else has appended since,
    nothing is freed. Nothing is awaited here, so nobody can append in between.
    """
    if slab.used != end:
        return
    for ref, kept_ref in reversed(list(kept.items())):
        if kept_ref == ref or ref.slab != slab.name:
            return
        slab.used = ref.offset - STAMP_BYTES


def push_memory(directory: Path, worker: str) -> Path:
    """Returns the file, in its node's store, from which a worker pushes weights."""
    return directory / f"{worker}-push"


def note_error(task: asyncio.Task[Any]) -> None:
    """Keeps asyncio from telling of an error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
