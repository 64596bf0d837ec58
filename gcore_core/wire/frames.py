"""Sends and receives messages of calls on a stream, in the event loop.

The first message of each side is a greeting and its answer, see ``proof``. All others are lists of
frames. Short frames that are put in one pass of the event loop share a message.

The kernel ends connections to machines that give no sign of life. The kernel there gives such
signs, also for a process that is stopped or busy. It does so when it is asked (keepalive, where
nothing is sent) and when it gets what was sent.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from gcore_core.contract.errors import ContractError
from gcore_core.contract.launching import Traffic
from gcore_core.wire.framing import LENGTH_BYTES, framed, length_at, length_before
from gcore_core.wire.proof import GREETING_BYTES
from gcore_core.wire.service import MESSAGE_LIMIT_BYTES, encode

# Kinds of frames; ``sockets`` says who sends which, and when.
CALL, CANCEL, ITEM, REPLY, ERROR, PROGRESS, TAKEN = range(7)
# Of frames in one message; to copy more together takes longer than a write.
JOINED_BYTES = 1 << 16
READ_BYTES = 1 << 18
CLOSE_S = 1.0  # what was written has so long to leave
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Frame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Holds one step of a call, in either direction.

    call: the call's number, given by the caller.
    kind: CALL and so on, see above.
    method: the endpoint's name, in a CALL only.
    body: what the kind carries, as msgpack; nil where it carries nothing.
    """

    call: int
    kind: int
    method: str = ""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Connection(asyncio.BufferedProtocol):
    """Sends and receives messages on one end of a stream.

    The event loop reads into the memory that ``get_buffer`` names, then calls ``buffer_updated``.
    Short messages are cut out of ``memory``. A message that is not whole yet gets memory of its own
    length, and the loop reads the rest straight into it: a long message is copied once.

    received: called with each message. It may raise ContractError, which ends the connection.
    lost: called once, when nothing more comes, with what was wrong ("" when the other side has
        just gone).
    memory: for bytes that nobody has looked at yet. Connections of one event loop may share it:
        each empties it before another reads.
    begun: called once, before anything comes. Over TLS that is after the handshake, and never
        where it fails; then ``lost`` is not called either.
    """

    def __init__(
        self,
        received: Callable[[Any], None],
        lost: Callable[[str], None],
        memory: bytearray,
        traffic: Traffic,
        begun: Callable[[], None] | None = None,
    ) -> None:
        self.received = received
        self.lost = lost
        self._begun = begun
        self._limit_bytes = GREETING_BYTES  # of a message
        self._memory = memoryview(memory)
        self._traffic = traffic
        self._frames: list[Frame] = []  # put, and not sent yet
        self._frames_bytes = 0
        self._partial = bytearray()  # a message that is not whole yet, at its full length
        self._partial_bytes = 0  # how much of it has come
        self._length_part = b""  # of a length whose four bytes have not all come
        self._wrong = ""

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        self._closed = asyncio.get_running_loop().create_future()
        if self._begun is not None:
            self._begun()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set_result(None)
        if isinstance(error, OSError) and error.errno in _SILENT:
            self._wrong = self._wrong or f"its machine gives no sign of life ({error.strerror})"
        self.lost(self._wrong)

    def end_in_silence(self, silence_s: float) -> None:
        """Lets the kernel end the stream when the machine at its other end gives no sign of life.

        silence_s: for so long; 0: as long as the kernel likes. Unix sockets are left alone.
        """
        stream = self._transport.get_extra_info("socket")
        if silence_s and stream is not None:
            end_in_silence(stream, silence_s)

    def admit(self, received: Callable[[Any], None]) -> None:
        """Ends the greeting: messages may be long from now on, and go to ``received``."""
        self.received = received
        # One frame's body has at most half of that. The rest is for short frames with it.
        self._limit_bytes = 2 * MESSAGE_LIMIT_BYTES

    @property
    def ended(self) -> bool:
        return self._transport.is_closing()

    def put(self, frame: Frame) -> None:
        """Sends a frame at the end of this pass of the event loop, with those put before it.

        When the stream has ended, nothing happens: ``lost`` says why.
        """
        nbytes = len(memoryview(frame.body))
        if self._frames_bytes + nbytes > JOINED_BYTES:
            self._flush()
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(frame)
        self._frames_bytes += nbytes

    def send(self, message: bytes) -> None:
        """Writes one message. A short one leaves in one write, a long one is not copied for it."""
        if self.ended:
            return
        self._traffic.add(message)
        if len(message) <= JOINED_BYTES:
            self._transport.write(framed(message))
        else:
            self._transport.write(length_before(message))
            self._transport.write(message)

    def end(self) -> None:
        """Ends the stream. What was written leaves first, if it can within ``CLOSE_S``."""
        self._flush()
        if not self.ended:
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)

    async def close(self) -> None:
        """Ends the stream and waits until it is gone."""
        self.end()
        # Others wait for the same end, and ``connection_lost`` sets it: no cancellation may end it.
        await asyncio.shield(self._closed)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._partial:
            return memoryview(self._partial)[self._partial_bytes :]
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        if self.ended:
            return  # TLS has read once more while it was closed
        try:
            if self._partial:
                self._extend_partial(nbytes)
            else:
                self._cut(self._memory[:nbytes])
        except ContractError as error:
            self._wrong = error.what
            self._transport.abort()

    def _extend_partial(self, nbytes: int) -> None:
        """Adds ``nbytes`` that have come to the message that is not whole yet."""
        self._partial_bytes += nbytes
        if self._partial_bytes < len(self._partial):
            return
        message = self._partial
        self._partial = bytearray()  # first: ``received`` may raise
        self._arrived(message)

    def _cut(self, unread: memoryview) -> None:
        """Cuts what has come into messages; keeps the beginning of one that is not whole."""
        if self._length_part:
            unread = memoryview(self._length_part + unread)
            self._length_part = b""
        end = len(unread)
        at = 0  # everything before has been cut
        while end - at >= LENGTH_BYTES and not self.ended:
            nbytes = length_at(unread, at, self._limit_bytes)
            at += LENGTH_BYTES
            if end - at < nbytes:
                self._partial = bytearray(nbytes)
                self._partial_bytes = end - at
                self._partial[: end - at] = unread[at:]
                return
            self._arrived(bytes(unread[at : at + nbytes]))
            at += nbytes
        self._length_part = bytes(unread[at:])

    def _arrived(self, message: bytes | bytearray) -> None:
        self._traffic.add(message)
        self.received(message)

    def _flush(self) -> None:
        if self._frames:
            self.send(encode(self._frames))
        self._frames = []
        self._frames_bytes = 0


def end_in_silence(stream: socket.socket, silence_s: float) -> None:
    """Lets the kernel end a stream when the machine at its other end is silent for so long.

    silence_s: at least 1. Unix sockets are left alone.
    """
    if stream.family == socket.AF_UNIX:
        return
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        every_s = _asked_every_s(silence_s)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def noticed_within_s(silence_s: float) -> float:
    """Returns after how many seconds a silence has ended the stream.

    A stream on which nothing is sent is looked at only when the kernel asks again, which it does
    every so many whole seconds. So 7.5 s of silence are noticed after 8 s.
    """
    every_s = _asked_every_s(silence_s)
    return float(math.ceil(silence_s / every_s) * every_s)


def _asked_every_s(silence_s: float) -> int:
    return max(1, int(silence_s / 4))
