"""Passes frames between two network interfaces, each after a delay: a link to somewhere far away.

    far_link.py INTERFACE INTERFACE SECONDS
    far_link.py without-offload INTERFACE       before it, on either side

This kernel has no netem. The checksums of what goes through must be whole, so whoever sends there
must not leave them to the device. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import socket
import struct
import sys

_EVERYTHING = 0x0003  # ETH_P_ALL
_OUTGOING = 4  # PACKET_OUTGOING: a frame that this machine itself has sent there
_FRAME_BYTES = 1 << 16
_SIOCETHTOOL = 0x8946
_SET_TX_CHECKSUM = 0x17
_SOCKET_BYTES = 8 << 20


def without_offload(interface: str) -> None:
    """Has the kernel make the checksums of what is sent through an interface."""
    value = ctypes.create_string_buffer(struct.pack("II", _SET_TX_CHECKSUM, 0))
    request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


async def _relay(names: list[str], delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    ends = []
    for name in names:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERYTHING))
        end.bind((name, 0))
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        end.setblocking(False)
        ends.append(end)

    def send(target: socket.socket, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # a frame is lost, as on any link
            target.send(frame)

    def came(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                frame, (_, _, kind, _, _) = source.recvfrom(_FRAME_BYTES)
                if kind != _OUTGOING:
                    loop.call_later(delay_s, send, target, frame)

    loop.add_reader(ends[0], came, ends[0], ends[1])
    loop.add_reader(ends[1], came, ends[1], ends[0])
    ended = asyncio.Event()
    loop.add_reader(0, ended.set)  # nobody writes there
    print("ready", flush=True)
    await ended.wait()


if __name__ == "__main__":
    if sys.argv[1] == "without-offload":
        without_offload(sys.argv[2])
    else:
        asyncio.run(_relay(sys.argv[1:3], float(sys.argv[3])))
