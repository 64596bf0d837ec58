"""Every message between processes, read from bytes that nobody should have sent."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from typing import Any

import msgspec
import pytest
from gcore_nodes import bulk
from gcore_nodes import messages as node_messages
from hypothesis import strategies as st

from gcore_core import __version__
from gcore_core.contract import records, weight_transfer
from gcore_core.contract.errors import ContractError, WorkerDied
from gcore_core.contract.launching import Endpoint
from gcore_core.node import agent
from gcore_core.node.spawn import read_spec
from gcore_core.runtime import messages
from gcore_core.store.server import StoreSpec
from gcore_core.wire.frames import CALL, Frame
from gcore_core.wire.framing import framed
from gcore_core.wire.proof import Greeting
from gcore_core.wire.service import (
    Call,
    RemoteFailure,
    Service,
    decoded,
    encode,
    from_wire,
    to_wire,
)
from gcore_core.wire.sockets import RpcNetwork

from .drawing import hostile, values
from .guarding import fuzz, guarded

pytestmark = pytest.mark.rest

SECRET = b"s" * 32
ABSTRACT = {"Message"}


def structs(module: Any) -> dict[str, type[msgspec.Struct]]:
    found = vars(module).items()
    return {
        n: k
        for n, k in found
        if isinstance(k, type) and issubclass(k, msgspec.Struct) and n not in ABSTRACT
    }


KINDS: dict[str, Any] = {
    **structs(records),
    **structs(messages),
    **structs(agent),
    **structs(weight_transfer),
    **structs(bulk),
    **structs(node_messages),
    "StoreSpec": StoreSpec,
    "RemoteFailure": RemoteFailure,
    "Greeting": Greeting,
    "frames": list[Frame],
    "sums": list[float],
    "references": list[records.Ref],
    "scores": list[records.RecordScore],
}
KINDS = {
    name: kind
    for name, kind in KINDS.items()
    if not (isinstance(kind, type) and kind is msgspec.Struct)
}


REF = Endpoint("ref", records.Ref, records.Ref)


async def echoed(service: Service, method: str, body: bytes) -> bytes:
    async def emit(_: bytes) -> None: ...

    return await service.handle(method, body, Call(lambda: None), emit)


@pytest.fixture(scope="module")
def service() -> Service:
    """Answers each kind of message with what it read."""
    made = Service("worker.3")

    async def echo(request: Any, call: Call) -> Any:
        return request

    for name, kind in KINDS.items():
        made.add(Endpoint(name, kind, kind), echo)
    return made


KIND_AND_BODY = st.sampled_from(sorted(KINDS)).flatmap(
    lambda name: st.tuples(st.just(name), hostile(values(KINDS[name]).map(encode)))
)
KIND_AND_SOUND = st.sampled_from(sorted(KINDS)).flatmap(
    lambda name: st.tuples(st.just(name), values(KINDS[name]).map(encode))
)


def test_every_kind_of_message_is_fuzzed() -> None:
    assert {
        "GenerateRequest",
        "Bucket",
        "ReadRequest",
        "WorkerSpec",
        "AgentSpec",
        "Ref",
        "Header",
        "SlabRequest",
    } <= KINDS.keys()


def test_a_message_is_read_whole_or_refused(service: Service) -> None:
    """What was read is written as it was understood, and understood so again."""
    with asyncio.Runner() as runner:

        def check(example: tuple[str, bytes]) -> None:
            name, body = example
            with guarded(len(body)):
                try:
                    found = runner.run(echoed(service, name, body))
                except ContractError as error:
                    assert f"worker.3: malformed request '{name}'" in str(error)
                    return
            assert runner.run(echoed(service, name, found)) == found

        fuzz(KIND_AND_BODY, check)


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa0"], ids=["arrays", "maps"])
@pytest.mark.parametrize("name", ["Nothing", "PlanRequest", "RemoteFailure"])
async def test_very_deep_nesting_is_refused(name: str, level: bytes, service: Service) -> None:
    """In a field that a newer version may have added, and in one that may hold anything."""
    head = {
        "Nothing": b"\x91",
        "PlanRequest": b"\x93\x01\x01",
        "RemoteFailure": b"\x96" + b"\xa0" * 5 + b"\x81\xa0",
    }
    with pytest.raises(ContractError, match=f"malformed request '{name}'"):
        await echoed(service, name, head[name] + level * 100_000 + b"\xc0")


def test_a_valid_message_survives_a_round_trip(service: Service) -> None:
    with asyncio.Runner() as runner:

        def check(example: tuple[str, bytes]) -> None:
            name, body = example
            assert runner.run(echoed(service, name, body)) == body

        fuzz(KIND_AND_SOUND, check)


def test_a_spec_is_read_whole_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"WorkerSpec": messages.WorkerSpec, "AgentSpec": agent.AgentSpec}
    examples = st.sampled_from(sorted(kinds)).flatmap(
        lambda name: st.tuples(st.just(name), hostile(values(kinds[name]).map(encode)))
    )

    def check(example: tuple[str, bytes]) -> None:
        name, body = example
        with tempfile.TemporaryFile() as file:
            file.write(body)
            file.seek(0)
            monkeypatch.setattr(
                sys, "argv", ["worker", "--fd", str(os.dup(file.fileno())), "--lifeline", "7"]
            )
            with guarded(len(body)):
                try:
                    spec, lifeline = read_spec("-", kinds[name])
                except ContractError as error:
                    assert "malformed spec" in str(error)
                    return
            assert lifeline == 7 and isinstance(spec, kinds[name])

    fuzz(examples, check)


def test_an_error_with_any_content_survives_the_wire() -> None:
    """Text that no codec takes, facts that are no messages, names of the error's own parts."""
    texts = st.text(st.characters(), max_size=20)  # lone surrogates too, as file names have
    facts = st.dictionaries(
        st.sampled_from(["what", "where", "self", "process", "x"]),
        PLAIN_FACT | texts | st.just(object()),
        max_size=3,
    )

    def check(example: tuple[str, dict[str, Any]]) -> None:
        text, told = example
        error = ContractError(text, where=text, why=text, todo=text)
        error.facts = told
        with guarded(20_000):
            found = from_wire(
                decoded(
                    msgspec.msgpack.Decoder(RemoteFailure), encode(to_wire(error, "w.0")), "-", "-"
                )
            )
        assert type(found) is ContractError
        assert found.what == text.encode("utf-8", "replace").decode()
        assert "process" in found.facts

    fuzz(st.tuples(texts, facts), check)


