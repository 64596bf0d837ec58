"""Makes nodes with disks of their own, for tests in one process: real files, real transfers.

A disk is a directory that stands for home's: every path in a request to a node is moved there, and
every path in its answers is moved back.

    with disks(tmp_path, {"agent.0": "a", "agent.1": "b"}) as site:
        (site.roots["agent.1"] / "data").write_text("...")  # agent.1 sees it as site.root/data
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from gcore_nodes.bulk import BulkClient, BulkServer, OfferedFile, Region, What
from gcore_nodes.joined_disks import JoinedDisks
from gcore_nodes.messages import END_WORKERS
from gcore_nodes.node_files import FileNotes, NodeFiles

from gcore_core.contract.errors import DataError
from gcore_core.contract.site_files import SiteFiles
from gcore_core.wire.service import Call
from tests.support.wires import free_address, shared_identity

SECRET = b"s" * 32


class DiskPeer:
    """A node's agent as the supervisor sees it.

    asked: names of the endpoints that were called, in order.
    """

    def __init__(self, name: str, files: NodeFiles, root: Path, disk: Path) -> None:
        self.name = name
        self.files = files
        self.asked: list[str] = []
        self._moves = str(root).encode(), str(disk).encode()

    def _there(self, request: Any) -> Any:
        raw = msgspec.json.encode(request).replace(*self._moves)
        return msgspec.json.decode(raw, type=type(request))

    def _back(self, reply: Any, kind: Any) -> Any:
        return msgspec.json.decode(
            msgspec.json.encode(reply).replace(*self._moves[::-1]), type=kind
        )

    @contextlib.contextmanager
    def _errors_moved(self) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            disk, root = self._moves[::-1]
            error.where = error.where.replace(disk.decode(), root.decode())
            raise

    async def call(self, endpoint: Any, request: Any, *, deadline_s: float | None = None) -> Any:
        self.asked.append(endpoint.name)
        if endpoint is END_WORKERS:
            return request
        with self._errors_moved():
            handler = getattr(self.files, endpoint.name)
            reply = await handler(self._there(request), Call(lambda: None))
        return self._back(reply, endpoint.reply)

    async def stream(
        self, endpoint: Any, request: Any, *, deadline_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        self.asked.append(endpoint.name)
        with self._errors_moved():
            handler = getattr(self.files, endpoint.name)
            async for item in handler(self._there(request), Call(lambda: None)):
                yield self._back(item, endpoint.item)


class DiskSite(SimpleNamespace):
    """What the supervisor needs of a site, see ``disks``.

    root: the directory that the job knows.
    roots: node -> where that directory is on its disk.
    peers: node -> its agent.
    servers: node -> what gives its files to others.
    files: joins their disks.
    """

    root: Path
    roots: dict[str, Path]
    peers: dict[str, DiskPeer]
    servers: dict[str, BulkServer]
    files: SiteFiles

    @property
    def home_node(self) -> Any:
        return self.nodes[self.home]


@contextlib.contextmanager
def disks(
    directory: Path, disk_of: Mapping[str, str], where: Mapping[str, str] | None = None
) -> Iterator[DiskSite]:
    """Makes nodes; the first is home, and its disk is the one that the job knows.

    disk_of: node -> name of its disk; nodes of one name share it.
    where: process -> its node.
    """
    with contextlib.ExitStack() as stack:
        addresses = {node: free_address() for node in disk_of}
        roots = {node: directory / f"disk-{disk}" for node, disk in disk_of.items()}
        home = next(iter(disk_of))
        peers = {}
        servers = {}
        for node, root in roots.items():
            root.mkdir(parents=True, exist_ok=True)
            client = BulkClient(addresses, SECRET, shared_identity())
            stack.callback(client.close)
            files = NodeFiles(node, client, FileNotes(directory / f"notes-{node}"))
            servers[node] = BulkServer(
                node, addresses[node], SECRET, _finder(files), shared_identity()
            )
            servers[node].start()
            stack.callback(servers[node].close)
            peers[node] = DiskPeer(node, files, roots[home], root)
        yield DiskSite(
            root=roots[home],
            roots=roots,
            peers=peers,
            servers=servers,
            home=home,
            nodes={node: SimpleNamespace(agent=peer) for node, peer in peers.items()},
            where=dict(where or {}),
            files=JoinedDisks(peers, home, where or {}),
        )


def _finder(files: NodeFiles) -> Any:
    def find(what: What) -> Region:
        assert isinstance(what, OfferedFile)
        path = files.offered(what.sha256)
        if path is None:
            raise DataError("no such file is given here")
        return Region(path, what.offset, what.nbytes)

    return find
