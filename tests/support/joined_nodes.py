"""Joins disks and stores of nodes in one process, as the contracts of both want them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gcore_testing.contracts.remote_store import JoinedNodes
from gcore_testing.contracts.site_files import Disks

from gcore_core.store.server import SlabService, StoreSpec
from tests.support.disks import disks
from tests.support.joined_stores import joining
from tests.support.wires import free_address

SECRET = b"s" * 32
WHERE = {"policy.0": "agent.0", "policy.1": "agent.1", "rollout.0": "agent.2"}


@contextlib.contextmanager
def joined_disks(directory: Path) -> Iterator[Disks]:
    """Makes three nodes with a disk each; the first is home."""
    names = {"agent.0": "home", "agent.1": "one", "agent.2": "two"}
    with disks(directory, names, WHERE) as site:
        others = {node: root for node, root in site.roots.items() if node != site.home}
        yield Disks(files=site.files, home=site.root, others=others, where=WHERE)


@contextlib.contextmanager
def joined_nodes(directory: Path) -> Iterator[JoinedNodes]:
    """Makes two nodes that know each other's addresses."""
    addresses = {"near": free_address(), "far": free_address()}
    memory = directory / "memory"

    def pushed_from(worker: str) -> Path | None:
        return memory if worker == "policy.0" else None

    stores = {}
    for node in addresses:
        spec = StoreSpec(node=node, directory=str(directory / node), spill=str(directory / "spill"))
        join = joining(SECRET, addresses, push_memory=pushed_from)
        stores[node] = SlabService(spec, SECRET, join)
        stores[node].remote.open()
    try:
        yield JoinedNodes(near=stores["near"], far=stores["far"], secret=SECRET, memory=memory)
    finally:
        for store in stores.values():
            store.close()
