"""Columns in shared memory: what goes in comes out, and whatever was tampered with is refused."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from gcore_nodes.bulk import StoredContent
from gcore_testing.simulation import run_virtual
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gcore_core.contract.errors import ContractError, DataError, WorkerDied
from gcore_core.contract.launching import Endpoint, Peer
from gcore_core.contract.records import HEADER_LIMIT_BYTES, Header, Ref
from gcore_core.runtime.messages import (
    RELEASE,
    ReleaseRequest,
    short_reason,
)
from gcore_core.store import client, server
from gcore_core.store.client import StoreReader, StoreWriter, copy_hashed, sign
from gcore_core.store.columns import Chunk, pack
from gcore_core.store.server import SLAB_BYTES, SlabService, StoreSpec
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Call, Service
from tests.support.joined_stores import joining, of_service, sent_bytes
from tests.support.wires import Wire, free_address

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
    """Records with some of three columns; a column has one dtype, its shape differs from record to
    record.
    """
    kinds = {name: draw(dtypes) for name in "abc"}
    shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    sizes = draw(st.integers(0, 4))
    return [
        {
            name: draw(npst.arrays(kinds[name], shapes))
            for name in draw(st.sets(st.sampled_from("abc"), min_size=1))
        }
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
        {
            "temperature": np.float32(0.7),
            "none": np.zeros((0, 3), np.float16),
            "turned": grid.T,
            "part": grid[:, ::2],
        },
        {"temperature": np.ones((), np.float32)},
    ]
    for found, wanted in zip(Chunk(joined(records)), records, strict=True):
        assert_same(found, {name: np.asarray(value) for name, value in wanted.items()})


def test_large_columns_survive() -> None:
    """Above a size, arrays are not joined before they are written."""
    records = [{"x": np.full(200_000, i, np.float32)} for i in range(3)]
    for found, wanted in zip(Chunk(joined(records)), records, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize(
    "bad", [np.array([object()]), np.array(["text"]), np.array(["2020"], "M8[D]")]
)
def test_only_numbers_can_be_stored(bad: np.ndarray) -> None:
    with pytest.raises(ContractError, match="column 'x' has dtypes"):
        pack([{"x": bad}])


# -- malformed chunks ------------------------------------------------------------------------------


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
def test_a_chunk_with_changed_bytes_is_read_or_refused(
    records: list[Columns], data: st.DataObject
) -> None:
    chunk = bytearray(joined(records))
    for _ in range(data.draw(st.integers(1, 4))):
        chunk[data.draw(st.integers(0, len(chunk) - 1))] = data.draw(st.integers(0, 255))
    read_all(bytes(chunk[: data.draw(st.integers(0, len(chunk)))]))


@settings(deadline=None, max_examples=200)
@given(
    table=st.dictionaries(
        st.text(max_size=3),
        st.tuples(
            st.sampled_from(["<f4", "|b1", "|O", "<U9", "<f3", "|V0", "(9,9)<f8", "<f4,<f8"])
            | st.text(max_size=5),
            st.integers(-(2**63), 2**64 - 1) | st.integers(-8, 80),
            st.lists(
                st.none()
                | st.lists(
                    st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 5) | st.just(2**40),
                    max_size=70,
                ),
                max_size=4,
            ),
        ),
        max_size=3,
    )
)
def test_any_table_is_read_or_refused(table: dict[str, Any]) -> None:
    """Sizes of petabytes, negative ones, offsets outside, dtypes that are no numbers: DataError, no
    allocation.
    """
    read_all(with_table(table))


@pytest.mark.parametrize(
    "shape", [[-1], [0, 2**63], [0, 2**62, 4], [0] * 70, [2**32, 2**32], [2**40], [17], [-2, -2]]
)
def test_a_shape_that_no_array_has_is_refused(shape: list[int]) -> None:
    with pytest.raises(DataError, match="column 'x' is malformed"):
        dict(Chunk(memoryview(with_table({"x": ("<f4", 0, [shape])})))[0])


def with_table(table: dict[str, Any]) -> bytes:
    head = msgspec.msgpack.encode(table)
    return len(head).to_bytes(4, "little") + head + bytes(-(len(head) + 4) % 8) + bytes(64)


# -- references ------------------------------------------------------------------------------------


@dataclass
class Node:
    """An agent's store without its process."""

    directory: Path
    service: SlabService
    network: InlineNetwork = field(default_factory=InlineNetwork)

    def writer(self, owner: str = "rollout.0-1") -> StoreWriter:
        return StoreWriter(
            self.directory, "agent.0", SECRET, self.network.view(owner).peer("agent.0"), owner
        )

    def slabs(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}

    async def settled(self) -> None:
        """Returns when every release that was sent has arrived."""
        while waiting := [
            task for task in asyncio.all_tasks() if task is not asyncio.current_task()
        ]:
            await asyncio.wait(waiting)


