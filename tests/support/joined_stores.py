"""Joins the stores of nodes in one process, as the agents of a run on several machines do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gcore_nodes.joined_stores import JoinedStores

from gcore_core.contract.remote_store import NodeStore
from gcore_core.store.server import SlabService
from tests.support.wires import shared_identity


def joining(
    secret: bytes,
    addresses: Mapping[str, str] | None,
    identity: bytes | None = None,
    push_memory: Callable[[str], Path | None] = lambda worker: None,
) -> Callable[[NodeStore], JoinedStores]:
    """Returns what joins a store with those at some addresses, for ``SlabService``.

    addresses: name of a node -> where it serves content; None: of no node.
    identity: the run's; None: the one that all tests share.
    """
    shown = shared_identity() if identity is None else identity
    return lambda store: JoinedStores(store, addresses or {}, secret, shown, push_memory)


def of_service(service: SlabService) -> JoinedStores:
    """Returns what joins a node's store with the others."""
    assert isinstance(service.remote, JoinedStores)
    return service.remote


def sent_bytes(service: SlabService) -> int:
    """Returns how much content a node has sent to others so far."""
    return of_service(service).sent_bytes
