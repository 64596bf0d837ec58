"""The kernel is asked so that a silent machine is noticed when it should be."""

from __future__ import annotations

import socket

import pytest

from gcore_core.wire.frames import end_in_silence, noticed_within_s


@pytest.mark.parametrize("silence_s", [1, 2.5, 3, 7.5, 12, 45.5, 60])
def test_a_silence_is_noticed_when_the_kernel_next_asks(silence_s: float) -> None:
    """It asks every so many seconds; the first time it asks in vain after the limit, it ends."""
    with socket.socket() as stream:
        end_in_silence(stream, silence_s)
        idle_s = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        every_s = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        limit_s = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    asked_s = idle_s
    while asked_s < limit_s:
        asked_s += every_s
    assert limit_s == silence_s
    assert noticed_within_s(silence_s) == asked_s <= silence_s * 4 / 3


def test_a_unix_socket_is_left_alone() -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        end_in_silence(stream, 5)
        assert not stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
