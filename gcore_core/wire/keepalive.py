"""Has the kernel end connections to machines that give no sign of life.

The kernel there gives such signs, also for a process that is stopped or busy. It does so when it is
asked (keepalive, where nothing is sent) and when it gets what was sent.
"""

from __future__ import annotations

import math
import socket


def end_in_silence(stream: socket.socket, silence_s: float) -> None:
    """Has the kernel end a stream when the machine at its other end is silent for so long.

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
