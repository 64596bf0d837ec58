"""Keeps mirrors of memories from which other nodes' workers push weights.

A mirror is a file in this node's store with the bytes of a push memory of another node, at the same
offsets. A receiver of a push whose bucket lies on another node asks its own agent for the bucket.
The agent pulls it once, however many receivers the node has, and from then on it is shared memory
as on the sender's node. Why a region may be overwritten is told
where the core pushes (docs/decisions/data-plane.md).

A bucket comes from the sender's node, or from the mirror of another node, its *parent*. A parent
passes on every piece as soon as it has it. So the last node of a row has a bucket a little later
than the first, and not as many times later as there are nodes before it.

A parent that fails is left: the bucket then comes from that one's own parent, or at last from the
sender's node, from its first byte on, and for a while nothing is asked of one that is silent.
Those who read here meanwhile do not notice, since the bytes are the same; they wait a little longer
for their parent than it does for its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import (
    ContractError,
    DataError,
    GcoreError,
    WeightMismatch,
    WorkerDied,
)
from gcore_core.contract.remote_store import MirrorRequest
from gcore_core.kits.wire import allocate, map_file
from gcore_nodes.bulk import (
    PART_BYTES,
    BulkClient,
    MirroredContent,
    PushedContent,
    Region,
)

log = logging.getLogger(__name__)

_REMEMBERED = 16  # pushes that another one took the place of
#: A node leaves its parent when nothing has come from it for so long, times the number of its
#: parents: else all below a lost node would leave at once. There is another source, so it is short.
PARENT_PATIENCE_S = 10.0
_WAIT_S = 180.0  # the longest that a thread waits for bytes which another node wants
_AVOIDED_S = 600.0  # for so long nothing is asked of a parent that has failed


class Mirrors:
    """All mirrors of one node.

    directory: where the files are made.
    client: brings what they hold.
    """

    def __init__(self, directory: Path, client: BulkClient) -> None:
        self._directory = directory
        self._client = client
        self._mirrors: dict[tuple[str, str], _Mirror] = {}  # by the memory's node and worker
        self._coming = _Register()

    async def bring(self, request: MirrorRequest, progress: Callable[[], None]) -> str:
        """Returns the path of the mirror that has the bucket now.

        Raises ContractError when it cannot be brought, and WeightMismatch when it was altered on
        its way. The push has to begin anew then.
        """
        self._client.check(request.node)
        if min(request.offset, request.nbytes) < 0:
            raise ContractError("a bucket lies outside its memory", where="push")
        key = request.node, request.worker
        if key not in self._mirrors:
            path = self._directory / f"mirror-{len(self._mirrors)}"
            self._mirrors[key] = _Mirror(path, self._client, self._coming)
        return await self._mirrors[key].bring(request, progress)

    def find(self, what: MirroredContent) -> Region:
        """Says where a bucket lies that another node asks for; called in any thread.

        It need not have come. Raises ContractError when it does not begin to come in time.
        """
        coming = self._coming.get(what)
        return Region(coming.path, what.offset, what.nbytes, coming.wait)

    def clear(self) -> None:
        """Forgets all mirrors; their files are the caller's to remove."""
        for mirror in self._mirrors.values():
            mirror.clear()
        self._mirrors.clear()
        self._coming.end_waits()