async def open_node(
    directory: Path,
    budget_bytes: int = 1 << 28,
    patience_s: float = 5.0,
    bulk: dict[str, str] | None = None,
) -> Node:
    spec = StoreSpec(
        node="agent.0",
        directory=str(directory / "store"),
        spill=str(directory / "spill"),
        budget_bytes=budget_bytes,
        patience_s=patience_s,
    )
    network, service = InlineNetwork(), Service("agent.0")
    node = Node(directory / "store", SlabService(spec, SECRET, joining(SECRET, bulk)), network)
    node.service.register(service)
    await network.view("agent.0").serve("agent.0", service)
    node.service.remote.open()
    return node


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    return await open_node(tmp_path)


@pytest.fixture
async def writer(node: Node) -> StoreWriter:
    return node.writer()


@pytest.fixture
def reader(tmp_path: Path) -> StoreReader:
    return StoreReader(tmp_path / "store", "agent.0", SECRET)


async def put_blob(
    writer: StoreWriter, step: int, shards: frozenset[int], array: np.ndarray
) -> Ref:
    (ref,) = await writer.put_blobs(step, shards, [array])
    return ref


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store lies: what is opened in memory is not read."""
    monkeypatch.setattr(
        client, "SHARED_MEMORY", tmp_path if request.param == "memory" else tmp_path / "nowhere"
    )


ALL = frozenset({0})
RECORDS: list[Columns] = [{"ids": np.arange(5, dtype=np.int32), "logp": np.ones(5, np.float32)}]


async def test_a_reference_opens_in_another_process(
    writer: StoreWriter, reader: StoreReader
) -> None:
    refs = [
        await writer.put(0, ALL, [{"ids": np.full(i, i, np.int32)} for i in range(3)])
        for _ in range(3)
    ]
    assert len({ref.offset for ref in refs}) == 3
    for ref in refs:
        for i, record in enumerate(reader.open(ref)):
            assert_same(record, {"ids": np.full(i, i, np.int32)})


@pytest.mark.parametrize(
    "change",
    [
        {"mac": b"\0" * 16},
        {"mac": b""},
        {"offset": 16},
        {"nbytes": 8},
        {"slab": "2"},
        {"slab": "../1"},
        {"node": "node1"},
        {"digest": 1},
        {"dtype": "<f4"},
        {"shape": (3,)},
    ],
)
async def test_a_reference_with_any_field_changed_is_refused(
    change: dict[str, Any], writer: StoreWriter, reader: StoreReader
) -> None:
    ref = await writer.put(0, ALL, RECORDS)
    with pytest.raises(DataError, match="wrong MAC"):
        reader.open(msgspec.structs.replace(ref, **change))


async def test_a_reference_of_another_run_is_refused(writer: StoreWriter, tmp_path: Path) -> None:
    other = StoreReader(tmp_path / "store", "agent.0", b"t" * 32)
    with pytest.raises(DataError, match="wrong MAC"):
        other.open(await writer.put(0, ALL, RECORDS))


def signed(ref: Ref, **changes: Any) -> Ref:
    bare = msgspec.structs.replace(ref, **changes)
    return msgspec.structs.replace(bare, mac=sign(SECRET, bare))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 1 << 40}, "outside its slab"),
        ({"offset": -8}, "outside its slab"),
        ({"nbytes": 1 << 40}, "outside its slab"),
        ({"offset": 16}, "the content is not what the reference says"),
        ({"offset": 0}, "the content is not what the reference says"),
        ({"node": "node1"}, "the reference is of node 'node1', this is 'agent.0'"),
    ],
)
@pytest.mark.usefixtures("place")
async def test_even_a_signed_reference_is_checked(
    changes: dict[str, Any], message: str, writer: StoreWriter, reader: StoreReader
) -> None:
    ref = signed(await writer.put(0, ALL, RECORDS), **changes)
    with pytest.raises(DataError, match=message):
        reader.open(ref)


async def test_content_that_changed_on_disk_is_refused(
    tmp_path: Path, reader: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the slab was spilled there."""
    for memory in ("nowhere", "store"):
        monkeypatch.setattr(client, "SHARED_MEMORY", tmp_path / memory)
        node = await open_node(tmp_path, budget_bytes=0, patience_s=0)
        ref = await node.writer().put(0, ALL, RECORDS)
        with open(tmp_path / "spill" / ref.slab, "r+b") as file:
            file.seek(ref.offset + ref.nbytes - 1)
            file.write(b"\xff")
        with pytest.raises(DataError, match="the content is not what the reference says"):
            StoreReader(node.directory, "agent.0", SECRET).open(ref)
        node.service.close()


