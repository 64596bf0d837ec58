"""Keeps mirrors of memories from which other nodes' workers push weights.

A mirror is a file in this node's store with the bytes of a push memory of another node, at the same
offsets. A receiver of a push whose bucket lies on another node asks its own agent for the bucket.
The agent pulls it once, however many receivers the node has, and from then on it is shared memory
as on the sender's node. Why a region may be overwritten stands at the head of
``gcore_core.runtime.push``.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ContractError, DataError, WeightMismatch, WorkerDied
from gcore_core.runtime.messages import MirrorRequest
from gcore_core.runtime.store.bulk import BulkClient, PushedContent
from gcore_core.runtime.store.client import map_file

_REMEMBERED = 16  # pushes that another one took the place of


def push_memory(directory: Path, worker: str) -> Path:
    """Returns the file, in its node's store, from which a worker pushes weights."""
    return directory / f"{worker}-push"


class Mirrors:
    """All mirrors of one node.

    directory: where the files are made.
    client: brings what they hold.
    """

    def __init__(self, directory: Path, client: BulkClient) -> None:
        self._directory = directory
        self._client = client
        self._mirrors: dict[tuple[str, str], _Mirror] = {}  # by the memory's node and worker

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
            self._mirrors[key] = _Mirror(path, partial(self._client.read, request.node))
        return await self._mirrors[key].bring(request, progress)

    def clear(self) -> None:
        """Forgets all mirrors; their files are the caller's to remove."""
        for mirror in self._mirrors.values():
            mirror.clear()
        self._mirrors.clear()


class _Mirror:
    """The mirror of one memory. It holds buckets of one push at a time.

    read: reads a content of the memory's node, see ``BulkClient.read``.
    """

    def __init__(self, path: Path, read: Callable[..., Awaitable[None]]) -> None:
        self._path = path
        self._read = read
        self._memory = memoryview(b"")
        self._push: tuple[int, int] | None = None  # version and attempt
        self._buckets: dict[int, asyncio.Task[None]] = {}  # of this push, by index
        self._superseded = deque[tuple[int, int]](maxlen=_REMEMBERED)
        self._ending: list[asyncio.Task[None]] = []  # of an earlier push, that may still write

    async def bring(self, request: MirrorRequest, progress: Callable[[], None]) -> str:
        push = request.version, request.attempt
        if push != self._push:
            self._begin(push)
        pull = self._buckets.get(request.index)
        if pull is None or (pull.done() and (pull.cancelled() or pull.exception() is not None)):
            pull = asyncio.ensure_future(self._pull(request, progress))
            pull.add_done_callback(note_error)
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

    async def _pull(self, request: MirrorRequest, progress: Callable[[], None]) -> None:
        if self._ending:
            await asyncio.wait(self._ending)  # what they would write, is not of this push
        end = request.offset + request.nbytes
        where = f"node {request.node}, version {request.version}, bucket {request.index}"
        try:
            if len(self._memory) < max(1, end):
                self._memory = await asyncio.to_thread(_grown, self._path, max(1, end))
            content = PushedContent(request.worker, request.offset, request.nbytes)
            await self._read(content, self._memory[request.offset : end], progress)
        except DataError as error:
            raise WeightMismatch(error.what, where=where) from error
        except WorkerDied as error:
            # Not WorkerDied, which would say that this node's agent is gone, and is asked again.
            raise ContractError(error.what, where=where, why=error.why) from error


def _superseded() -> ContractError:
    return ContractError("another push began before this one ended", where="push")


def note_error(pull: asyncio.Task[Any]) -> None:
    """Keeps asyncio from telling of an error that nobody waits for any more."""
    if not pull.cancelled():
        pull.exception()


def _grown(path: Path, nbytes: int) -> memoryview:
    """Makes a file at least so large, and maps it. Raises DataError without memory for it."""
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "wb") as file:
            # Its pages are allocated now: one that is missing later would kill this process.
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"no mirror of {nbytes} bytes can be made: {why}", where=str(path)
        ) from error
    return memoryview(map_file(path, writable=True))
