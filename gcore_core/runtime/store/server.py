"""The agent's side of the store: slabs, who holds them, how many bytes there may be, and what other
nodes have.

A slab is given to one writer. It is held by shards, each up to a step, whatever becomes of its
writer or of a shard's controller; when all have released it, it goes to the next writer who asks,
its pages still warm. When the budget is used up, writers wait; when nothing is freed for a while,
slabs are made on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from gcore_core.contract.errors import DataError, DeadlineExceeded, WorkerDied
from gcore_core.contract.launching import Peer
from gcore_core.contract.records import Ref
from gcore_core.runtime.messages import (
    BLOB,
    FETCH,
    READ,
    RELEASE,
    SLAB,
    BlobRequest,
    Nothing,
    ReadRequest,
    Released,
    ReleaseRequest,
    SlabRequest,
)
from gcore_core.runtime.rpc.retry import PATIENT
from gcore_core.runtime.rpc.service import Call, Service
from gcore_core.runtime.store.client import (
    NOTHING_RELEASED,
    STAMP_BYTES,
    Room,
    StoreReader,
    is_over,
    map_file,
)

SLAB_BYTES = (
    8 << 20
) + 4096  # so that arrays whose sizes are powers of two fill it, with their stamps
PART_BYTES = 1 << 20


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent of ``node`` (its own name) is told of its store.

    spill: where slabs are made when ``budget_bytes`` are used up and nothing was freed for
        ``patience_s``.
    """

    node: str
    directory: str
    spill: str
    budget_bytes: int = 1 << 30
    patience_s: float = 5.0


@dataclass
class _Slab:
    """owner: who was given it. held: shard -> last step for which it holds something here."""

    name: str
    nbytes: int
    owner: str
    held: dict[int, int]
    spilled: bool = False
    copy_of: bytes = b""  # MAC of what it copies from another node: a cache, never written again