async def test_content_in_memory_is_opened_without_reading_it(
    writer: StoreWriter, reader: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader._slabs, "_in_memory", True)
    ref, image = await writer.put(0, ALL, RECORDS), await put_blob(writer, 0, ALL, IMAGE)
    monkeypatch.setattr(client, "xxhash", None)
    assert_same(reader.open(ref)[0], RECORDS[0])
    assert_same({"x": reader.open_array(image)}, {"x": IMAGE})


@pytest.mark.usefixtures("place")
async def test_uncommitted_content_cannot_be_opened(
    writer: StoreWriter, reader: StoreReader
) -> None:
    room = await writer.reserve(0, ALL, 64, ("|u1", (64,)))
    digest = xxhash.xxh3_64_intdigest(bytes(64))
    forged = signed(room._bare, digest=digest + 1)
    with pytest.raises(DataError, match="the content is not what the reference says"):
        reader.open_array(forged)
    assert not reader.open_array(room.commit(digest)).any()


async def test_what_is_being_written_is_not_taken_for_what_lay_there_before(
    reader: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content in memory is known by its stamp alone, also to who comes late for an earlier step."""
    monkeypatch.setattr(reader._slabs, "_in_memory", True)
    node = await open_node(tmp_path, budget_bytes=1 << 12)
    writer = node.writer()
    before = await put_blob(writer, 0, ALL, np.zeros(64, np.uint8))
    assert not reader.open_array(before).any()
    writer.release({0: (0, 1)})
    await node.settled()
    room = await writer.reserve(1, ALL, 64, ("|u1", (64,)))
    assert (room._bare.slab, room._bare.offset) == (before.slab, before.offset)
    room.memory[:32] = bytes([1]) * 32
    with pytest.raises(DataError, match="the content is not what the reference says"):
        reader.open_array(before)


def test_a_mac_covers_every_field_and_its_boundaries(worst_ref: Callable[[], Ref]) -> None:
    ref = worst_ref()
    shifted = msgspec.structs.replace(ref, node=ref.node + "|1", slab=ref.slab.removeprefix("1|"))
    others: list[dict[str, Any]] = [
        {"node": "x"},
        {"slab": "x"},
        {"offset": 1},
        {"nbytes": 1},
        {"digest": 1},
        {"dtype": "<f4"},
        {"shape": (1,)},
    ]
    assert {name for change in others for name in change} == set(Ref.__struct_fields__) - {"mac"}
    changed = [msgspec.structs.replace(ref, **change) for change in others]
    assert len({sign(SECRET, some) for some in [ref, shifted, *changed]}) == len(others) + 2


@pytest.mark.parametrize(
    "change", [{"dtype": "<f8"}, {"dtype": "|O"}, {"shape": (2, 6)}, {"shape": (-2, -8)}]
)
async def test_a_signed_blob_of_another_shape_is_refused(
    change: dict[str, Any], writer: StoreWriter, reader: StoreReader
) -> None:
    ref = signed(await put_blob(writer, 0, ALL, np.zeros((2, 8), np.float32)), **change)
    with pytest.raises(DataError, match="64 bytes are no"):
        reader.open_array(ref)


# -- slabs -----------------------------------------------------------------------------------------

RECORD: Columns = {"x": np.arange(100, dtype=np.float64)}  # a chunk of some 800 bytes


async def test_slabs_are_reused_when_their_steps_are_over(
    reader: StoreReader, tmp_path: Path
) -> None:
    node = await open_node(tmp_path, budget_bytes=1 << 15)  # slabs of a page
    writer, counts = node.writer(), set()
    for step in range(20):
        writer.release({0: (0, step)})
        await node.settled()
        refs = [await writer.put(step, ALL, [RECORD]) for _ in range(8)]
        for ref in refs:
            assert_same(reader.open(ref)[0], RECORD)
        counts.add(frozenset(node.slabs()))
    assert counts == {frozenset("12")}  # four chunks each, eight chunks a step


@pytest.mark.usefixtures("place")
async def test_a_chunk_stays_until_all_shards_that_have_records_in_it_have_released_its_step(
    node: Node, writer: StoreWriter, reader: StoreReader
) -> None:
    ref = await writer.put(1, frozenset({0, 2}), [RECORD])
    other = node.writer("rollout.1-1")
    for shard, step in [(0, 2), (1, 9), (2, 1)]:
        writer.release({shard: (0, step)})
        await node.settled()
        assert (await other.put(5, frozenset({7}), [RECORD])).slab != ref.slab
    assert_same(reader.open(ref)[0], RECORD)
    writer.release({2: (0, 2)})
    await node.settled()
    assert (await other.put(6, frozenset({7}), [{"x": -RECORD["x"]}])).slab == ref.slab
    with pytest.raises(DataError, match="the content is not what the reference says"):
        reader.open(ref)


async def test_a_slab_is_kept_for_a_shard_that_got_records_later(
    node: Node, writer: StoreWriter
) -> None:
    first, second = (
        await writer.put(1, frozenset({0}), [RECORD]),
        await writer.put(1, frozenset({1}), [RECORD]),
    )
    writer.release({0: (0, 2)})
    await node.settled()
    again = {(await writer.put(step, ALL, [RECORD])).slab for step in (2, 3)}
    assert first.slab in again
    assert second.slab not in again


async def test_a_late_release_takes_nothing_back(node: Node, writer: StoreWriter) -> None:
    ref = await writer.put(1, frozenset({0, 1}), [RECORD])
    agent = node.network.view("rollout.0-1").peer("agent.0")
    for told in [{0: (0, 2)}, {0: (0, 1)}, {1: (0, 2)}]:
        await agent.call(RELEASE, ReleaseRequest("rollout.0-1", told))
    assert (await node.writer("rollout.1-1").put(2, ALL, [RECORD])).slab == ref.slab


async def test_steps_do_not_share_a_slab(writer: StoreWriter) -> None:
    early, late = await writer.put(1, ALL, [RECORD]), await writer.put(2, ALL, [RECORD])
    assert early.slab != late.slab
    assert (await writer.put(1, ALL, [RECORD])).slab == early.slab


async def test_content_of_a_dead_writer_stays_until_released_and_its_slab_is_reused(
    node: Node, writer: StoreWriter, reader: StoreReader
) -> None:
    ref = await writer.put(0, ALL, [RECORD])
    node.service.ended("rollout.0-1")
    successor = node.writer("rollout.0-2")
    assert (await successor.put(0, ALL, [RECORD])).slab != ref.slab
    assert_same(reader.open(ref)[0], RECORD)
    successor.release({0: (0, 1)})
    await node.settled()
    assert ref.slab in {(await successor.put(step, ALL, [RECORD])).slab for step in (1, 2)}


async def test_a_writer_gets_back_the_slab_it_has_mapped(node: Node) -> None:
    writers = [node.writer(f"rollout.{i}-1") for i in range(3)]
    before = [(await writer.put(0, ALL, [RECORD])).slab for writer in writers]
    for writer in writers:
        writer.release({0: (0, 1)})
    await node.settled()
    assert [(await writer.put(1, ALL, [RECORD])).slab for writer in reversed(writers)] == before[
        ::-1
    ]


async def test_a_living_writer_keeps_a_slab_until_it_has_seen_the_release(
    node: Node,
) -> None:
    """It may be in the middle of it, whatever others have heard."""
    first, second = node.writer("rollout.0-1"), node.writer("rollout.1-1")
    ref = await first.put(0, ALL, [RECORD])
    second.release({0: (0, 1)})
    await node.settled()
    assert (await second.put(1, ALL, [RECORD])).slab != ref.slab


async def test_a_controllers_successor_takes_over_its_leases(
    node: Node, reader: StoreReader
) -> None:
    """Epoch 0 of the shard had come to step 5; epoch 1 begins again at 3. What epoch 0 says from
    then on is void.
    """
    writer = node.writer()
    before = [await writer.put(step, ALL, [RECORD]) for step in (3, 4)]
    writer.release({0: (1, 3)})
    writer.release({0: (0, 9)})
    await node.settled()
    for ref in before:
        assert_same(reader.open(ref)[0], RECORD)
    again = await writer.put(3, ALL, [RECORD])
    assert again.slab == before[0].slab
    writer.release({0: (1, 4)})
    await node.settled()
    assert (await writer.put(4, ALL, [RECORD])).slab == before[1].slab
    assert (await writer.put(5, ALL, [RECORD])).slab == before[0].slab


async def test_a_step_that_is_over_cannot_be_written_to(writer: StoreWriter) -> None:
    writer.release({0: (0, 3)})
    with pytest.raises(ContractError, match="its shards have released step 2"):
        await writer.put(2, ALL, RECORDS)


async def test_a_chunk_larger_than_a_slab_gets_its_own_slab(
    writer: StoreWriter, reader: StoreReader
) -> None:
    large = {"x": np.zeros(SLAB_BYTES // 8 + 1)}
    ref = await writer.put(0, ALL, [large])
    assert ref.nbytes > SLAB_BYTES
    assert_same(reader.open(ref)[0], large)


async def test_content_written_in_place_opens_like_a_copy(
    writer: StoreWriter, reader: StoreReader
) -> None:
    wanted = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    room = await writer.reserve(0, ALL, wanted.nbytes, ("<f4", wanted.shape))
    np.frombuffer(room.memory, np.float32).reshape(wanted.shape)[:] = wanted
    found = reader.open_array(room.commit())
    assert_same({"x": found}, {"x": wanted})


async def test_a_slab_is_readable_by_its_owner_alone(writer: StoreWriter, tmp_path: Path) -> None:
    ref = await writer.put(0, ALL, RECORDS)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "store" / ref.slab).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("sizes", [[0], [1, 0, 7], [3 << 20], [5, 1 << 20, 11, (256 << 10) + 1]])
def test_a_hash_taken_while_copying_is_that_of_the_whole(sizes: list[int]) -> None:
    random = np.random.default_rng(0)
    parts = [random.bytes(size) for size in sizes]
    target = bytearray(sum(sizes))
    assert copy_hashed(parts, memoryview(target)) == xxhash.xxh3_64_intdigest(b"".join(parts))
    assert bytes(target) == b"".join(parts)


# -- blobs -----------------------------------------------------------------------------------------

IMAGE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


async def test_an_image_of_many_records_is_stored_once(node: Node, reader: StoreReader) -> None:
    first, second = node.writer("rollout.0-1"), node.writer("rollout.1-1")
    refs = {await put_blob(writer, 0, ALL, IMAGE.copy()) for writer in [first] * 16 + [second]}
    assert len(refs) == 1
    assert_same({"x": reader.open_array(refs.pop())}, {"x": IMAGE})


async def test_a_blob_already_on_the_node_takes_no_additional_room(
    node: Node, reader: StoreReader
) -> None:
    """It is written before the agent is asked; the next blob lies where it lay."""
    first, second = node.writer("rollout.0-1"), node.writer("rollout.1-1")
    shared, own = await put_blob(first, 0, ALL, IMAGE), IMAGE + 1
    assert await put_blob(second, 0, ALL, IMAGE.copy()) == shared
    ref = await put_blob(second, 0, ALL, own)
    assert (ref.slab != shared.slab, ref.offset) == (True, shared.offset)
    assert_same({"x": reader.open_array(ref)}, {"x": own})
    assert_same({"x": reader.open_array(shared)}, {"x": IMAGE})


async def test_blobs_are_hashed_once_and_cost_one_call(
    writer: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, copied = list[int](), client.copy_hashed
    monkeypatch.setattr(
        client, "copy_hashed", lambda parts, target: hashed.append(1) or copied(parts, target)
    )
    asked, insist = list[str](), client.insist

    async def counted(peer: Peer, endpoint: Endpoint[Any, Any], *rest: Any) -> Any:
        asked.append(endpoint.name)
        return await insist(peer, endpoint, *rest)

    monkeypatch.setattr(client, "insist", counted)
    for _ in range(2):  # the second time they are known
        first, second, again = await writer.put_blobs(0, ALL, [IMAGE, IMAGE + 1, IMAGE.copy()])
        assert first == again != second
    assert (len(hashed), asked) == (2, ["slab", "blob"])


async def test_the_same_bytes_in_another_shape_or_dtype_are_another_blob(
    writer: StoreWriter, reader: StoreReader
) -> None:
    arrays = [
        IMAGE,
        IMAGE.reshape(16, 3),
        IMAGE.view(np.int8),
        IMAGE.astype(np.float32),
        IMAGE[:, ::2],
        IMAGE[:0],
    ]
    refs = [await put_blob(writer, 0, ALL, array) for array in arrays]
    assert len(set(refs)) == len(arrays)
    for ref, array in zip(refs, arrays, strict=True):
        assert_same({"x": reader.open_array(ref)}, {"x": array})


async def test_content_with_a_colliding_hash_is_not_mistaken_for_another(
    writer: StoreWriter, reader: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.xxhash, "xxh3_64_intdigest", lambda content: 7)
    monkeypatch.setattr(
        client, "copy_hashed", lambda parts, target: target.__setitem__(slice(None), *parts) or 7
    )
    for value in (1, 2, 1, 2):
        image = np.full(64, value, np.uint8)
        assert_same({"x": reader.open_array(await put_blob(writer, 0, ALL, image))}, {"x": image})


async def test_a_blob_stays_while_a_later_step_uses_it(node: Node, reader: StoreReader) -> None:
    writer, other = node.writer(), node.writer("rollout.1-1")
    ref = await put_blob(writer, 0, ALL, IMAGE)
    assert await put_blob(other, 1, ALL, IMAGE) == ref
    for each in (writer, other):
        each.release({0: (0, 1)})
    await node.settled()
    assert await put_blob(writer, 2, ALL, IMAGE + 1) != ref
    assert_same({"x": reader.open_array(ref)}, {"x": IMAGE})
    assert await put_blob(other, 1, ALL, IMAGE) == ref
    for each in (writer, other):
        each.release({0: (0, 2)})
    await node.settled()
    assert (await put_blob(node.writer("rollout.2-1"), 2, ALL, IMAGE + 2)).slab == ref.slab


async def test_only_numbers_can_be_a_blob(writer: StoreWriter) -> None:
    with pytest.raises(ContractError, match="a blob has dtype |O; it must be of numbers or bools"):
        await put_blob(writer, 0, ALL, np.array([object()]))


# -- a full store ----------------------------------------------------------------------------------


def test_a_full_store_makes_a_writer_wait_until_something_is_freed(
    tmp_path: Path, reader: StoreReader
) -> None:
    async def fill() -> None:
        node = await open_node(tmp_path, budget_bytes=1 << 15, patience_s=3600)
        writer = node.writer()
        refs = [await writer.put(step, ALL, [RECORD]) for step in range(8)]
        waits = asyncio.ensure_future(writer.put(8, ALL, [RECORD]))
        await asyncio.sleep(3000.5)
        assert not waits.done()
        assert len(node.slabs()) == 8
        for ref in refs:
            assert_same(reader.open(ref)[0], RECORD)
        assert node.service.notes() == [
            "the store is full (0.03125 MiB, launcher.config.store_gib): generators wait, "
            f"and after 3600 s they write to {tmp_path / 'spill'}"
        ]
        writer.release({0: (0, 1)})
        assert (await waits).slab == refs[0].slab
        assert asyncio.get_running_loop().time() == 3000.5
        assert node.service.notes() == []

    run_virtual(fill())


async def test_content_without_room_goes_to_disk_and_is_removed_when_released(
    tmp_path: Path, reader: StoreReader
) -> None:
    node = await open_node(tmp_path, budget_bytes=1 << 15, patience_s=0)
    writer, spill = node.writer(), tmp_path / "spill"
    refs = [await writer.put(step, ALL, [RECORD]) for step in range(12)]
    assert {path.name for path in spill.iterdir()} == {ref.slab for ref in refs[8:]}
    for ref in refs:
        assert_same(reader.open(ref)[0], RECORD)
    writer.release({0: (0, 12)})
    await node.settled()
    assert list(spill.iterdir()) == []
    assert node.slabs() == {ref.slab for ref in refs[:8]}
    assert (await writer.put(12, ALL, [RECORD])).slab in node.slabs()
    node.service.close()
    assert not spill.exists()


async def test_free_slabs_that_are_too_small_make_room_for_a_larger_one(
    tmp_path: Path, reader: StoreReader
) -> None:
    node = await open_node(tmp_path, budget_bytes=1 << 15, patience_s=3600)
    writer = node.writer()
    for step in range(8):
        await writer.put(step, ALL, [RECORD])
    writer.release({0: (0, 8)})
    await node.settled()
    large = {"x": np.zeros(3000)}  # six pages
    assert_same(reader.open(await writer.put(8, ALL, [large]))[0], large)
    assert len(node.slabs()) == 3  # two of a page are left
    assert sum(path.stat().st_size for path in node.directory.iterdir()) == 1 << 15


# -- other nodes -----------------------------------------------------------------------------------


@dataclass
class Nodes:
    """Two nodes: what the first has, the second may copy over ``wire``, from ``sender``."""

    writer: StoreWriter
    reader: StoreReader
    far: Node
    wire: Wire
    sender: Node

    def sent_bytes(self) -> int:
        return sent_bytes(self.sender.service)

    async def fetch(self, ref: Ref) -> Ref:
        return await self.far.service.fetch(ref, Call(lambda: None))


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    with Wire(free_address(), free_address()).opened() as wire:
        near = await open_node(tmp_path / "near", bulk={"agent.0": wire.target})
        spec = StoreSpec(
            node="agent.1", directory=str(tmp_path / "far"), spill=str(tmp_path / "spill")
        )
        network, service = InlineNetwork(), Service("agent.1")
        slabs = SlabService(spec, SECRET, joining(SECRET, {"agent.0": wire.address}))
        far = Node(tmp_path / "far", slabs, network)
        far.service.register(service)
        await network.view("agent.1").serve("agent.1", service)
        agent = network.view("policy.0").peer("agent.1")
        reader = StoreReader(tmp_path / "far", "agent.1", SECRET, agent)
        yield Nodes(near.writer(), reader, far, wire, near)
        far.service.close()
        near.service.close()


def item(ref: Ref, **media: Ref) -> Header:
    return Header(ordinal=0, sample=0, row=0, seed=0, columns=ref, media=media)


LARGE: Columns = {"x": np.arange(700_000, dtype=np.float64)}  # more than five pieces


async def test_a_pull_resumes_where_its_connection_broke(nodes: Nodes) -> None:
    ref = await nodes.writer.put(0, ALL, [LARGE])
    image = await put_blob(nodes.writer, 0, ALL, IMAGE)
    nodes.wire.cut_after = 3 << 20
    ((columns, media),) = await nodes.reader.records([item(ref, image=image)])
    assert_same(columns, LARGE)
    assert_same(media, {"image": IMAGE})
    assert nodes.wire.connections > 1
    assert nodes.wire.nbytes < 1.5 * ref.nbytes


async def test_many_readers_share_one_copy(nodes: Nodes) -> None:
    ref = await nodes.writer.put(0, ALL, [LARGE])
    for found in [*await asyncio.gather(*(nodes.reader.records([item(ref)]) for _ in range(4)))]:
        assert_same(found[0][0], LARGE)
    assert nodes.sent_bytes() == ref.nbytes
    assert len(nodes.far.slabs()) == 1


async def test_a_silent_connection_ends_the_pull(nodes: Nodes) -> None:
    nodes.wire.hold_after = 0
    of_service(nodes.far.service).client._patience_s = 0.4
    ref = await nodes.writer.put(0, ALL, [LARGE])
    with pytest.raises(WorkerDied, match=f"agent.0: it sent 0 of {ref.nbytes} bytes and no more"):
        await nodes.fetch(ref)
    assert nodes.far.slabs() == set()


async def test_a_node_that_is_gone_is_waited_for_once(nodes: Nodes) -> None:
    """Its silence is no loss of the reader's own agent, which would be asked again and again."""
    nodes.sender.service.close()
    of_service(nodes.far.service).client._patience_s = 0.4
    pulls: list[Ref] = []
    pull = nodes.far.service._pull

    async def counted(ref: Ref) -> Ref:
        pulls.append(ref)
        return await pull(ref)

    nodes.far.service._pull = counted  # type: ignore[method-assign]
    ref = Ref("agent.0", "1", 8, 100, 0, b"", "columns", ())
    with pytest.raises(WorkerDied, match="agent.0: it sent 0 of 100 bytes and no more"):
        await nodes.reader.arrays([signed(ref)])
    assert len(pulls) == 1


async def test_content_altered_in_transit_comes_again(nodes: Nodes) -> None:
    nodes.wire.flip_at = 2 << 20
    ref = await nodes.writer.put(0, ALL, [LARGE])
    assert_same((await nodes.reader.records([item(ref)]))[0][0], LARGE)
    assert nodes.wire.connections > 1


async def test_content_that_is_not_what_its_reference_says_is_refused(nodes: Nodes) -> None:
    ref = await nodes.writer.put(0, ALL, [LARGE])
    with open(nodes.sender.directory / ref.slab, "r+b") as file:
        file.seek(ref.offset + ref.nbytes - 1)
        file.write(b"x")
    with pytest.raises(
        DataError, match="node agent.0: what came from another node is not what the reference says"
    ):
        await nodes.reader.records([item(ref)])
    assert nodes.far.slabs() == set()


@pytest.mark.parametrize("change", [{"mac": bytes(16)}, {"nbytes": 8}, {"node": "agent.9"}])
async def test_a_forged_reference_is_not_pulled(change: dict[str, Any], nodes: Nodes) -> None:
    ref = msgspec.structs.replace(await nodes.writer.put(0, ALL, [LARGE]), **change)
    with pytest.raises(DataError, match="wrong MAC"):
        await nodes.reader.records([item(ref)])
    assert nodes.wire.connections == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nbytes": 1 << 40}, "outside its slab"),
        ({"offset": -8}, "outside its slab"),
        ({"slab": "99"}, "it cannot be opened"),
        ({"slab": ""}, "it cannot be opened"),
        ({"node": "agent.7"}, "the reference is of node 'agent.7', this is 'agent.0'"),
        ({"mac": bytes(16)}, "wrong MAC"),
    ],
)
async def test_a_node_sends_nothing_outside_a_reference(
    changes: dict[str, Any], message: str, nodes: Nodes
) -> None:
    ref = await nodes.writer.put(0, ALL, RECORDS)
    bad = signed(ref, **changes)
    if "mac" in changes:
        bad = msgspec.structs.replace(ref, **changes)
    memory = memoryview(bytearray(8))
    with pytest.raises(DataError, match=message):
        await of_service(nodes.far.service).client.read(
            "agent.0", StoredContent(bad), memory, lambda: None
        )
    assert nodes.sent_bytes() == 0
    assert bytes(memory) == bytes(8)


