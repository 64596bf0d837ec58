"""Columns in shared memory: what goes in comes out, and whatever was tampered with is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gcore_core.errors import ContractError, DataError
from gcore_core.processes import store
from gcore_core.processes.agent import SlabService
from gcore_core.processes.columns import Chunk, pack
from gcore_core.processes.messages import SlabRequest, short_reason
from gcore_core.processes.service import Call
from gcore_core.processes.store import StoreReader, StoreWriter, sign
from gcore_core.records import FACTS_LIMIT_BYTES, HEADER_LIMIT_BYTES, Facts, Header, Ref

SECRET = b"s" * 32
Columns = dict[str, np.ndarray]

dtypes = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    npst.complex_number_dtypes(endianness="?", sizes=(64, 128)),
)


@st.composite
def chunks(draw: st.DrawFn) -> list[Columns]:
    """Records with some of three columns; a column has one dtype, its shape differs from record to record."""
    kinds = {name: draw(dtypes) for name in "abc"}
    shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    sizes = draw(st.integers(0, 4))
    return [
        {name: draw(npst.arrays(kinds[name], shapes)) for name in draw(st.sets(st.sampled_from("abc"), min_size=1))}
        for _ in range(sizes)
    ]


def joined(records: list[Columns]) -> memoryview:
    return memoryview(b"".join(pack(records)))


def assert_same(found: Mapping[str, np.ndarray], wanted: Columns) -> None:
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        got = found[name]
        assert (got.shape, got.dtype) == (array.shape, array.dtype)
        assert got.tobytes() == array.tobytes()  # bit for bit, NaN as well
        assert not got.flags.writeable


@settings(deadline=None, max_examples=40)
@given(chunks())
def test_every_dtype_and_shape_survives(records: list[Columns]) -> None:
    chunk = Chunk(joined(records))
    assert len(chunk) == len(records)
    for found, wanted in zip(chunk, records, strict=True):
        assert_same(found, wanted)


def test_scalars_empty_arrays_and_other_memory_orders_survive() -> None:
    grid = np.arange(12, dtype=np.int32).reshape(3, 4)
    records = [
        {"temperature": np.float32(0.7), "none": np.zeros((0, 3), np.float16), "turned": grid.T, "part": grid[:, ::2]},
        {"temperature": np.ones((), np.float32)},
    ]
    for found, wanted in zip(Chunk(joined(records)), records, strict=True):
        assert_same(found, {name: np.asarray(value) for name, value in wanted.items()})


def test_large_columns_survive() -> None:
    """Above a size, arrays are not joined before they are written."""
    records = [{"x": np.full(200_000, i, np.float32)} for i in range(3)]
    for found, wanted in zip(Chunk(joined(records)), records, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("bad", [np.array([object()]), np.array(["text"]), np.array(["2020"], "M8[D]")])
def test_only_numbers_can_be_stored(bad: np.ndarray) -> None:
    with pytest.raises(ContractError, match="column 'x' has dtypes"):
        pack([{"x": bad}])


# -- malformed chunks -------------------------------------------------------------------------------------------------


def read_all(chunk: bytes) -> list[dict[str, np.ndarray]]:
    """What a reader of every column gets; DataError is the only way to refuse."""
    try:
        opened = Chunk(memoryview(chunk))
        rows = [dict(record) for record in opened]
    except DataError:
        return []
    assert all(array.nbytes <= len(chunk) for row in rows for array in row.values())
    return rows


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_chunk_or_a_data_error(chunk: bytes) -> None:
    read_all(chunk)


@settings(deadline=None, max_examples=60)
@given(chunks(), st.data())
def test_a_chunk_with_changed_bytes_is_read_or_refused(records: list[Columns], data: st.DataObject) -> None:
    chunk = bytearray(joined(records))
    for _ in range(data.draw(st.integers(1, 4))):
        chunk[data.draw(st.integers(0, len(chunk) - 1))] = data.draw(st.integers(0, 255))
    read_all(bytes(chunk[: data.draw(st.integers(0, len(chunk)))]))


@settings(deadline=None, max_examples=200)
@given(
    table=st.dictionaries(
        st.text(max_size=3),
        st.tuples(
            st.sampled_from(["<f4", "|b1", "|O", "<U9", "<f3", "|V0", "(9,9)<f8", "<f4,<f8"]) | st.text(max_size=5),
            st.integers(-(2**63), 2**64 - 1) | st.integers(-8, 80),
            st.lists(
                st.none()
                | st.lists(st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 5) | st.just(2**40), max_size=70),
                max_size=4,
            ),
        ),
        max_size=3,
    )
)
def test_any_table_is_read_or_refused(table: dict[str, Any]) -> None:
    """Sizes of petabytes, negative ones, offsets outside, dtypes that are no numbers: DataError, no allocation."""
    read_all(with_table(table))


@pytest.mark.parametrize("shape", [[-1], [0, 2**63], [0, 2**62, 4], [0] * 70, [2**32, 2**32], [2**40], [17], [-2, -2]])
def test_a_shape_that_no_array_has_is_refused(shape: list[int]) -> None:
    with pytest.raises(DataError, match="column 'x' is malformed"):
        dict(Chunk(memoryview(with_table({"x": ("<f4", 0, [shape])})))[0])


def with_table(table: dict[str, Any]) -> bytes:
    head = msgspec.msgpack.encode(table)
    return len(head).to_bytes(4, "little") + head + bytes(-(len(head) + 4) % 8) + bytes(64)


# -- references -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def slabs(tmp_path: Path) -> SlabService:
    return SlabService(tmp_path / "store")


@pytest.fixture
async def writer(slabs: SlabService) -> StoreWriter:
    async def lease(nbytes: int) -> tuple[str, str]:
        slab = await slabs.slab(SlabRequest("rollout.0", nbytes), Call(lambda: None))
        return slab.name, slab.path

    return StoreWriter("node0", SECRET, lease)


@pytest.fixture
def reader(tmp_path: Path) -> StoreReader:
    return StoreReader(tmp_path / "store", "node0", SECRET)


RECORDS: list[Columns] = [{"ids": np.arange(5, dtype=np.int32), "logp": np.ones(5, np.float32)}]


async def test_a_reference_opens_in_another_process(writer: StoreWriter, reader: StoreReader) -> None:
    refs = [await writer.put(0, [{"ids": np.full(i, i, np.int32)} for i in range(3)]) for _ in range(3)]
    assert len({ref.offset for ref in refs}) == 3
    for ref in refs:
        for i, record in enumerate(reader.open(ref)):
            assert_same(record, {"ids": np.full(i, i, np.int32)})


@pytest.mark.parametrize(
    "change",
    [
        {"mac": b"\0" * 16},
        {"mac": b""},
        {"offset": 8},
        {"nbytes": 8},
        {"slab": "rollout.0-2"},
        {"slab": "../rollout.0-1"},
        {"node": "node1"},
        {"digest": 1},
        {"dtype": "<f4"},
        {"shape": (3,)},
    ],
)
async def test_a_reference_with_any_field_changed_is_refused(
    change: dict[str, Any], writer: StoreWriter, reader: StoreReader
) -> None:
    ref = await writer.put(0, RECORDS)
    with pytest.raises(DataError, match="wrong MAC"):
        reader.open(msgspec.structs.replace(ref, **change))


async def test_a_reference_of_another_run_is_refused(writer: StoreWriter, tmp_path: Path) -> None:
    other = StoreReader(tmp_path / "store", "node0", b"t" * 32)
    with pytest.raises(DataError, match="wrong MAC"):
        other.open(await writer.put(0, RECORDS))


def signed(ref: Ref, **changes: Any) -> Ref:
    bare = msgspec.structs.replace(ref, **changes)
    return msgspec.structs.replace(bare, mac=sign(SECRET, bare))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 1 << 40}, "outside its slab"),
        ({"offset": -8}, "outside its slab"),
        ({"nbytes": 1 << 40}, "outside its slab"),
        ({"offset": 8}, "the content is not what the reference says"),
        ({"node": "node1"}, "the reference is of node 'node1', this is 'node0'"),
    ],
)
async def test_even_a_signed_reference_is_checked(
    changes: dict[str, Any], message: str, writer: StoreWriter, reader: StoreReader
) -> None:
    ref = signed(await writer.put(0, RECORDS), **changes)
    with pytest.raises(DataError, match=message):
        reader.open(ref)


async def test_changed_content_is_refused(writer: StoreWriter, reader: StoreReader, tmp_path: Path) -> None:
    ref = await writer.put(0, RECORDS)
    with open(tmp_path / "store" / ref.slab, "r+b") as file:
        file.seek(ref.offset + ref.nbytes - 1)
        file.write(b"\xff")
    with pytest.raises(DataError, match="the content is not what the reference says"):
        reader.open(ref)


# -- slabs ------------------------------------------------------------------------------------------------------------


async def test_slabs_are_written_again_when_their_steps_are_over(
    writer: StoreWriter, reader: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SLAB_BYTES", 1 << 12)
    record = {"x": np.zeros(100, np.float64)}
    counts = set()
    for step in range(20):
        writer.release_before(step)
        refs = [await writer.put(step, [record]) for _ in range(10)]
        for ref in refs:
            assert_same(reader.open(ref)[0], record)
        counts.add(len(list((tmp_path / "store").iterdir())))
    assert counts == {2}  # five chunks of some 800 bytes each, ten chunks a step


async def test_records_of_a_step_that_is_not_over_stay(writer: StoreWriter, reader: StoreReader) -> None:
    """Two steps share a slab; it is written again only when both are over."""
    early, late = await writer.put(1, RECORDS), await writer.put(2, RECORDS)
    writer.release_before(2)
    await writer.put(2, [{"x": np.ones(9)}])
    assert_same(reader.open(late)[0], RECORDS[0])
    writer.release_before(3)
    again = await writer.put(3, [{"x": np.ones(9)}])
    assert (again.slab, again.offset) == (early.slab, 0)
    with pytest.raises(DataError, match="the content is not what"):
        reader.open(early)


async def test_a_chunk_larger_than_a_slab_gets_one_of_its_own(writer: StoreWriter, reader: StoreReader) -> None:
    large = {"x": np.zeros(store.SLAB_BYTES // 8 + 1)}
    ref = await writer.put(0, [large])
    assert ref.nbytes > store.SLAB_BYTES
    assert_same(reader.open(ref)[0], large)


async def test_a_slab_is_readable_by_its_owner_alone(writer: StoreWriter, tmp_path: Path) -> None:
    ref = await writer.put(0, RECORDS)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "store" / ref.slab).stat().st_mode & 0o777 == 0o600


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def worst_ref() -> Callable[[], Ref]:
    return lambda: Ref("node127", "rollout.511-65535", 2**40, 2**32, 2**64 - 1, bytes(16), "columns", ())


def test_a_header_of_the_worst_realistic_record_fits(worst_ref: Callable[[], Ref]) -> None:
    """Four rewards with readable names, one of them failed with a long reason in Greek."""
    names = ["exact_match", "format_penalty", "language_consistency", "judge"]
    header = Header(
        ordinal=2**40,
        sample=2**16,
        row=2**40,
        seed=2**63 - 1,
        attempt=1000,
        versions=(2**31, 2**31),
        n_prompt=2**20,
        n_actions=2**20,
        status="truncated",
        reason=short_reason("rewards.judge: " + "σφάλμα " * 1000),
        columns=worst_ref(),
        slot=2**16,
        rewards=dict.fromkeys(names, 0.123),
        reward_status=dict.fromkeys(names, "timeout"),
        advantage=-0.123,
        cost=1e9,
    )
    assert len(msgspec.msgpack.encode(header)) <= HEADER_LIMIT_BYTES


def test_facts_of_the_longest_record_fit() -> None:
    facts = Facts(2**63 - 1, 2**31, 2**31, 2**31, 1.23e300)
    assert len(msgspec.msgpack.encode(facts)) <= FACTS_LIMIT_BYTES
