"""Messages on a stream: a length in four bytes, then msgpack. Short frames of one turn of the loop
share a message.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from gcore_core.contract.errors import ContractError
from gcore_core.contract.launching import Traffic
from gcore_core.runtime.rpc.service import MESSAGE_LIMIT_BYTES, encode

CALL, CANCEL, ITEM, REPLY, ERROR, PROGRESS, TAKEN = range(7)
GREETING_BYTES = 4096  # the limit of a first message, and of its answer
JOINED_BYTES = 1 << 16  # of frames in a message: copying them together takes longer than a write
READ_BYTES = 1 << 18
CLOSE_S = 1.0  # for what was written to leave
_LENGTH = struct.Struct("<I")


class Frame(msgspec.Struct, array_like=True, frozen=True):
    call: int
    kind: int
    method: str = ""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Greeting(msgspec.Struct, array_like=True, frozen=True):
    """The first message of who connects. The answer is a text: what is wrong with it, nothing if it
    is welcome.
    """

    secret: bytes
    version: str
    python: str


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class Connection(asyncio.BufferedProtocol):
    """One end of a stream.

    ``received`` is called with each message, and may raise ContractError: that ends the connection.
    ``lost`` is called once, when nothing more comes, with what was wrong ("" when the other side
    has just gone). ``memory`` is for bytes
    that nobody has looked at yet: connections of one event loop may share it.
    """

    def __init__(
        self,
        received: Callable[[Any], None],
        lost: Callable[[str], None],
        memory: bytearray,
        traffic: Traffic,
    ) -> None:
        self.received, self.lost, self._limit = received, lost, GREETING_BYTES
        self._memory, self._traffic = memoryview(memory), traffic
        self._frames, self._nbytes = list[Frame](), 0
        self._begun, self._have = (
            bytearray(),
            0,
        )  # a long message's place, and how much of it is there
        self._head, self._wrong = b"", ""  # of a length that is not whole

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        self._gone = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        self._gone.set_result(None)
        self.lost(self._wrong)

    def admit(self, received: Callable[[Any], None]) -> None:
        """Greetings are over: messages may be long."""
        self.received, self._limit = received, 2 * MESSAGE_LIMIT_BYTES

    @property
    def ended(self) -> bool:
        return self._transport.is_closing()

    def put(self, frame: Frame) -> None:
        """Nothing happens when the stream has ended: ``lost`` tells why."""
        nbytes = len(memoryview(frame.body))
        if self._nbytes + nbytes > JOINED_BYTES:
            self._flush()
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(frame)
        self._nbytes += nbytes

    def send(self, message: bytes) -> None:
        if not self.ended:
            self._traffic.add(message)
            short = len(message) <= JOINED_BYTES
            for part in (framed(message),) if short else (_LENGTH.pack(len(message)), message):
                self._transport.write(part)

    def end(self) -> None:
        """What was written leaves first, if it can leave soon."""
        self._flush()
        if not self.ended:
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)

    async def close(self) -> None:
        self.end()
        await self._gone

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._begun)[self._have :] if self._begun else self._memory

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if not self._begun:
                self._read(self._memory[:nbytes])
            elif (have := self._have + nbytes) < len(self._begun):
                self._have = have
            else:
                message, self._begun = self._begun, bytearray()
                self._arrived(message)
        except ContractError as error:
            self._wrong = error.what
            self._transport.abort()

    def _read(self, come: memoryview) -> None:
        if self._head:
            come, self._head = memoryview(self._head + come), b""
        while len(come) >= _LENGTH.size and not self.ended:
            (nbytes,), come = _LENGTH.unpack_from(come), come[_LENGTH.size :]
            if nbytes > self._limit:
                raise ContractError(
                    f"malformed stream: a message of {nbytes} bytes, the limit is {self._limit}"
                )
            if (have := len(come)) < nbytes:
                self._begun, self._have = bytearray(nbytes), have
                self._begun[:have] = come
                return
            self._arrived(bytes(come[:nbytes]))
            come = come[nbytes:]
        self._head = bytes(come)

    def _arrived(self, message: bytes | bytearray) -> None:
        self._traffic.add(message)
        self.received(message)

    def _flush(self) -> None:
        if self._frames:
            self.send(encode(self._frames))
        self._frames, self._nbytes = [], 0
