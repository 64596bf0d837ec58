"""What is sealed for a keeper is read by that keeper alone, and only unchanged."""

from __future__ import annotations

import pytest
from gcore_nodes.ray.keeper import order, read_order
from gcore_nodes.ray.sealing import Receiver, SealBroken, seal

CONTENT = b"the secret of a run" * 9


def test_the_receiver_reads_what_was_sealed_for_it() -> None:
    receiver = Receiver()
    assert receiver.open(seal(CONTENT, receiver.public)) == CONTENT
    assert receiver.open(seal(b"", receiver.public)) == b""


def test_nobody_else_reads_it_and_it_does_not_show() -> None:
    receiver = Receiver()
    sealed = seal(CONTENT, receiver.public)
    assert b"secret" not in sealed
    assert seal(CONTENT, receiver.public) != sealed
    with pytest.raises(SealBroken):
        Receiver().open(sealed)


@pytest.mark.parametrize("at", [0, 31, 32, -1])
def test_a_change_anywhere_is_seen(at: int) -> None:
    receiver = Receiver()
    sealed = bytearray(seal(CONTENT, receiver.public))
    sealed[at] ^= 1
    with pytest.raises(SealBroken):
        receiver.open(bytes(sealed))


@pytest.mark.parametrize("sealed", [b"", b"short", bytes(32), bytes(100)])
def test_what_was_never_sealed(sealed: bytes) -> None:
    with pytest.raises(SealBroken):
        Receiver().open(sealed)


def test_a_key_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"32|key"):
        seal(CONTENT, b"short")


def test_an_order_is_read_as_it_was_written() -> None:
    command, environment = ["", "-m", "agent"], {"OMP_NUM_THREADS": "1", "A": "ä b\n"}
    content = bytes(range(256))
    assert read_order(order(command, environment, content)) == (command, environment, content)