async def test_the_oldest_copies_make_room_first_and_open_ones_stay(nodes: Nodes) -> None:
    nodes.far.service._spec = msgspec.structs.replace(
        nodes.far.service._spec, budget_bytes=12 << 20
    )  # two copies
    refs = [await nodes.writer.put(0, ALL, [{"x": LARGE["x"] + i}]) for i in range(3)]
    opened = [(await nodes.reader.records([item(ref)]))[0][0] for ref in refs]
    assert len(nodes.far.slabs()) == 2
    for i, columns in enumerate(opened):
        assert_same(columns, {"x": LARGE["x"] + i})
    await nodes.reader.records([item(refs[0])])
    assert nodes.sent_bytes() == 4 * refs[0].nbytes


def with_room_for_two(nodes: Nodes) -> None:
    """Lets the reader's node have two copies of ``LARGE``, and no more."""
    spec = nodes.far.service._spec
    nodes.far.service._spec = msgspec.structs.replace(spec, budget_bytes=12 << 20)


def inodes(node: Node) -> set[int]:
    return {path.stat().st_ino for path in node.directory.iterdir()}


@pytest.mark.parametrize("change", [0, 100_000, -100_000])
async def test_a_copy_takes_the_memory_of_one_that_nobody_reads(nodes: Nodes, change: int) -> None:
    with_room_for_two(nodes)
    large = [{"x": LARGE["x"] + i} for i in range(2)]
    large += [{"x": np.arange(700_000 + change, dtype=np.float64) + i} for i in range(2, 6)]
    refs = [await nodes.writer.put(0, ALL, [columns]) for columns in large]
    assert_same((await nodes.reader.records([item(refs[0])]))[0][0], large[0])
    before = inodes(nodes.far)
    for ref, columns in zip(refs[1:], large[1:], strict=True):
        assert_same((await nodes.reader.records([item(ref)]))[0][0], columns)
        assert nodes.far.service._used_bytes <= 12 << 20
        assert before & inodes(nodes.far)  # one was given on, and not removed
        before = inodes(nodes.far)
    sizes = [path.stat().st_size for path in nodes.far.directory.iterdir()]
    assert nodes.far.service._used_bytes == sum(sizes)
    assert_same((await nodes.reader.records([item(refs[0])]))[0][0], large[0])


