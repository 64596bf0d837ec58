"""Messages on a stream: a length in four bytes, then msgpack. Frames of one turn of the event loop share a message."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from gcore_core.errors import ContractError
from gcore_core.processes.service import MESSAGE_LIMIT_BYTES, Traffic, encode

CALL, CANCEL, ITEM, REPLY, ERROR, PROGRESS, TAKEN = range(7)
READ_BYTES = 1 << 20  # a stream reads ahead by twice as much
CLOSE_S = 1.0  # for what was written to leave
_LENGTH = struct.Struct("<I")


class Frame(msgspec.Struct, array_like=True, frozen=True):
    call: int
    kind: int
    method: str = ""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Greeting(msgspec.Struct, array_like=True, frozen=True):
    """The first message of who connects. The answer is a text: what is wrong with it, nothing if it is welcome."""

    secret: bytes
    version: str
    python: str


class Connection:
    """One end of a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: Traffic) -> None:
        self._reader, self._writer, self._traffic = reader, writer, traffic
        self._frames, self._nbytes = list[Frame](), 0

    def put(self, frame: Frame) -> None:
        """Nothing happens when the stream has ended: its reader is the one who tells why."""
        nbytes = len(memoryview(frame.body))
        if self._nbytes + nbytes > MESSAGE_LIMIT_BYTES:
            self._flush()
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(frame)
        self._nbytes += nbytes

    def send(self, message: bytes) -> None:
        if not self._writer.is_closing():
            self._traffic.add(message)
            self._writer.writelines((_LENGTH.pack(len(message)), message))

    async def receive(self, limit: int = 2 * MESSAGE_LIMIT_BYTES) -> bytes | None:
        """The next message, None when the other side has gone. Raises ContractError for one of more than ``limit``."""
        try:
            (nbytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if nbytes > limit:
                raise ContractError(f"malformed stream: a message of {nbytes} bytes, the limit is {limit}")
            message = await self._reader.readexactly(nbytes)
        except (asyncio.IncompleteReadError, OSError):
            return None
        self._traffic.add(message)
        return message

    async def close(self) -> None:
        self._flush()
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()

    def _flush(self) -> None:
        if self._frames:
            self.send(encode(self._frames))
        self._frames, self._nbytes = [], 0
