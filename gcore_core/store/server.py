"""The agent's side of the store: which slabs a node has, who holds them, and what other nodes have.

A slab is a file in shared memory. It is always in one of two places:

    taken   ``_slabs``: one process, its owner, writes into it. Shards hold it, each up to a step.
    free    ``_free``: nobody holds it; its pages are still warm for the next writer.

From taken to free. A writer announces to its agent, shard by shard, the first step of which the
shard still needs records (generators hear it with each push of weights). A slab is given back when
two things are true: every shard that holds it has released the step up to which it does, and the
slab's owner has announced so itself: until then it may be in the middle of writing there. If the
owner has ended, or the slab is a copy and has no owner, what any process announced counts. So
records outlive both their writer and their shard's controller.

An example, with shards 0 and 1 and two generators, g0 and g1:

    g0 asks for a slab                         slab 7 is made: owner g0, held {0: 3, 1: 3}
    g0 stores an image for step 3              it lies in 7
    g1 stores the same image for step 4        g1 gets g0's reference; now held is {0: 4, 1: 4}
    g1 announces: shards 0 and 1 need step 5   nothing: 7's owner may still write there
    g0 announces: shards 0 and 1 need step 4   nothing: both still hold 7 for step 4
    g0 announces: shards 0 and 1 need step 5   7 is given back, and free
    g0 asks for a slab for step 5              7 is taken again; g0 has it mapped already

When the budget is used up, a writer waits until a slab is given back. When none was for
``patience_s``, slabs are made on disk; such a slab is removed when it is given back. Copies of
other nodes' content lie among the free slabs as a cache. How they come from there is the matter of
a ``RemoteStore``.

When room is needed, free slabs are removed in the order in which they were given back, copies among
them. Where the room is for a copy, it gets the memory of the first of these copies that nobody
views: who has a view, holds a lock on its file. Its pages are warm then; to remove them and
to get new ones from the kernel would take longer than to receive what comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from gcore_core.contract.errors import ContractError, DataError
from gcore_core.contract.records import Ref
from gcore_core.contract.remote_store import MirrorRequest, NodeStore, RemoteStore
from gcore_core.runtime.messages import (
    BLOB,
    FETCH,
    MIRROR,
    RELEASE,
    SLAB,
    BlobRequest,
    Nothing,
    Released,
    ReleaseRequest,
    SlabRequest,
)
from gcore_core.store.client import (
    COPY,
    NOTHING_RELEASED,
    STAMP_BYTES,
    Room,
    StoreReader,
    allocate,
    is_over,
    map_file,
    no_memory,
    note_error,
)
from gcore_core.wire.gathering import shared
from gcore_core.wire.service import Call, Service

# 8 MiB of arrays whose sizes are powers of two, and a page for their stamps.
SLAB_BYTES = (8 << 20) + 4096
# A copy stays mapped here only when it is so large that no more than this many like it fit into the
# store: each mapping takes a descriptor.
_MOST_MAPPED = 128


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one node's store.

    node: the name of the node's agent.
    directory: where slabs are made.
    spill: where slabs are made when the budget is used up and none was given back for
        ``patience_s``.
    budget_bytes: for all slabs in ``directory``; those in ``spill`` do not count.
    patience_s: see ``spill``.
    """

    node: str
    directory: str
    spill: str
    budget_bytes: int = 1 << 30
    patience_s: float = 5.0


@dataclass
class _SlabFile:
    """A slab of this node, taken or free, as the agent sees it.

    owner: the process that writes into it, or was the last to.
    held: shard -> last step for which it holds something here.
    spilled: whether it lies on disk.
    copy_of: MAC of the other node's reference whose content it copies; empty for a writer's slab.
    mapped: the whole file of a large copy, which stays mapped for the next copy that takes its
        memory; None where it is not.
    """

    name: str
    nbytes: int
    owner: str = ""
    held: dict[int, int] = field(default_factory=dict)
    spilled: bool = False
    copy_of: bytes = b""
    mapped: memoryview | None = None


class OneNode:
    """Is the ``RemoteStore`` of one node: others have nothing."""

    def open(self) -> None:
        pass

    async def fetch(
        self,
        ref: Ref,
        memory: memoryview,
        progress: Callable[[], None],
        *,
        is_unmapped: bool,
    ) -> None:
        raise _unknown(ref.node)

    async def mirror(self, bucket: MirrorRequest, progress: Callable[[], None]) -> str:
        raise _unknown(bucket.node)

    def close(self) -> None:
        pass


def _unknown(node: str) -> ContractError:
    return ContractError("no address is known for its content", where=f"node {node}")


def one_node(store: NodeStore) -> RemoteStore:
    """Joins a node's store with no other."""
    return OneNode()


