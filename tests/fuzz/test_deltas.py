"""Deltas of buckets: whatever comes is refused, or makes a bucket of the size asked for."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import strategies as st

from gcore_core.contract.errors import DataError
from gcore_core.runtime.store.deltas import HEADER_BYTES, Header, apply_delta, make_delta

from .drawing import mutated
from .guarding import fuzz, guarded

zstandard = pytest.importorskip("zstandard")

BASE = np.random.default_rng(0).integers(0, 256, 3001, np.uint8)
#: Frames that become much more than they are, with and without saying so.
BOMBS = [
    zstandard.ZstdCompressor().compress(bytes(1 << 26)),
    zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 26)),
    zstandard.ZstdCompressor().compress(bytes(len(BASE))) * 1000,
    # A frame that declares 2**62 bytes, and has none.
    bytes.fromhex("28b52ffdc0") + b"\x00" + (1 << 62).to_bytes(8, "little") + b"\x01\x00\x00",
]


def made(places: set[int]) -> bytes:
    new = BASE.copy()
    new[sorted(places)] ^= 1
    return make_delta(new, BASE)


def test_a_delta_makes_a_bucket_or_is_refused() -> None:
    sound = st.sets(st.integers(0, len(BASE) - 1)).map(made)
    framed = st.sampled_from(BOMBS).map(lambda frame: len(frame).to_bytes(4, "big") + frame)
    apply_delta(memoryview(made({1})), BASE, BASE.copy())  # which starts its threads

    def check(raw: bytes) -> None:
        around = np.full(len(BASE) + 200, 7, np.uint8)
        with guarded(len(raw)):
            with contextlib.suppress(DataError):
                apply_delta(memoryview(raw), BASE, around[100:-100])
        assert (around[:100] == 7).all() and (around[-100:] == 7).all()

    fuzz(st.one_of(mutated(sound), framed, mutated(framed), st.binary(max_size=64)), check)


def test_a_header_promises_no_more_than_its_bucket_or_is_refused() -> None:
    def check(raw: bytes) -> None:
        with guarded(len(raw)):
            try:
                header = Header.of(raw, 1000)
            except DataError:
                return
        assert header.form < 3 and 0 <= header.nbytes <= 1000

    fuzz(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), check)
