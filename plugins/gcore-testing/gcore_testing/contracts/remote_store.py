"""The contract of a ``RemoteStore``: what another node has comes here whole, or not at all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from gcore_core.contract.errors import ContractError, DataError
from gcore_core.contract.records import Ref
from gcore_core.contract.remote_store import MirrorRequest, RemoteStore
from gcore_core.store.client import StoreWriter
from gcore_core.store.server import SlabService
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Call, Service
from gcore_testing.contracts.base import Contract, in_loop

PUSHER = "policy.0"
OFFSET = 4096
CONTENT = np.arange(300_000, dtype=np.int64)  # it takes several parts


@dataclass(frozen=True, kw_only=True)
class JoinedNodes:
    """Holds two nodes whose stores are joined.

    near: the store that makes content. Its agent is called after the node.
    far: the store of the node that reads it, whose ``remote`` is tested.
    secret: of both.
    memory: the file from which ``PUSHER`` pushes weights, on the near node.
    """

    near: SlabService
    far: SlabService
    secret: bytes
    memory: Path

    @property
    def remote(self) -> RemoteStore:
        return self.far.remote

    async def stored(self) -> Ref:
        """Returns a reference of the near node."""
        network, service = InlineNetwork(), Service(self.near.node)
        self.near.register(service)
        self.far.register(Service(self.far.node))
        await network.view(self.near.node).serve(self.near.node, service)
        agent = network.view("writer").peer(self.near.node)
        writer = StoreWriter(self.near.directory, self.near.node, self.secret, agent, "writer")
        return await writer.put(0, frozenset({0}), [{"x": CONTENT}])


class RemoteStoreContract(Contract):
    """To test what joins the stores of nodes, override ``nodes``."""

    kind: ClassVar[str] = "remote store"

    def nodes(self, directory: Path) -> AbstractContextManager[JoinedNodes]:
        """Joins two nodes, whose files are below an empty directory; both serve already."""
        raise NotImplementedError

    @in_loop
    async def test_a_content_of_another_node_comes_whole(self, tmp_path: Path) -> None:
        with self.nodes(tmp_path) as nodes:
            ref = await nodes.stored()
            copy = await nodes.far.fetch(ref, Call(lambda: None))
            assert (copy.node, copy.digest) == (nodes.far.node, ref.digest)
            content = (nodes.far.directory / copy.slab).read_bytes()
            assert CONTENT.tobytes() in content

    @in_loop
    async def test_what_the_run_did_not_sign_is_not_given(self, tmp_path: Path) -> None:
        with self.nodes(tmp_path) as nodes:
            ref = await nodes.stored()
            bad = msgspec.structs.replace(ref, mac=bytes(len(ref.mac)))
            memory = memoryview(bytearray(ref.nbytes))
            with pytest.raises(DataError):
                await nodes.remote.fetch(bad, memory, lambda: None, is_unmapped=False)
            is_empty = bytes(memory) == bytes(ref.nbytes)
            assert is_empty

    @in_loop
    async def test_a_node_that_nobody_knows_is_refused(self, tmp_path: Path) -> None:
        with self.nodes(tmp_path) as nodes:
            ref = msgspec.structs.replace(await nodes.stored(), node="nobody")
            with pytest.raises(ContractError, match="no address is known"):
                await nodes.remote.fetch(
                    ref, memoryview(bytearray(8)), lambda: None, is_unmapped=False
                )
            with pytest.raises(ContractError, match="no address is known"):
                await nodes.remote.mirror(_bucket("nobody", 8), lambda: None)

    @in_loop
    async def test_a_bucket_of_a_push_lies_where_it_lay(self, tmp_path: Path) -> None:
        with self.nodes(tmp_path) as nodes:
            await nodes.stored()
            nodes.memory.write_bytes(bytes(OFFSET) + CONTENT.tobytes())
            request = _bucket(nodes.near.node, CONTENT.nbytes)
            path = Path(await nodes.remote.mirror(request, lambda: None))
            mirrored = path.read_bytes()[OFFSET : OFFSET + CONTENT.nbytes]
            is_same = mirrored == CONTENT.tobytes()
            assert is_same, "pytest would take minutes to show how megabytes differ"


def _bucket(node: str, nbytes: int) -> MirrorRequest:
    return MirrorRequest(node, PUSHER, 1, 0, 0, OFFSET, nbytes)
