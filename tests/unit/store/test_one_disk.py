"""Where a run has one machine, its disk is joined with no other, and its store with no other."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from gcore_testing.contracts.site_files import Disks, SiteFilesContract

from gcore_core.contract.errors import ContractError
from gcore_core.contract.records import Ref
from gcore_core.contract.remote_store import MirrorRequest
from gcore_core.contract.site_files import OneDisk
from gcore_core.store.server import OneNode


class TestOneDisk(SiteFilesContract):
    def disks(self, directory: Path) -> AbstractContextManager[Disks]:
        return contextlib.nullcontext(Disks(files=OneDisk(), home=directory))


async def test_one_node_knows_no_other() -> None:
    store = OneNode()
    ref = Ref(
        node="agent.1",
        slab="1",
        offset=0,
        nbytes=8,
        dtype="int64",
        shape=(1,),
        digest=0,
        mac=b"",
    )
    with pytest.raises(ContractError, match="no address is known for its content"):
        await store.fetch(ref, memoryview(bytearray(8)), lambda: None, is_unmapped=False)
    with pytest.raises(ContractError, match="no address is known for its content"):
        await store.mirror(MirrorRequest("agent.1", "policy.0", 1, 0, 0, 0, 8), lambda: None)
