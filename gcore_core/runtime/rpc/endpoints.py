"""What a process can be asked: one constant for each, with a name and types, used on both sides.

``SCORE = Endpoint("score", ScoreRequest, list[RecordScore])`` stands beside its messages in
``gcore_core.runtime.messages``. ``service.add(SCORE, handler)`` serves it and
``await peer.call(SCORE, request)`` asks for it, so a type checker knows the request and the reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Generic, TypeVar

import msgspec

from gcore_core.runtime.rpc.deadlines import Wait

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Endpoint(Generic[Request, Reply]):
    """One request, one reply.

    name: how it is called on the wire; unique among what one process serves.
    request, reply: types that msgspec can decode.
    wait: what its caller waits for, which says how long (``deadlines``).
    """

    name: str
    request: type[Request]
    reply: type[Reply]
    wait: Wait = Wait.ANSWER

    @cached_property
    def request_decoder(self) -> msgspec.msgpack.Decoder[Request]:
        """Made once, on first use: making one takes longer than decoding a message with it."""
        return msgspec.msgpack.Decoder(self.request)

    @cached_property
    def reply_decoder(self) -> msgspec.msgpack.Decoder[Reply]:
        return msgspec.msgpack.Decoder(self.reply)


@dataclass(frozen=True)
class StreamEndpoint(Generic[Request, Item]):
    """One request, any number of items.

    name: how it is called on the wire; unique among what one process serves.
    request, item: types that msgspec can decode.
    wait: what its caller waits for before each item.
    """

    name: str
    request: type[Request]
    item: type[Item]
    wait: Wait = Wait.ANSWER

    @cached_property
    def request_decoder(self) -> msgspec.msgpack.Decoder[Request]:
        """Made once, on first use: making one takes longer than decoding a message with it."""
        return msgspec.msgpack.Decoder(self.request)

    @cached_property
    def item_decoder(self) -> msgspec.msgpack.Decoder[Item]:
        return msgspec.msgpack.Decoder(self.item)


ALIVE = Endpoint("alive", NoneType, NoneType)  # every process answers it, whatever it serves