class SlabService:
    """The slabs of one node, served to its workers.

    node, directory: see ``NodeStore``, which this is.
    remote: what other nodes have.
    """

    def __init__(
        self,
        spec: StoreSpec,
        secret: bytes,
        join: Callable[[NodeStore], RemoteStore] = one_node,
    ) -> None:
        """join: joins this store with other nodes' stores."""
        self._spec = spec
        self._secret = secret
        self.node = spec.node
        self.directory = Path(spec.directory)
        self._spill = Path(spec.spill)
        # A slab's size is a multiple of this: ``SLAB_BYTES``, or an eighth of a small budget.
        eighth_in_pages = max(1, spec.budget_bytes >> 15)  # an eighth is >> 3, a page is >> 12
        self._unit_bytes = min(SLAB_BYTES, eighth_in_pages << 12)
        self._made = 0  # names are never given again
        self._copies: dict[bytes, asyncio.Task[Ref]] = {}  # by MAC of the other node's reference
        self._given_back = asyncio.Event()
        self._notes: list[str] = []
        self._notes_read = 0
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.remote = join(self)
        self._slabs: dict[str, _SlabFile] = {}  # taken, by name
        self._free: list[_SlabFile] = []  # the one that was given back first comes first
        self._used_bytes = 0  # in memory, taken and free
        # owner -> what it announced; "" -> the newest that anybody announced
        self._released: dict[str, Released] = defaultdict(dict)
        self._ended = set[str]()  # owners
        self._blobs: dict[tuple[int, str, tuple[int, ...]], Ref] = {}  # by digest, dtype, shape
        self._reader = StoreReader(self.directory, self._spec.node, self._secret)
        self._full_since_s = float("inf")

    def register(self, service: Service) -> None:
        self._progress = service.progress
        service.add(SLAB, self.slab)
        service.add(RELEASE, self.release)
        service.add(BLOB, self.blob)
        service.add(FETCH, self.fetch)
        service.add(MIRROR, self.mirror)

    def close(self) -> None:
        self.remote.close()
        for directory in (self.directory, self._spill):
            shutil.rmtree(directory, ignore_errors=True)

    # -- taking a slab -----------------------------------------------------------------------------

    async def slab(self, request: SlabRequest, call: Call) -> str:
        """Returns the name of a slab for its owner to write into.

        Not idempotent: a repeated request gets another slab. The first, which nobody writes, is
        given back with its step.
        """
        units = -(-max(1, request.nbytes) // self._unit_bytes)
        slab = await self._take(units * self._unit_bytes, request.owner)
        slab.held = request.held
        return slab.name

    async def _take(self, nbytes: int, owner: str = "", copy_of: bytes = b"") -> _SlabFile:
        """Returns a slab of at least ``nbytes``, taken.

        One for a copy has no pages yet, see ``_take_for_copy``. In this order: a free one, a new
        one within the budget, one that is waited for, a new one on disk.
        """
        clock = asyncio.get_running_loop().time
        patience_s = self._spec.patience_s
        while True:
            slab = self._take_at_once(nbytes, owner, bool(copy_of))
            if slab is not None:
                break
            self._note_full()
            # One clock for all who wait: it begins with the first, and ends with a slab given back.
            self._full_since_s = min(self._full_since_s, clock())
            left_s = self._full_since_s + patience_s - clock()
            if left_s <= 0:
                slab = self._make(nbytes, spilled=True, allocated=not copy_of)
                break
            self._given_back.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 1.0)):
                    await self._given_back.wait()
            self._progress()
        slab.owner = owner
        slab.copy_of = copy_of
        self._slabs[slab.name] = slab
        return slab

    def _note_full(self) -> None:
        if not self._notes:
            self._notes = [
                f"the store is full ({self._spec.budget_bytes / 2**20:.6g} MiB, "
                "launcher.config.store_gib): generators wait, "
                f"and after {self._spec.patience_s:g} s they write to {self._spill}"
            ]

    def _take_at_once(self, nbytes: int, owner: str, is_copy: bool) -> _SlabFile | None:
        """Returns a free slab, or a new one within the budget; None without either."""
        slab = None if is_copy else self._smallest_free(nbytes, owner)
        if slab is not None:
            self._free.remove(slab)
            return slab
        budget_bytes = self._spec.budget_bytes
        evictable_bytes = sum(slab.nbytes for slab in self._free if not slab.spilled)
        if self._used_bytes - evictable_bytes + nbytes > budget_bytes:
            return None  # no room even without all free slabs
        # Free slabs go until the room suffices. The first copy that can move on is kept for its
        # memory.
        reused: _SlabFile | None = None
        reused_bytes = 0
        while self._used_bytes - reused_bytes + nbytes > budget_bytes:
            oldest = self._free.pop(0)
            if is_copy and reused is None and self._move_on(oldest):
                reused = oldest
                reused_bytes = oldest.nbytes
            else:
                self._remove(oldest)
        if reused is not None:
            return self._resized(reused, nbytes)
        with contextlib.suppress(DataError):  # less memory is left than the budget says
            return self._make(nbytes, spilled=False, allocated=not is_copy)
        return None

    def _move_on(self, slab: _SlabFile) -> bool:
        """Takes its content and its name from a free copy; False where somebody may still read it.

        In this order, so that no reference to the old content opens what comes next: the old name
        goes; then nobody may have a view; then the stamp is overwritten. Who has opened the file
        and not locked it before all that finds another stamp.
        """
        if not slab.copy_of or slab.spilled:
            return False
        self._copies.pop(slab.copy_of, None)
        old_path = self.directory / slab.name
        slab.name = self._new_name(is_copy=True)
        path = self.directory / slab.name
        old_path.rename(path)
        handle = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stamp = os.pread(handle, STAMP_BYTES, 0)
            os.pwrite(handle, bytes(byte ^ 0xFF for byte in stamp), 0)
        except OSError:  # somebody reads it, or this file system has no locks
            return False
        finally:
            os.close(handle)
        slab.copy_of = b""
        return True

    def _resized(self, slab: _SlabFile, nbytes: int) -> _SlabFile:
        """Gives another size to a slab that nobody else has mapped.

        A longer one gets the further pages later, see ``_take_for_copy``.
        """
        if slab.nbytes != nbytes:
            slab.mapped = None
        if slab.nbytes > nbytes:
            os.truncate(self.directory / slab.name, nbytes)
        self._used_bytes += nbytes - slab.nbytes
        slab.nbytes = nbytes
        return slab

    def _new_name(self, *, is_copy: bool) -> str:
        self._made += 1
        return f"{COPY if is_copy else ''}{self._made}"

    def _smallest_free(self, nbytes: int, owner: str) -> _SlabFile | None:
        """Returns the smallest free slab that is large enough and no copy.

        Among equal ones the owner's last: it has mapped that one already.
        """
        fitting = [slab for slab in self._free if slab.nbytes >= nbytes and not slab.copy_of]
        return min(fitting, key=lambda slab: (slab.nbytes, slab.owner != owner), default=None)

    def _make(self, nbytes: int, *, spilled: bool, allocated: bool) -> _SlabFile:
        """Makes a slab.

        spilled: on disk, with a link to it where the others are.
        allocated: with its pages; a copy's come later, see ``_take_for_copy``.

        Raises DataError where memory or disk is lacking.
        """
        name = self._new_name(is_copy=not allocated)
        path = self.directory / name
        if spilled:
            self._spill.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._spill.resolve() / name
            (self.directory / name).symlink_to(path)
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            if allocated:
                allocate(path, nbytes, "slab")
        except (OSError, DataError) as error:
            for leftover in {path, self.directory / name}:
                leftover.unlink(missing_ok=True)
            if isinstance(error, DataError):
                raise
            raise no_memory(path, nbytes, "slab", error) from error
        if not spilled:
            self._used_bytes += nbytes
        return _SlabFile(name, nbytes, spilled=spilled)

    def _remove(self, slab: _SlabFile) -> None:
        """Removes its file. Who has it mapped keeps what it sees."""
        self._copies.pop(slab.copy_of, None)
        path = self.directory / slab.name
        path.resolve().unlink()
        path.unlink(missing_ok=True)  # the link to a spilled one
        if not slab.spilled:
            self._used_bytes -= slab.nbytes

    def notes(self) -> list[str]:
        """Returns what the person who runs it should read, each once."""
        unread = self._notes[self._notes_read :]
        self._notes_read = len(self._notes)
        return unread

    # -- holding a slab, and giving it back --------------------------------------------------------

    async def release(self, request: ReleaseRequest, call: Call) -> Nothing:
        """Takes an owner's announcement; an empty one says that the owner has ended."""
        if not request.released:
            self.ended(request.owner)
        for owner in (request.owner, ""):
            announced = self._released[owner]
            for shard, released in request.released.items():
                announced[shard] = max(announced.get(shard, NOTHING_RELEASED), released)
        self._sweep()
        return Nothing()

    def ended(self, owner: str) -> None:
        """An owner is gone. What it wrote stays for as long as shards hold it."""
        self._ended.add(owner)
        self._sweep()

    def _sweep(self) -> None:
        """Gives back every slab that is released, see the head of this file."""
        for slab in list(self._slabs.values()):
            announcer = "" if slab.owner in self._ended else slab.owner
            is_coming = bool(slab.copy_of)  # a copy that is still being pulled
            if not is_coming and is_over(self._released[announcer], slab.held):
                self._give_back(slab)

    def _give_back(self, slab: _SlabFile) -> None:
        """Moves a slab from taken to free. One on disk is removed instead, unless it is a copy."""
        del self._slabs[slab.name]
        self._blobs = {key: ref for key, ref in self._blobs.items() if ref.slab != slab.name}
        if slab.spilled and not slab.copy_of:
            self._remove(slab)
            return
        slab.held = {}
        self._free.append(slab)
        self._full_since_s = float("inf")
        self._given_back.set()

    async def blob(self, request: BlobRequest, call: Call) -> list[Ref]:
        """Returns for each blob the reference that this node uses: an earlier one, or its own."""
        return [self._hold_blob(ref, request.held) for ref in request.refs]

    def _hold_blob(self, ref: Ref, wanted: dict[int, int]) -> Ref:
        """Returns the reference to use for ``ref``; its slab is held for ``wanted`` (shard -> step)
        too.
        """
        key = ref.digest, ref.dtype, ref.shape
        node_ref = self._blobs.get(key, ref)
        if node_ref.slab in self._slabs:
            self._blobs[key] = node_ref
            held = self._slabs[node_ref.slab].held
            for shard, step in wanted.items():
                held[shard] = max(step, held.get(shard, 0))
        return node_ref

    # -- other nodes -------------------------------------------------------------------------------

    def file_of(self, ref: Ref) -> Path:
        """See ``NodeStore``."""
        self._reader.check(ref)
        self._reader.check_node(ref)
        return self.directory / Path(ref.slab).name

    async def mirror(self, request: MirrorRequest, call: Call) -> str:
        """Brings a bucket of a push from another node; returns the path of the memory with it."""
        return await self.remote.mirror(request, self._progress)

    async def fetch(self, ref: Ref, call: Call) -> Ref:
        """Returns the reference of this node's copy of what another node has.

        It is pulled once, however many ask. When room is needed, copies go, see the head of this
        file.
        """
        self._reader.check(ref)
        pull = self._copies.get(ref.mac)
        if pull is None or (pull.done() and pull.exception() is not None):
            pull = asyncio.ensure_future(self._pull(ref))
            pull.add_done_callback(note_error)
            self._copies[ref.mac] = pull
        return await shared(pull)

    async def _pull(self, ref: Ref) -> Ref:
        """Pulls a content into a slab; returns the reference of this copy.

        The copy is free when it has come: it may make room at any time.
        """
        slab = await self._take_for_copy(ref)
        try:
            is_unmapped = slab.mapped is None
            mapped = slab.mapped or self._mapped_copy(slab)
            bare = msgspec.structs.replace(
                ref, node=self._spec.node, slab=slab.name, offset=STAMP_BYTES
            )
            memory = mapped[STAMP_BYTES : STAMP_BYTES + ref.nbytes]
            room = Room(memory, mapped[:STAMP_BYTES], bare, self._secret)
            await self.remote.fetch(ref, memory, self._progress, is_unmapped=is_unmapped)
            digest = await asyncio.to_thread(xxhash.xxh3_64_intdigest, memory)
            if digest != ref.digest:
                raise DataError(
                    "what came from another node is not what the reference says",
                    where=f"node {ref.node}",
                )
        except BaseException:
            self._drop(slab)
            raise
        self._give_back(slab)
        return room.commit(ref.digest)

    def _mapped_copy(self, slab: _SlabFile) -> memoryview:
        """Maps the file of a copy. The threads that write there map its pages, side by side."""
        path = self.directory / slab.name
        mapped = memoryview(map_file(path, writable=True, populate=False))
        if not slab.spilled and slab.nbytes * _MOST_MAPPED >= self._spec.budget_bytes:
            slab.mapped = mapped
        return mapped

    async def _take_for_copy(self, ref: Ref) -> _SlabFile:
        """Returns a slab for a copy, on disk where memory is less than the budget says.

        Copies may be large, so their pages are allocated in a thread.
        """
        pages = -(-(STAMP_BYTES + ref.nbytes) // 4096)
        slab = await self._take(pages * 4096, copy_of=ref.mac)
        while True:
            try:
                await asyncio.to_thread(self._allocate_missing, slab)
                return slab
            except DataError:
                slab.copy_of = b""  # the copy itself is still to come
                self._drop(slab)
                if slab.spilled:
                    raise
            except BaseException:
                self._drop(slab)
                raise
            slab = self._make(slab.nbytes, spilled=True, allocated=False)
            slab.copy_of = ref.mac
            self._slabs[slab.name] = slab

    def _allocate_missing(self, slab: _SlabFile) -> None:
        path = self.directory / slab.name
        if path.stat().st_blocks * 512 < slab.nbytes:  # Linux counts blocks of 512 bytes
            allocate(path, slab.nbytes, "slab")

    def _drop(self, slab: _SlabFile) -> None:
        """Removes a slab that was taken for a copy which did not come."""
        del self._slabs[slab.name]
        self._remove(slab)
