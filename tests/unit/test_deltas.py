"""Deltas of buckets: what comes out has the bits that went in, and what is none is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from gcore_core.contract.errors import DataError
from gcore_core.runtime.store import deltas
from gcore_core.runtime.store.bulk import DeltaContent, MirroredContent
from gcore_core.runtime.store.deltas import (
    DELTA,
    HEADER_BYTES,
    PAUSE,
    WHOLE,
    DeltaSender,
    Header,
    apply_delta,
    make_delta,
    pays,
)

zstandard = pytest.importorskip("zstandard")

MIB = 1 << 20


def changed(base: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """Returns ``base`` with another value in a share of its bytes."""
    draw = np.random.default_rng(seed)
    made = base.copy()
    places = draw.random(len(base)) < share
    made[places] ^= draw.integers(1, 256, places.sum(), np.uint8)
    return made


def content(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_every_bit_comes_out(nbytes: int, share: float) -> None:
    base = content(nbytes)
    new = changed(base, share)
    kept = base.copy()
    target = np.full(nbytes, 7, np.uint8)
    apply_delta(memoryview(make_delta(new, base)), base, target)
    assert np.array_equal(target, new)
    assert np.array_equal(base, kept)


def test_little_that_changed_takes_little() -> None:
    """A piece in which nothing has changed takes its length alone."""
    base = content(8 * MIB)
    new = base.copy()
    new[5] ^= 1
    assert len(make_delta(new, base)) < 8 * MIB // 1000
    assert len(make_delta(base, base)) == 8 * 4


def test_what_is_none_is_refused() -> None:
    base = content(2 * MIB + 5)
    delta = make_delta(changed(base, 0.01), base)
    target = np.zeros(len(base), np.uint8)
    longer = zstandard.ZstdCompressor().compress(bytes(MIB + 1))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    undeclared = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(MIB))
    frame = zstandard.ZstdCompressor().compress(bytes(MIB))

    def packed(first: bytes) -> bytes:
        return b"".join(len(each).to_bytes(4, "big") + each for each in (first, b"", b""))

    for wrong, why in (
        (delta[:-1], "ends|does not end"),
        (delta + b"\0", "does not end"),
        (b"", "ends in the middle"),
        (b"\xff\xff\xff\xff" + delta[4:], "ends in the middle|does not end"),
        (packed(b"no frame"), "cannot be read"),
        (packed(longer), "another size"),
        (packed(bomb), "another size"),
        (packed(undeclared), "another size"),
        (packed(frame + frame), "cannot be read"),
        (packed(frame[:-3]), "cannot be read|another size"),
    ):
        with pytest.raises(DataError, match=why):
            apply_delta(memoryview(wrong), base, target)
    apply_delta(memoryview(packed(frame)), base, target)
    assert np.array_equal(target, base), "a frame of zeros changes nothing"


def test_a_header_promises_no_more_than_its_bucket() -> None:
    for header in (Header(WHOLE), Header(PAUSE), Header(DELTA, 100, 1, 2)):
        assert Header.of(header.packed(), 100) == header
    for wrong in (Header(DELTA, 101), Header(WHOLE, 1), Header(PAUSE, 1), Header(3), Header(255)):
        with pytest.raises(DataError, match="a header that makes no sense"):
            Header.of(wrong.packed(), 100)


def test_whether_it_pays_depends_on_the_network_and_on_what_has_changed() -> None:
    base = content(32 * MIB)
    similar = changed(base, 0.001)
    other = changed(base, 1.0)
    assert pays(similar, base, 1e3), "a slow network"
    assert not pays(other, base, 1e3), "nothing is saved"
    assert not pays(similar, base, 1e15), "a network without end"
    assert not pays(similar, base, 0), "an unknown one"


class Sending:
    """A trainer's memory of one bucket, and what is sent of it."""

    def __init__(self, place: Path) -> None:
        self.path = place / "policy.0-push"
        self.sender = DeltaSender(self.path)
        self.version = 0

    def push(self, new: np.ndarray, bytes_per_s: float = 0.0, always: bool = True) -> Header:
        self.version += 1
        self.path.write_bytes(new.tobytes())
        return self.header(len(new), bytes_per_s, always)

    def header(self, nbytes: int, bytes_per_s: float = 0.0, always: bool = True) -> Header:
        bucket = MirroredContent("agent.0", "policy.0", self.version, 0, 0, 0, nbytes)
        region = self.sender.find(DeltaContent(bucket, always, bytes_per_s, 0))
        assert region.nbytes == region.path.stat().st_size
        header = Header.of(region.path.read_bytes()[:HEADER_BYTES], nbytes)
        return header._replace(bucket=0)