PLAIN_FACT = st.recursive(
    st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=2), max_leaves=4
)


async def test_garbage_closes_its_connection_and_the_next_one_works() -> None:
    """The bytes come over a real socket, with the run's secret."""
    draw = random.Random(7)

    async def answer(request: records.Ref, call: Call) -> records.Ref:
        return request

    sound = encode(
        [Frame(1, CALL, "ref", msgspec.Raw(encode(records.Ref("n", "1", 0, 0, 0, b""))))]
    )
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="gc-") as directory:
        addresses = {"worker.3": f"unix:{directory}/s"}
        server, client = RpcNetwork(addresses, SECRET), RpcNetwork(addresses, SECRET)
        service = Service("worker.3")
        service.add(REF, answer)
        await server.serve("worker.3", service)
        try:
            for _ in range(30):
                raw = bytearray(sound)
                for _ in range(draw.randint(1, 6)):
                    raw[draw.randrange(len(raw))] = draw.randrange(256)
                reader, writer = await asyncio.open_unix_connection(f"{directory}/s")
                greeting = encode(Greeting(SECRET, __version__, "-"))
                for message in (greeting, bytes(raw), b"\xc1"):  # which msgpack reserves
                    writer.write(framed(message))
                async with asyncio.timeout(10):
                    await reader.read()
                writer.close()
                asked = records.Ref("n", "2", 0, 0, 0, b"")
                assert await client.peer("worker.3").call(REF, asked) == asked
        finally:
            await asyncio.gather(client.close(), server.close())


async def test_garbage_from_a_server_raises_an_error_in_its_callers() -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)  # the greeting
        writer.write(framed(encode("")))
        await reader.read(4096)
        writer.write(framed(b"\xdd\xff\xff\xff\xff"))

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="gc-") as directory:
        server = await asyncio.start_unix_server(garbage, f"{directory}/s")
        client = RpcNetwork({"worker.3": f"unix:{directory}/s"}, SECRET)
        try:
            with pytest.raises(WorkerDied, match="malformed frames"):
                await client.peer("worker.3").call(Endpoint("ref", int, int), 1, deadline_s=10)
        finally:
            await client.close()
            server.close()
