"""Joins the stores of a run's nodes: the ``RemoteStore`` of each node's agent.

records, media    a content of another node is read once into this node's store (``bulk``)
pushes            buckets of a push are mirrored here, from a near node that has them
                  (``mirrors``)
files             those that this node has hashed for the run are given to others (``node_files``)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Ref
from gcore_core.contract.remote_store import MirrorRequest, NodeStore
from gcore_nodes.bulk import (
    STREAMS,
    BulkClient,
    BulkServer,
    MirroredContent,
    OfferedFile,
    Region,
    StoredContent,
    What,
)
from gcore_nodes.mirrors import Mirrors


class JoinedStores:
    """Reads what the other nodes of a run have, and gives them what this one has.

    client: reads content of other nodes.
    """

    def __init__(
        self,
        store: NodeStore,
        addresses: Mapping[str, str],
        secret: bytes,
        identity: bytes,
        push_memory: Callable[[str], Path | None] = lambda worker: None,
        offered: Callable[[str], Path | None] = lambda sha256: None,
        streams: int = STREAMS,
    ) -> None:
        """Joins a node's store with the others; ``open`` begins to serve.

        addresses: name of a node -> the address at which it serves content. Where this node has
            none, it serves nothing.
        secret, identity: the run's.
        push_memory: name of a worker of this node -> the file from which it pushes weights; None
            for who is no worker of this node. It is called in any thread.
        offered: SHA-256 of a file that this node gives to others -> its path; None for any other.
            It is called in any thread.
        streams: connections to another node over which a large content comes at once.
        """
        self._store = store
        self._push_memory = push_memory
        self._offered = offered
        self.client = BulkClient(addresses, secret, identity, streams)
        self._mirrors = Mirrors(store.directory, self.client)
        self._server: BulkServer | None = None
        address = addresses.get(store.node)
        if address is not None:
            self._server = BulkServer(store.node, address, secret, self._find, identity)

    @property
    def sent_bytes(self) -> int:
        """How much content was sent to other nodes so far."""
        return 0 if self._server is None else self._server.sent_bytes

    def open(self) -> None:
        """See ``RemoteStore``."""
        if self._server is not None:
            self._server.start()

    async def fetch(
        self,
        ref: Ref,
        memory: memoryview,
        progress: Callable[[], None],
        *,
        is_unmapped: bool,
    ) -> None:
        """See ``RemoteStore``."""
        await self.client.read(
            ref.node, StoredContent(ref), memory, progress, is_unmapped=is_unmapped
        )

    async def mirror(self, bucket: MirrorRequest, progress: Callable[[], None]) -> str:
        """See ``RemoteStore``."""
        return await self._mirrors.bring(bucket, progress)

    def close(self) -> None:
        """See ``RemoteStore``."""
        self.client.close()
        self._mirrors.clear()
        if self._server is not None:
            self._server.close()

    def _find(self, what: What) -> Region:
        """Says where a content lies that another node asks for. It is called in any thread."""
        if isinstance(what, StoredContent):
            return Region(self._store.file_of(what.ref), what.ref.offset, what.ref.nbytes)
        if isinstance(what, MirroredContent):
            return self._mirrors.find(what)
        if isinstance(what, OfferedFile):
            file = self._offered(what.sha256)
            if file is None:
                raise DataError(f"no file {what.sha256} is given here", where=self._store.node)
            return Region(file, what.offset, what.nbytes)
        path = self._push_memory(what.worker)
        if path is None:
            raise DataError(f"no worker {what.worker!r} pushes here", where=self._store.node)
        return Region(path, what.offset, what.nbytes)
