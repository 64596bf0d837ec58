"""How a peer is called, whatever carries the bytes: deadlines, replies, items and errors."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from gcore_core.contract.deadlines import Deadlines
from gcore_core.contract.errors import ContractError, GcoreError
from gcore_core.contract.launching import Endpoint, Item, Reply, Request, StreamEndpoint
from gcore_core.wire import frames
from gcore_core.wire.service import Body, RemoteFailure, decoded, from_wire

T = TypeVar("T")
_FAILURE = msgspec.msgpack.Decoder(RemoteFailure)


class HasDeadlines(Protocol):
    """Holds the deadlines of a process's calls.

    deadlines: of calls that give none of their own; they may be replaced at any time.
    """

    deadlines: Deadlines


class CallingPeer(ABC):
    """The caller's end of a connection, without what carries the bytes.

    name: of the process at the other end.
    """

    _network: HasDeadlines

    def __init__(self, name: str, network: HasDeadlines) -> None:
        self.name = name
        self._network = network

    async def call(
        self,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> Reply:
        name = endpoint.name
        limit_s = self._network.deadlines.seconds(endpoint.wait, deadline_s)
        what = f"reply to {name!r}"
        decode = partial(decoded, endpoint.reply_decoder, what=what, where=self.name)
        answers = self._exchange(name, request, limit_s, frames.REPLY, decode)
        async with contextlib.aclosing(answers):
            async for reply in answers:
                return reply
        raise ContractError(f"{name} gave no reply", where=self.name)

    def stream(
        self,
        endpoint: StreamEndpoint[Request, Item],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Item, None]:
        name = endpoint.name
        limit_s = self._network.deadlines.seconds(endpoint.wait, deadline_s)
        what = f"item of {name!r}"
        decode = partial(decoded, endpoint.item_decoder, what=what, where=self.name)
        return self._exchange(name, request, limit_s, frames.ITEM, decode)

    @abstractmethod
    def _exchange(
        self,
        method: str,
        request: Any,
        deadline_s: float,
        wanted: int,
        decode: Callable[[Body], T],
    ) -> AsyncGenerator[T, None]:
        """Yields one call's answers of the kind ``wanted``, as they come, until the call is over.

        It decodes them by itself: a generator around this one would cost as much as the decoding
        of a record.

        Raises what the server raised, DeadlineExceeded, or WorkerDied when the connection is gone.
        Closing the generator early ends the call at the server.

        wanted: ITEM or REPLY.
        decode: makes an answer of a frame's body.
        """

    def _error_in(self, method: str, body: Body) -> GcoreError:
        return from_wire(decoded(_FAILURE, body, f"error of {method!r}", self.name))
