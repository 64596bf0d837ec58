"""Columns and references: what was forged or changed is refused, and reads nothing else."""

from __future__ import annotations

import asyncio
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import strategies as st

from gcore_core.contract.errors import DataError, GcoreError
from gcore_core.contract.records import Ref
from gcore_core.contract.remote_store import MirrorRequest
from gcore_core.runtime.agreements import AgreementService
from gcore_core.runtime.messages import (
    BlobRequest,
    CollectRequest,
    DealRequest,
    ReleaseRequest,
    SlabRequest,
    SumRequest,
)
from gcore_core.store.client import StoreReader, StoreWriter, sign
from gcore_core.store.columns import Chunk, pack
from gcore_core.store.server import SlabService, StoreSpec
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Call, Service, encode

from .drawing import hostile, mutated, values
from .guarding import fuzz, guarded

pytestmark = pytest.mark.rest

SECRET = b"s" * 32
NODE = "agent.0"
ARRAYS = {
    "prompt_ids": np.arange(5, dtype=np.int32),
    "logp": np.linspace(-3, 0, 7, dtype=np.float32),
    "latents": np.ones((2, 3, 2), np.float16),
    "temperature": np.float32(0.7),
}
SOUND_CHUNK = st.lists(
    st.sets(st.sampled_from(sorted(ARRAYS)), min_size=1).map(
        lambda names: {n: np.asarray(ARRAYS[n]) for n in names}
    ),
    max_size=3,
).map(lambda records: b"".join(pack(records)))
WIDE_TABLE = encode({"a": ("<f4", 0, [[2**63 - 1] * 40_000])})


def test_a_chunk_is_read_within_its_bounds_or_refused() -> None:
    tables = st.sampled_from(
        [b"\x91" * 50_000, WIDE_TABLE, encode({"a": ("<f4", 0, [[0, 2**63]])})]
    )
    dtypes = st.sampled_from(["|V4", "<U1", "<M8", "|O8", "|S2", "<i9", "f4,i4", "\uff14"])
    tables |= dtypes.map(lambda dtype: encode({"a": (dtype, 0, [[1], None])}))
    examples = st.one_of(
        mutated(SOUND_CHUNK),
        st.binary(max_size=64),
        tables.map(lambda t: len(t).to_bytes(4, "little") + t + bytes(16)),
    )

    def check(raw: bytes) -> None:
        with guarded(len(raw)):
            try:
                chunk = Chunk(memoryview(raw))
                for slot in range(min(len(chunk), 5)):
                    for array in chunk[slot].values():
                        assert array.nbytes <= len(raw) and not array.flags.writeable
                        assert array.dtype.kind in "biufc"
            except DataError:
                pass

    fuzz(examples, check)


@contextmanager
def shared_slab(content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "1").write_bytes(content)
        (Path(directory) / "2").write_bytes(b"")
        yield Path(directory)


CONTENT = bytes(range(256)) * 16
SOUND_REF = st.builds(
    lambda offset, nbytes: msgspec.structs.replace(
        (
            bare := Ref(
                NODE,
                "1",
                offset,
                nbytes,
                xxhash.xxh3_64_intdigest(CONTENT[offset:][:nbytes]),
                b"",
                "|u1",
                (nbytes,),
            )
        ),
        mac=sign(SECRET, bare),
    ),
    st.integers(0, 4000),
    st.integers(0, 96),
)


def test_a_reference_with_any_changed_field_opens_nothing() -> None:
    def check(example: tuple[Ref, bytes]) -> None:
        ref, raw = example
        try:
            found = msgspec.msgpack.decode(raw, type=Ref)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return
        with guarded(len(raw)):
            if found == ref:
                assert (
                    reader.open_array(found).tobytes()
                    == CONTENT[ref.offset : ref.offset + ref.nbytes]
                )
                return
            for read in (reader.open, reader.open_array, reader.content):
                with pytest.raises(DataError, match="wrong MAC"):
                    read(found)

    examples = SOUND_REF.flatmap(
        lambda ref: st.tuples(st.just(ref), hostile(st.just(encode(ref))) | values(Ref).map(encode))
    )
    with shared_slab(CONTENT) as directory:
        reader = StoreReader(directory, NODE, SECRET)
        fuzz(examples, check)


