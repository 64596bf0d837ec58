"""Messages come out of a stream as they went in, however its bytes are cut. Frames written close
together share one, unless they are long.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import msgspec
import pytest

from gcore_core.contract.errors import ContractError
from gcore_core.contract.launching import Traffic
from gcore_core.wire.frames import (
    ITEM,
    JOINED_BYTES,
    Connection,
    Frame,
)
from gcore_core.wire.framing import framed
from gcore_core.wire.proof import GREETING_BYTES
from gcore_core.wire.service import MESSAGE_LIMIT_BYTES, encode


class Heard:
    """A connection's end, without a socket; it is its own transport."""

    def __init__(self, nbytes: int) -> None:
        self.messages: list[bytes] = []
        self.traffic, self.aborted, self.written = Traffic(), False, b""
        self.connection = Connection(self._take, lambda why: None, bytearray(nbytes), self.traffic)
        self.connection._transport = cast(Any, self)

    def _take(self, message: bytes | bytearray) -> None:
        self.messages.append(message if isinstance(message, bytes) else bytes(message))
        if message == b"bad":
            raise ContractError("malformed")

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def hear(self, data: bytes, draw: random.Random) -> None:
        """In pieces as a socket may give them: no longer than what they are read into."""
        while data and not self.aborted:
            room = self.connection.get_buffer(-1)
            assert len(room) > 0
            some = data[: draw.randint(1, min(len(room), len(data)))]
            room[: len(some)] = some
            self.connection.buffer_updated(len(some))
            data = data[len(some) :]


@pytest.mark.parametrize("seed", range(50))
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(seed: int) -> None:
    """Some are empty, some longer than what is read at a time, some end where that ends."""
    draw = random.Random(seed)
    room = draw.choice([1, 3, 4, 5, 64, 1000])
    heard = Heard(room)
    heard.connection.admit(heard._take)
    lengths = [
        draw.choice([0, 1, room - 4, room, 10 * room, draw.randint(0, 3000)]) for _ in range(20)
    ]
    sent = [draw.randbytes(max(0, length)) for length in lengths]
    heard.hear(b"".join(map(framed, sent)), draw)
    assert heard.messages == sent
    assert (heard.traffic.messages, heard.traffic.nbytes) == (20, sum(map(len, sent)))


def test_nothing_is_read_after_a_refused_message() -> None:
    heard = Heard(100)
    heard.hear(framed(b"good") + framed(b"bad") + framed(b"good"), random.Random(0))
    assert heard.aborted and heard.messages == [b"good", b"bad"]


@pytest.mark.parametrize(
    ("admitted", "limit"), [(False, GREETING_BYTES), (True, 2 * MESSAGE_LIMIT_BYTES)]
)
def test_no_memory_is_allocated_for_a_message_over_the_limit(admitted: bool, limit: int) -> None:
    heard = Heard(100)
    if admitted:
        heard.connection.admit(heard._take)
    heard.hear((limit + 1).to_bytes(4, "little") + b"x", random.Random(1))
    assert heard.aborted and heard.messages == []
    assert not heard.connection._partial


async def test_short_frames_are_joined_and_long_ones_sent_alone_in_order() -> (  # noqa: E501
    None
):
    near, far = Heard(100), Heard(100)
    lengths = [1, 10, JOINED_BYTES, 10, 10, 3 * JOINED_BYTES, 1]
    frames = [
        Frame(n, ITEM, "", msgspec.Raw(encode(bytes(length)))) for n, length in enumerate(lengths)
    ]
    for frame in frames:
        near.connection.put(frame)
    await asyncio.sleep(0)
    far.connection.admit(far._take)
    far.hear(near.written, random.Random(0))
    heard = [msgspec.msgpack.decode(message, type=list[Frame]) for message in far.messages]
    assert [[frame.call for frame in message] for message in heard] == [
        [0, 1],
        [2],
        [3, 4],
        [5],
        [6],
    ]
    assert [bytes(frame.body) for message in heard for frame in message] == [
        bytes(frame.body) for frame in frames
    ]
    assert near.traffic == far.traffic


async def test_a_close_that_is_cancelled_takes_the_end_from_nobody() -> None:
    """Others who close it wait for its end, and whoever reads from it is told of that."""
    told: list[str] = []
    connection = Connection(lambda message: None, told.append, bytearray(100), Traffic())
    connection.connection_made(asyncio.Transport())
    connection._transport = cast(Any, _Lingering())
    cancelled = asyncio.ensure_future(connection.close())
    waiting = asyncio.ensure_future(connection.close())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert not waiting.done()
    connection.connection_lost(None)
    await waiting
    assert told == [""]


class _Lingering:
    """A transport that is closed, and whose end has not come yet."""

    def is_closing(self) -> bool:
        return True