class SlabService:
    """``peer`` finds the agents of other nodes."""

    def __init__(self, spec: StoreSpec, secret: bytes, peer: Callable[[str], Peer]) -> None:
        self._spec, self._secret, self._peer = spec, secret, peer
        self._directory, self._spill = Path(spec.directory), Path(spec.spill)
        self._unit = min(
            SLAB_BYTES, max(1, spec.budget_bytes >> 15) << 12
        )  # an eighth of the budget, in pages
        self._slabs: dict[str, _Slab] = {}
        self._free: list[_Slab] = []  # the oldest first
        self._count, self._used, self._told = 0, 0, 0
        self._released: dict[str, Released] = defaultdict(
            dict
        )  # as each owner heard; "" for all that anybody heard
        self._ended = set[str]()
        self._blobs: dict[tuple[int, str, tuple[int, ...]], Ref] = {}  # by digest, dtype, shape
        self._copies: dict[bytes, asyncio.Task[Ref]] = {}
        self._reader = StoreReader(self._directory, spec.node, secret)
        self._freed, self._full_since_s = asyncio.Event(), float("inf")
        self._notes: list[str] = []
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def register(self, service: Service) -> None:
        self._progress = service.progress
        service.add(SLAB, self.slab)
        service.add(RELEASE, self.release)
        service.add(BLOB, self.blob)
        service.add(FETCH, self.fetch)
        service.add(READ, self.read)

    def close(self) -> None:
        for directory in (self._directory, self._spill):
            shutil.rmtree(directory, ignore_errors=True)

    # -- slabs -------------------------------------------------------------------------------------

    async def slab(self, request: SlabRequest, call: Call) -> str:
        """Asked again, another slab: the first is given back with those of its step."""
        slab = await self._memory(
            -(-max(1, request.nbytes) // self._unit) * self._unit, request.owner
        )
        slab.held = request.held
        return slab.name

    async def _memory(self, nbytes: int, owner: str = "", copy_of: bytes = b"") -> _Slab:
        """A slab of at least ``nbytes``: one that is free, else a new one, else one that was waited
        for, else disk.
        """
        clock = asyncio.get_running_loop().time
        while (slab := self._at_once(nbytes, owner, bool(copy_of))) is None:
            patience_s = self._spec.patience_s
            self._notes = self._notes or [
                f"the store is full ({self._spec.budget_bytes / 2**20:.6g} MiB, "
                "launcher.config.store_gib): "
                f"generators wait, and after {patience_s:g} s they write to {self._spill}"
            ]
            self._full_since_s = min(self._full_since_s, clock())
            if (left_s := self._full_since_s + patience_s - clock()) <= 0:
                slab = self._make(nbytes, spilled=True)
                break
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 1.0)):
                    await self._freed.wait()
            self._progress()
        slab.owner, slab.copy_of = owner, copy_of
        self._slabs[slab.name] = slab
        return slab

    def _at_once(self, nbytes: int, owner: str, copy: bool) -> _Slab | None:
        fitting = [
            slab for slab in self._free if slab.nbytes >= nbytes and not (copy or slab.copy_of)
        ]
        # of equal ones its own, which it has mapped already
        if slab := min(fitting, key=lambda slab: (slab.nbytes, slab.owner != owner), default=None):
            self._free.remove(slab)
            return slab
        if (
            self._used + nbytes - sum(slab.nbytes for slab in self._free if not slab.spilled)
            > self._spec.budget_bytes
        ):
            return None
        while self._used + nbytes > self._spec.budget_bytes:
            self._remove(self._free.pop(0))
        with contextlib.suppress(DataError):  # less memory is left than the budget says
            return self._make(nbytes, spilled=False)
        return None

    def _make(self, nbytes: int, *, spilled: bool) -> _Slab:
        self._count += 1
        name = str(self._count)
        path = self._directory / name
        if spilled:
            self._spill.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._spill.resolve() / name
            (self._directory / name).symlink_to(path)
        try:
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                os.posix_fallocate(
                    file.fileno(), 0, nbytes
                )  # now: a page that is missing later would kill its writer
        except (OSError, OverflowError) as error:
            for left in {path, self._directory / name}:
                left.unlink(missing_ok=True)
            why = getattr(error, "strerror", None) or str(error)
            raise DataError(
                f"no slab of {nbytes} bytes can be made", where=str(path.parent), why=why
            ) from error
        self._used += 0 if spilled else nbytes
        return _Slab(name, nbytes, "", {}, spilled)

    def _remove(self, slab: _Slab) -> None:
        """Who has it mapped keeps what it sees."""
        self._copies.pop(slab.copy_of, None)
        path = self._directory / slab.name
        path.resolve().unlink()
        path.unlink(missing_ok=True)  # the link to a spilled one
        self._used -= 0 if slab.spilled else slab.nbytes

    def notes(self) -> list[str]:
        """What the person who runs it should read, each once."""
        fresh, self._told = self._notes[self._told :], len(self._notes)
        return fresh

    # -- leases ------------------------------------------------------------------------------------

    async def release(self, request: ReleaseRequest, call: Call) -> Nothing:
        if not request.released:
            self.ended(request.owner)
        for owner in (request.owner, ""):
            known = self._released[owner]
            for shard, told in request.released.items():
                known[shard] = max(known.get(shard, NOTHING_RELEASED), told)
        self._sweep()
        return Nothing()

    def ended(self, owner: str) -> None:
        """A writer is gone. What it wrote stays for as long as shards hold it."""
        self._ended.add(owner)
        self._sweep()

    def _sweep(self) -> None:
        """A slab is free when its writer, which may be in the middle of it, knows too that all have
        released it.
        """
        for slab in list(self._slabs.values()):
            owner = "" if slab.owner in self._ended else slab.owner
            if not slab.copy_of and is_over(self._released[owner], slab.held):
                self._give_back(slab)

    def _give_back(self, slab: _Slab) -> None:
        del self._slabs[slab.name]
        self._blobs = {key: ref for key, ref in self._blobs.items() if ref.slab != slab.name}
        if slab.spilled and not slab.copy_of:
            self._remove(slab)
            return
        self._free.append(slab)
        self._full_since_s = float("inf")
        self._freed.set()

    async def blob(self, request: BlobRequest, call: Call) -> list[Ref]:
        """Of each the reference that this node has: its own, unless there was one."""
        return [self._blob(ref, request.held) for ref in request.refs]

    def _blob(self, ref: Ref, asked: dict[int, int]) -> Ref:
        key = ref.digest, ref.dtype, ref.shape
        found = self._blobs.get(key, ref)
        if found.slab in self._slabs:
            self._blobs[key] = found
            held = self._slabs[found.slab].held
            held |= {shard: max(step, held.get(shard, 0)) for shard, step in asked.items()}
        return found

    # -- other nodes -------------------------------------------------------------------------------

    async def read(self, request: ReadRequest, call: Call) -> AsyncGenerator[bytes, None]:
        """The bytes from an offset on, for another node's agent, which hashes them."""
        content = self._reader.content(request.ref)
        if not 0 <= request.offset <= len(content):
            raise DataError("a read begins outside its reference", where=f"slab {request.ref.slab}")
        for start in range(request.offset, len(content), PART_BYTES):
            yield content[start : start + PART_BYTES].tobytes()

    async def fetch(self, ref: Ref, call: Call) -> Ref:
        """Pulls a copy, once however many ask. It goes, the oldest first, when room is needed."""
        self._reader.check(ref)
        pull = self._copies.get(ref.mac)
        if pull is None or (pull.done() and pull.exception() is not None):
            pull = self._copies[ref.mac] = asyncio.ensure_future(self._pull(ref))
        return await asyncio.shield(pull)

    async def _pull(self, ref: Ref) -> Ref:
        slab = await self._memory(-(-(STAMP_BYTES + ref.nbytes) // 4096) * 4096, copy_of=ref.mac)
        try:
            mapped = memoryview(map_file(self._directory / slab.name, writable=True))
            bare = msgspec.structs.replace(
                ref, node=self._spec.node, slab=slab.name, offset=STAMP_BYTES
            )
            room = Room(
                mapped[STAMP_BYTES:][: ref.nbytes], mapped[:STAMP_BYTES], bare, self._secret
            )
            await self._receive(ref, room.memory)
            if xxhash.xxh3_64_intdigest(room.memory) != ref.digest:
                raise DataError(
                    "what came from another node is not what the reference says",
                    where=f"node {ref.node}",
                )
        except BaseException:
            del self._slabs[slab.name]
            self._remove(slab)
            raise
        self._give_back(slab)
        return room.commit(ref.digest)

    async def _receive(self, ref: Ref, memory: memoryview) -> None:
        """Fills ``memory``; goes on from where it was when a connection breaks."""
        have, failures = 0, 0
        while have < ref.nbytes:
            if failures == PATIENT.tries:
                raise WorkerDied(
                    f"it sent {have} of {ref.nbytes} bytes and no more", where=ref.node
                )
            await asyncio.sleep(PATIENT.pause_s(failures) if failures else 0)
            failures += 1
            stream = self._peer(ref.node).stream(READ, ReadRequest(ref, have))
            with contextlib.suppress(WorkerDied, DeadlineExceeded):
                async with contextlib.aclosing(stream) as parts:
                    async for part in parts:
                        memory[have : have + len(part)] = part
                        have, failures = have + len(part), 0
                        self._progress()