class _Coming:
    """A bucket that comes into the mirror at ``path``.

    Threads that pass it on wait for its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._changed = threading.Condition()
        self._has_failed = False
        self._ends: dict[int, int] = {}  # number of a part -> up to where in the bucket it is here

    def came(self, start: int, end: int) -> None:
        """Some bytes are here, and all before them of the same part, see ``BulkClient.read``."""
        with self._changed:
            part = start // PART_BYTES
            self._ends[part] = max(end, self._ends.get(part, 0))
            self._changed.notify_all()

    def fail(self) -> None:
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def wait(self, start: int, end: int) -> None:
        """Returns when the bytes from ``start`` to before ``end`` are here.

        Raises ContractError when they will not come, or not in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_failed or self._is_here(start, end), _WAIT_S)
            if not self._is_here(start, end):
                raise ContractError("the bucket does not come here either", where="push")

    def _is_here(self, start: int, end: int) -> bool:
        return all(
            self._ends.get(part, 0) >= min(end, (part + 1) * PART_BYTES)
            for part in range(start // PART_BYTES, -(-end // PART_BYTES))
        )


class _Register:
    """The buckets of all mirrors of a node that come, or have come. Threads look here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._coming: dict[MirroredContent, _Coming] = {}
        self._n_ended = 0  # how often all waits were ended

    def add(self, what: MirroredContent, coming: _Coming) -> None:
        with self._changed:
            self._coming[what] = coming
            self._changed.notify_all()

    def get(self, what: MirroredContent) -> _Coming:
        """Returns a bucket when it begins to come; raises ContractError when it does not soon."""
        with self._changed:
            n_ended = self._n_ended
            self._changed.wait_for(lambda: what in self._coming or self._n_ended > n_ended, _WAIT_S)
            if what not in self._coming:
                raise ContractError("nobody here has asked for this bucket", where="push")
            return self._coming[what]

    def drop(self, node: str, worker: str) -> None:
        """Forgets the buckets of one memory."""
        with self._changed:
            for what in list(self._coming):
                if (what.node, what.worker) == (node, worker):
                    self._coming.pop(what).fail()

    def end_waits(self) -> None:
        """Who waits for a bucket that has not begun to come, waits no more."""
        with self._changed:
            self._n_ended += 1
            self._changed.notify_all()


class _Mirror:
    """The mirror of one memory. It holds buckets of one push at a time.

    client: reads from other nodes.
    coming: gets every bucket that begins to come.
    """

    def __init__(self, path: Path, client: BulkClient, coming: _Register) -> None:
        self._path = path
        self._client = client
        self._coming = coming
        self._memory = memoryview(b"")
        self._push: tuple[int, int] | None = None  # version and attempt
        self._buckets: dict[int, asyncio.Task[None]] = {}  # of this push, by index
        self._superseded = deque[tuple[int, int]](maxlen=_REMEMBERED)
        self._ending: list[asyncio.Task[None]] = []  # of an earlier push, that may still write
        self._of = ("", "")  # node and worker whose memory it is
        self._avoided: dict[str, float] = {}  # parent that has failed -> until when, monotonic

    async def bring(self, request: MirrorRequest, progress: Callable[[], None]) -> str:
        """Returns the mirror's path when it has the bucket; it is pulled once for all who ask."""
        push = request.version, request.attempt
        self._of = request.node, request.worker
        if push != self._push:
            self._begin(push)
        pull = self._buckets.get(request.index)
        if pull is None or (pull.done() and (pull.cancelled() or pull.exception() is not None)):
            pull = asyncio.ensure_future(self._pull(request, progress))
            pull.add_done_callback(_note_error)
            self._buckets[request.index] = pull
        try:
            await asyncio.shield(pull)  # it goes on when one of those who ask goes away
        except asyncio.CancelledError:
            if pull.cancelled():
                raise _superseded() from None
            raise
        return str(self._path)

    def _begin(self, push: tuple[int, int]) -> None:
        """Makes room for the buckets of another push. Raises ContractError for one of before."""
        if push in self._superseded:
            raise _superseded()
        if self._push is not None:
            self._superseded.append(self._push)
        self._ending = [
            pull for pull in [*self._ending, *self._buckets.values()] if not pull.done()
        ]
        self.clear()
        self._push = push

    def clear(self) -> None:
        for pull in self._buckets.values():
            pull.cancel()
        self._buckets = {}
        self._coming.drop(*self._of)

    async def _pull(self, request: MirrorRequest, progress: Callable[[], None]) -> None:
        """Fills the bucket's place, once nobody writes here for an earlier push."""
        if self._ending:
            await asyncio.wait(self._ending)  # what they would write, is not of this push
        end = request.offset + request.nbytes
        where = f"node {request.node}, version {request.version}, bucket {request.index}"
        try:
            if len(self._memory) < max(1, end):
                self._memory = await asyncio.to_thread(self._grown, max(1, end))
            await self._read(request, self._memory[request.offset : end], progress)
        except DataError as error:
            raise WeightMismatch(error.what, where=where, why=error.why) from error
        except WorkerDied as error:
            # Not WorkerDied, which would say that this node's agent is gone, and is asked again.
            raise ContractError(error.what, where=where, why=error.why) from error

    def _grown(self, nbytes: int) -> memoryview:
        # Its pages are allocated now: one that is missing later would kill this process.
        allocate(self._path, nbytes, "mirror", make=True)
        return memoryview(map_file(self._path, writable=True))

    async def _read(
        self, request: MirrorRequest, memory: memoryview, progress: Callable[[], None]
    ) -> None:
        """Fills ``memory`` with a bucket, and has other nodes find it from now on."""
        mirrored = MirroredContent(
            request.node,
            request.worker,
            request.version,
            request.attempt,
            request.index,
            request.offset,
            request.nbytes,
        )
        coming = _Coming(self._path)
        self._coming.add(mirrored, coming)
        try:
            for parent, patience_s in self._parents(request):
                try:
                    await self._client.read(
                        parent, mirrored, memory, progress, coming.came, patience_s
                    )
                    return
                except GcoreError as error:
                    self._leave(parent, request, error)
            pushed = PushedContent(request.worker, request.offset, request.nbytes)
            await self._client.read(request.node, pushed, memory, progress, coming.came)
        except BaseException:
            coming.fail()
            raise

    def _parents(self, request: MirrorRequest) -> Iterator[tuple[str, float]]:
        """Gives the parents that may be asked now, with how long each may be silent, in seconds."""
        for place, parent in enumerate(request.parents):
            if time.monotonic() >= self._avoided.get(parent, 0.0):
                yield parent, PARENT_PATIENCE_S * (len(request.parents) - place)

    def _leave(self, parent: str, request: MirrorRequest, error: GcoreError) -> None:
        """Turns from a parent; asks nothing more of it for a while where it is gone or silent."""
        if isinstance(error, WorkerDied):
            self._avoided[parent] = time.monotonic() + _AVOIDED_S
        log.warning(
            "%s does not pass version %d, bucket %d on, it comes from another node: %s",
            parent,
            request.version,
            request.index,
            error,
        )


def _superseded() -> ContractError:
    return ContractError("another push began before this one ended", where="push")


def _note_error(pull: asyncio.Task[Any]) -> None:
    """Keeps asyncio from telling of an error that nobody waits for any more."""
    if not pull.cancelled():
        pull.exception()