def test_a_bucket_is_compared_with_that_of_the_push_before(tmp_path: Path) -> None:
    sending = Sending(tmp_path)
    first = content(2 * MIB)
    assert sending.push(first) == Header(WHOLE)
    header = sending.push(changed(first, 0.01))
    assert header.form == DELTA and 0 < header.nbytes < MIB // 2
    assert sending.header(2 * MIB) == header, "the same to whoever asks later"
    after = sending.push(changed(first, 0.02))
    assert after.base == header.made
    assert sending.push(content(MIB)) == Header(WHOLE), "a bucket of another size has no base"
    assert sending.push(changed(content(MIB), 1.0)) == Header(WHOLE), "nothing is saved"


def test_a_bucket_is_not_taken_for_another_in_whatever_order_they_are_asked_for(
    tmp_path: Path,
) -> None:
    """Deltas of a few buckets are kept, in as many files."""
    path = tmp_path / "policy.0-push"
    path.write_bytes(content(10 * MIB).tobytes())
    sender = DeltaSender(path)
    buckets = [MirroredContent("agent.0", "policy.0", 1, 0, i, i * MIB, MIB) for i in range(10)]
    for index in (4, 0, 4, 9, 1, 9, 5, 8, 4):
        region = sender.find(DeltaContent(buckets[index], True, 0.0, 0))
        header = Header.of(region.path.read_bytes()[:HEADER_BYTES], MIB)
        assert header.bucket == deltas.number_of(buckets[index]), index


async def test_the_delta_of_another_bucket_is_not_applied(tmp_path: Path) -> None:
    """As where another one has taken its place while somebody asked for it."""
    reader = deltas.DeltaReader(tmp_path / "mirror-0")
    base = np.zeros(2 * MIB, np.uint8)
    new = changed(base, 0.01)
    wanted, other = (
        MirroredContent("agent.0", "policy.0", 1, 0, i, 2 * i * MIB, 2 * MIB) for i in range(2)
    )
    delta = make_delta(new, base)
    before, after = (xxhash.xxh3_64_intdigest(array.data) for array in (base, new))
    for bucket in (wanted, other):
        header = Header(DELTA, len(delta), before, after, deltas.number_of(bucket))
        sent = header.packed() + delta

        async def read(ask: DeltaContent, memory: memoryview, sent: bytes = sent) -> None:
            memory[:] = sent[ask.start : ask.start + len(memory)]

        reader.keep(0, base.data)
        target = np.full(2 * MIB, 7, np.uint8)
        ask = DeltaContent(wanted, True, 0.0, 0)
        is_made = await reader.read(ask, "agent.0", read, target.data, lambda path: None)
        assert is_made == (bucket is wanted)
        assert np.array_equal(target, new) == is_made


def test_where_it_does_not_pay_the_memory_is_given_back(tmp_path: Path) -> None:
    sending = Sending(tmp_path)
    first = content(2 * MIB)
    sending.push(first)
    assert sending.push(changed(first, 0.01), 1e15, always=False) == Header(PAUSE)
    assert sending.push(changed(first, 0.02), 1e3, always=False) == Header(WHOLE)
    assert sending.push(changed(first, 0.03), 1e3, always=False).form == DELTA


def test_without_the_package_nobody_asks_and_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "zstd", lambda: None)
    sending = Sending(tmp_path)
    assert sending.push(content(MIB)) == sending.push(content(MIB)) == Header(PAUSE)
    assert not deltas.DeltaReader(tmp_path / "mirror-0").may_ask(0, 4 * MIB, "always")


def test_without_memory_there_is_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "_has_room", lambda nbytes: False)
    sending = Sending(tmp_path)
    assert sending.push(content(MIB)) == sending.push(content(MIB)) == Header(WHOLE)


def test_who_heard_that_it_does_not_pay_asks_again_after_some_pushes(tmp_path: Path) -> None:
    reader = deltas.DeltaReader(tmp_path / "mirror-0")
    assert not reader.may_ask(0, deltas.LEAST_BYTES - 1, "auto"), "too small to ask"
    assert reader.may_ask(0, 1, "always")
    assert not reader.may_ask(0, 4 * MIB, "never")
    reader._paused[0] = deltas.PAUSE_PUSHES
    asked = [reader.may_ask(0, 4 * MIB, "auto") for _ in range(deltas.PAUSE_PUSHES + 2)]
    assert asked == [False] * deltas.PAUSE_PUSHES + [True] * 2
    assert reader.may_ask(1, 4 * MIB, "auto"), "another bucket"


def test_a_rate_is_that_of_the_last_reads(tmp_path: Path) -> None:
    reader = deltas.DeltaReader(tmp_path / "mirror-0")
    assert reader.bytes_per_s("agent.0") == 0
    reader.measured("agent.0", 1000, 0.1)
    assert reader.bytes_per_s("agent.0") == 0, "too small to tell"
    for took_s in (8.0, *[2.0] * 8):
        reader.measured("agent.0", 4 * MIB, took_s)
    assert reader.bytes_per_s("agent.0") == 2 * MIB
    assert reader.bytes_per_s("agent.1") == 0
