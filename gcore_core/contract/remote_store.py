"""Defines how the store of a node comes by what lies in the stores of other nodes.

A node's agent owns its store. On one node there is nothing to bring. An agent of a run on several
nodes gives its store something that reads from the others, and that they read from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from gcore_core.contract.records import Ref


class MirrorRequest(msgspec.Struct, array_like=True, frozen=True):
    """Asks a receiver's own agent to bring a bucket of a push from another node.

    node: where the bucket lies.
    worker: name of the process that pushes it.
    version, attempt: of the push.
    index: of the bucket.
    offset, nbytes: where it lies in the worker's memory, in bytes.
    parents: other nodes that bring the bucket, too. It is read from the first, from the next where
        that fails, and from ``node`` where all do.
    """

    node: str
    worker: str
    version: int
    attempt: int
    index: int
    offset: int
    nbytes: int
    parents: list[str] = []


class NodeStore(Protocol):
    """Is a node's own store, as a ``RemoteStore`` sees it.

    node: name of the node's agent.
    directory: where its files are made, on this node.
    """

    node: str
    directory: Path

    def file_of(self, ref: Ref) -> Path:
        """Returns the file with a content that this node has made; any thread may call it.

        Raises DataError where the run did not sign the reference, or another node has it.
        """


class RemoteStore(Protocol):
    """Reads what other nodes have, and gives them what this node has.

    It is made with the node's store, and called in the event loop of the node's agent.
    """

    def open(self) -> None:
        """Gives this node's content to the others from now on. Raises AddressError."""

    async def fetch(
        self,
        ref: Ref,
        memory: memoryview,
        progress: Callable[[], None],
        *,
        is_unmapped: bool,
    ) -> None:
        """Fills ``memory`` with the content of a reference of another node.

        It is called once for a content, however many processes of this node ask for it.

        progress: called while it goes on, so that who waits does so.
        is_unmapped: whether the pages of ``memory`` are not mapped yet.
        Raises WorkerDied when the other node sends nothing more, DataError when the content may not
        be read, ContractError when the node is unknown or refuses.
        """

    async def mirror(self, bucket: MirrorRequest, progress: Callable[[], None]) -> str:
        """Brings a bucket of a push from another node; returns the path of a file with it.

        The file has the bucket at the same offset. Raises ContractError when it cannot be brought,
        and WeightMismatch when it was altered on its way: then the push begins again.
        """

    def close(self) -> None:
        """Ends all connections. Reads under way fail."""