async def test_a_reference_to_a_copy_whose_memory_was_given_on_opens_nothing(nodes: Nodes) -> None:
    with_room_for_two(nodes)
    refs = [await nodes.writer.put(0, ALL, [{"x": LARGE["x"] + i}]) for i in range(3)]
    copies = [await nodes.fetch(ref) for ref in refs]
    with pytest.raises(DataError, match="cannot be opened"):
        nodes.reader.open(copies[0])
    # Who has opened the file before it got its new name, and maps it only now:
    directory = nodes.far.directory
    (directory / copies[2].slab).rename(directory / copies[0].slab)
    with pytest.raises(DataError, match="not what the reference says"):
        nodes.reader.open(copies[0])


async def test_the_stamp_of_a_copy_goes_before_its_memory_is_given_on(nodes: Nodes) -> None:
    copy = await nodes.fetch(await nodes.writer.put(0, ALL, [LARGE]))
    (slab,) = nodes.far.service._free
    assert nodes.far.service._move_on(slab)
    assert slab.name != copy.slab
    file = (nodes.far.directory / slab.name).read_bytes()
    assert file[: client.STAMP_BYTES] != copy.digest.to_bytes(client.STAMP_BYTES, "little")


async def test_a_copy_with_a_view_is_not_given_on_until_the_view_is_gone(nodes: Nodes) -> None:
    copies = [await nodes.fetch(await nodes.writer.put(0, ALL, [LARGE])) for _ in range(2)]
    slabs = list(nodes.far.service._free)
    column = nodes.reader.open(copies[0])[0]["x"][5:9]
    assert not nodes.far.service._move_on(slabs[0])
    assert column.tolist() == [5, 6, 7, 8]
    del column
    gc.collect()
    slabs[0].copy_of = b"again"
    assert nodes.far.service._move_on(slabs[0])


async def test_a_copy_without_memory_goes_to_disk(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = server.allocate  # type: ignore[attr-defined]

    def only_on_disk(path: Path, nbytes: int, kind: str) -> None:
        if not path.is_symlink():
            raise DataError("no slab can be made")
        allocate(path, nbytes, kind)

    ref = await nodes.writer.put(0, ALL, [LARGE])
    monkeypatch.setattr(server, "allocate", only_on_disk)
    assert_same((await nodes.reader.records([item(ref)]))[0][0], LARGE)
    (name,) = nodes.far.slabs()
    assert (nodes.far.directory / name).is_symlink()
    assert nodes.far.service._used_bytes == 0
    assert_same((await nodes.reader.records([item(ref)]))[0][0], LARGE)
    assert nodes.sent_bytes() == ref.nbytes


# -- sizes -----------------------------------------------------------------------------------------


@pytest.fixture
def worst_ref() -> Callable[[], Ref]:
    return lambda: Ref(
        "node127", "rollout.511-65535", 2**40, 2**32, 2**64 - 1, bytes(16), "columns", ()
    )


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
        cost=1e9,
        prompt_digest=2**64 - 1,
    )
    assert len(msgspec.msgpack.encode(header)) <= HEADER_LIMIT_BYTES