def test_a_signed_reference_with_impossible_values_opens_nothing() -> None:
    """A writer of the run that is wrong, or was taken over: bounds, dtype and shape are checked
    beside the MAC.
    """

    def check(ref: Ref) -> None:
        ref = msgspec.structs.replace(ref, mac=sign(SECRET, ref))
        for read in (reader.open, reader.open_array):
            with guarded(1000, beside=4 << 20):
                try:
                    found: Any = read(ref)
                    if isinstance(found, np.ndarray):
                        assert found.nbytes == ref.nbytes and found.shape == ref.shape
                except DataError as error:
                    assert len(str(error)) < 500

    numbers = st.integers(-5, 5000) | st.integers(-(2**63), 2**64 - 1)
    shapes = st.lists(st.integers(-1, 9) | st.integers(0, 2**63), max_size=5).map(tuple)
    wild = st.builds(
        Ref,
        node=st.just(NODE),
        slab=st.sampled_from(["1", "2", "3", "", "..", "../1", "/etc/passwd", "a\0b"]),
        offset=numbers,
        nbytes=numbers | st.sampled_from([0, 8]),
        digest=st.just(xxhash.xxh3_64_intdigest(b"")) | numbers,
        mac=st.just(b""),
        dtype=st.sampled_from(["columns", "<f4", "<i9", "|O8", "<f16", "|u1", "<\uff144", "<c99"])
        | st.text(max_size=4),
        shape=shapes | st.just((0, 2**63)) | st.just((2**63,) * 50_000) | st.just((1,) * 65),
    )
    with shared_slab(CONTENT) as directory:
        reader = StoreReader(directory, NODE, SECRET)
        fuzz(wild, check)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_store_keeps_working_after_invalid_requests() -> None:
    """Each example asks a new store several things, then writes and reads an array through it."""
    kinds = {
        "slab": SlabRequest,
        "release": ReleaseRequest,
        "blob": BlobRequest,
        "fetch": Ref,
        "mirror": MirrorRequest,
    }
    asked = st.sampled_from(sorted(kinds)).flatmap(
        lambda method: st.tuples(
            st.just(method),
            values(kinds[method]).map(encode) | hostile(values(kinds[method]).map(encode)),
        )
    )

    async def asks(examples: list[tuple[str, bytes]]) -> None:
        async def emit(_: bytes) -> None: ...

        with tempfile.TemporaryDirectory() as directory:
            network, place = InlineNetwork(), Path(directory)
            spec = StoreSpec(
                node=NODE,
                directory=f"{place}/store",
                spill=f"{place}/spill",
                budget_bytes=1 << 18,
                patience_s=0.001,
            )
            slabs, service = SlabService(spec, SECRET), Service(NODE)
            slabs.register(service)
            await network.view(NODE).serve(NODE, service)
            for method, body in examples:
                with guarded(len(body), beside=8 << 20):
                    with suppress(GcoreError):
                        await service.handle(method, body, Call(lambda: None), emit)
            shard = frozenset({10_000})
            writer = StoreWriter(
                Path(spec.directory), NODE, SECRET, network.view("w").peer(NODE), "w"
            )
            (ref,) = await writer.put_blobs(1, shard, [np.arange(6, dtype=np.float32)])
            assert StoreReader(Path(spec.directory), NODE, SECRET).open_array(ref).tolist() == [
                0,
                1,
                2,
                3,
                4,
                5,
            ]
            slabs.close()

    with asyncio.Runner() as runner, files_of_at_most(1 << 20):
        fuzz(st.lists(asked, min_size=1, max_size=4), lambda examples: runner.run(asks(examples)))


def test_invalid_requests_of_a_shard_do_not_block_agreement_of_others() -> None:
    kinds = {"agree.sum": SumRequest, "agree.collect": CollectRequest, "agree.deal": DealRequest}
    kinds |= dict.fromkeys(("agree.ask", "agree.share"), CollectRequest)
    asked = st.sampled_from(sorted(kinds)).flatmap(
        lambda method: st.tuples(
            st.just(method), hostile(values(kinds[method]).map(encode)) | st.just(b"")
        )
    )
    sums = st.builds(
        SumRequest,
        st.sampled_from("ab"),
        st.integers(-1, 3),
        st.lists(st.floats(), max_size=2),
    )
    deals = st.builds(
        DealRequest,
        st.sampled_from("ab"),
        st.integers(-1, 3),
        st.lists(st.binary(), max_size=3),
    )

    async def asks(examples: list[tuple[str, bytes]]) -> None:
        async def emit(_: bytes) -> None: ...

        service = Service("supervisor")
        AgreementService(2).register(service)

        async def ask(method: str, body: bytes) -> bytes:
            return await service.handle(method, body, Call(lambda: None), emit)

        async def wrong(method: str, body: bytes) -> None:
            with suppress(GcoreError):
                await ask(method, body)

        tasks = [asyncio.ensure_future(wrong(method, body)) for method, body in examples]
        honest = [
            ask("agree.sum", encode(SumRequest("honest", shard, [1.0]))) for shard in range(2)
        ]
        assert await asyncio.gather(*honest) == [encode([2.0])] * 2
        for task in tasks:
            if not task.done():
                task.cancel()  # it waits for a shard that does not come
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            assert done is None or isinstance(done, asyncio.CancelledError), done

    sound = sums.map(lambda r: ("agree.sum", encode(r))) | deals.map(
        lambda r: ("agree.deal", encode(r))
    )
    with asyncio.Runner() as runner:
        fuzz(
            st.lists(asked | sound, min_size=1, max_size=5),
            lambda examples: runner.run(asks(examples)),
        )
