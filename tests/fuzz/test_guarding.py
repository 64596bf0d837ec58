"""The guards find what they are for."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import strategies as st

from . import guarding
from .drawing import mutated
from .guarding import CPU_LIMIT_S, Broken, fuzz, guarded


def test_execution_of_code_is_detected() -> None:
    with pytest.raises(Broken, match="ran something"), guarded(10):
        eval("1 + 1")  # noqa: S307


def test_an_allocation_over_the_limit_is_detected() -> None:
    with pytest.raises(Broken, match="10 bytes made it allocate"), guarded(10):
        bytes(2 << 20)


def test_a_slow_decoder_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "CPU_LIMIT_S", CPU_LIMIT_S / 100)
    with pytest.raises(Broken, match="10 bytes took"), guarded(10):
        end_s = time.process_time() + CPU_LIMIT_S / 50
        while time.process_time() < end_s:
            pass


def test_an_undocumented_error_of_a_decoder_is_reported_with_its_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that trusts the table's length."""
    monkeypatch.setattr(guarding, "SECONDS", 60.0)
    sound = st.lists(st.integers(0, 3), max_size=3).map(msgspec.msgpack.encode)

    def reader(raw: bytes) -> None:
        try:
            found = msgspec.msgpack.decode(raw, type=list[int])
        except msgspec.MsgspecError:
            return
        assert all(number < 4 for number in found)

    with pytest.raises(AssertionError) as caught:
        fuzz(mutated(sound), reader)
    assert any("FUZZ_SEED=" in note for note in caught.value.__notes__)
