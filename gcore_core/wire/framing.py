"""Puts messages on a stream: a length in four bytes, then so many bytes.

Every stream of a run has this form: calls, content between nodes, specs by standard input, what
observers are told, and nodes that join.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from gcore_core.contract.errors import ContractError

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


def length_before(message: Any) -> bytes:
    """Returns what stands on the stream before a message."""
    return _LENGTH.pack(len(message))


def framed(message: bytes) -> bytes:
    """Returns a message as it stands on the stream."""
    return length_before(message) + message


def length_at(stream: Any, at: int, limit_bytes: int, where: str = "") -> int:
    """Returns the length of the message whose frame begins at a place of what has come.

    Raises ContractError for a message that is longer than the limit.
    """
    (nbytes,) = _LENGTH.unpack_from(stream, at)
    if nbytes > limit_bytes:
        raise ContractError(
            f"malformed stream: a message of {nbytes} bytes, the limit is {limit_bytes}",
            where=where,
        )
    return int(nbytes)


def receive(read: Callable[[int], bytes], limit_bytes: int, where: str = "") -> bytes:
    """Reads the next message, and not a byte more.

    read: returns at least one and at most so many bytes; none where the stream has ended.

    Raises ConnectionError where it ends before the message does, ContractError as ``length_at``.
    """
    head = _exactly(read, LENGTH_BYTES)
    return _exactly(read, length_at(head, 0, limit_bytes, where))


def _exactly(read: Callable[[int], bytes], nbytes: int) -> bytes:
    content = bytearray()
    while len(content) < nbytes:
        part = read(min(nbytes - len(content), 1 << 20))
        if not part:
            raise ConnectionError(f"ended after {len(content)} of {nbytes} bytes")
        content += part
    return bytes(content)
