"""Calls over real sockets: two networks in one process stand for two processes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from types import NoneType

import msgspec
import pytest

from gcore_core import __version__
from gcore_core.contract.errors import (
    AddressError,
    ContractError,
    DataError,
    DeadlineExceeded,
    GcoreError,
    WeightMismatch,
    WorkerDied,
    WorkerError,
)
from gcore_core.contract.launching import Endpoint, Peer, StreamEndpoint
from gcore_core.wire import proof, sockets
from gcore_core.wire.frames import CALL, Frame
from gcore_core.wire.framing import framed
from gcore_core.wire.retry import insist
from gcore_core.wire.service import MESSAGE_LIMIT_BYTES, Call, Service, encode
from gcore_core.wire.sockets import WINDOW_ITEMS, RpcNetwork, check_free

SECRET = b"s" * 32


class Ask(msgspec.Struct, array_like=True):
    number: int
    text: str = ""


ECHO = Endpoint("echo", Ask, Ask)
FAIL = Endpoint("fail", Ask, NoneType)
STUMBLE = Endpoint("stumble", Ask, NoneType)
COUNT = StreamEndpoint("count", Ask, Ask)
HANG = Endpoint("hang", Ask, NoneType)
TOIL = Endpoint("toil", Ask, Ask)
HUGE = Endpoint("huge", Ask, bytes)
HUGE_ITEMS = StreamEndpoint("huge_items", Ask, bytes)
REFUSE = Endpoint("refuse", Ask, NoneType)


class Server:
    """A service of odd handlers, and what they noticed."""

    def __init__(self) -> None:
        self.service = Service("worker.3")
        self.started, self.cancelled, self.release = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self.counted = 0
        self.service.add(ECHO, self.echo)
        self.service.add(FAIL, self.fail)
        self.service.add(STUMBLE, self.stumble)
        self.service.add(COUNT, self.count)
        self.service.add(HANG, self.hang)
        self.service.add(TOIL, self.toil)
        self.service.add(HUGE, self.huge)
        self.service.add(HUGE_ITEMS, self.huge_items)

    async def echo(self, request: Ask, call: Call) -> Ask:
        await asyncio.sleep(request.number % 7 / 1000)  # so that answers overtake each other
        return request

    async def fail(self, request: Ask, call: Call) -> None:
        raise WeightMismatch(
            "other bytes", where="tensor 'w'", why="cosmic rays", todo="push again", tensors=3
        )

    async def stumble(self, request: Ask, call: Call) -> None:
        raise KeyError("lost key")

    async def count(self, request: Ask, call: Call) -> AsyncGenerator[Ask, None]:
        for number in range(request.number):
            self.counted += 1
            yield Ask(number)
            if number % 10 == 0:
                await asyncio.sleep(0)

    async def hang(self, request: Ask, call: Call) -> None:
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def toil(self, request: Ask, call: Call) -> Ask:
        for _ in range(request.number):
            await asyncio.to_thread(call.progress)
            await asyncio.sleep(0.25)
        return request

    async def huge(self, request: Ask, call: Call) -> bytes:
        return bytes(request.number)

    async def huge_items(self, request: Ask, call: Call) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield bytes(request.number)
                await asyncio.sleep(0)
        finally:
            self.cancelled.set()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="g-core-") as name:  # short, unlike tmp_path
        yield Path(name)


@pytest.fixture
def addresses(directory: Path) -> dict[str, str]:
    return {"worker.3": f"unix:{directory / 'w'}"}


@contextlib.asynccontextmanager
async def served(addresses: dict[str, str]) -> AsyncIterator[Server]:
    network, server = RpcNetwork(addresses, SECRET), Server()
    await network.serve("worker.3", server.service)
    try:
        yield server
    finally:
        server.release.set()
        await network.close()


@contextlib.asynccontextmanager
async def reached(
    addresses: dict[str, str], secret: bytes = SECRET, timeout_s: float = 20.0
) -> AsyncIterator[Peer]:
    network = RpcNetwork(addresses, secret, timeout_s)
    try:
        yield network.peer("worker.3")
    finally:
        await network.close()


async def test_a_call_answers(addresses: dict[str, str]) -> None:
    async with served(addresses), reached(addresses) as peer:
        assert await peer.call(ECHO, Ask(1, "grüße")) == Ask(1, "grüße")


async def test_a_server_works_on_a_loopback_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    addresses = {"worker.3": f"tcp:127.0.0.1:{port}"}
    async with served(addresses), reached(addresses) as peer:
        assert await peer.call(ECHO, Ask(1)) == Ask(1)


async def test_answers_of_concurrent_calls_do_not_mix(addresses: dict[str, str]) -> None:
    async with served(addresses), reached(addresses) as peer:
        asked = [Ask(number, "x" * number) for number in range(100)]
        assert await asyncio.gather(*(peer.call(ECHO, ask) for ask in asked)) == asked


async def test_concurrent_streams_keep_their_order(addresses: dict[str, str]) -> None:
    async def drain(peer: Peer, length: int) -> list[int]:
        return [item.number async for item in peer.stream(COUNT, Ask(length))]

    async with served(addresses), reached(addresses) as peer:
        lengths = [0, 1, 50, 300]
        assert await asyncio.gather(*(drain(peer, length) for length in lengths)) == [
            list(range(length)) for length in lengths
        ]


async def test_a_stream_waits_for_a_slow_reader_and_other_calls_do_not(
    addresses: dict[str, str],
) -> None:
    async with served(addresses) as server, reached(addresses) as peer:
        async with contextlib.aclosing(peer.stream(COUNT, Ask(300))) as stream:
            first = await anext(stream)
            for number in range(50):  # time enough for all 300
                await peer.call(ECHO, Ask(number))
            assert server.counted == WINDOW_ITEMS + 1  # the last of them has not left
            rest = [item.number async for item in stream]
        assert [first.number, *rest] == list(range(300))


async def test_a_remote_error_keeps_its_class_its_parts_and_its_process(
    addresses: dict[str, str],
) -> None:
    async with served(addresses), reached(addresses) as peer:
        with pytest.raises(WeightMismatch) as caught:
            await peer.call(FAIL, Ask(0))
    error = caught.value
    assert (error.what, error.where, error.why, error.todo) == (
        "other bytes",
        "tensor 'w'",
        "cosmic rays",
        "push again",
    )
    assert error.facts["process"] == "worker.3"
    assert error.facts["tensors"] == 3
    assert "in fail" in error.facts["traceback"]


async def test_any_other_remote_exception_becomes_a_worker_error_with_its_location(
    addresses: dict[str, str],
) -> None:
    async with served(addresses), reached(addresses) as peer:
        with pytest.raises(
            WorkerError, match=r"worker\.3: KeyError: 'lost key'\n  at .*test_rpc\.py:\d+"
        ) as caught:
            await peer.call(STUMBLE, Ask(0))
    assert type(caught.value) is WorkerError


async def test_an_unknown_method_is_refused(addresses: dict[str, str]) -> None:
    async with served(addresses), reached(addresses) as peer:
        with pytest.raises(ContractError, match=r"worker\.3: no method 'ecoh'"):
            await peer.call(Endpoint("ecoh", Ask, Ask), Ask(0))


async def test_a_malformed_request_is_refused_with_its_path(addresses: dict[str, str]) -> None:
    async with served(addresses), reached(addresses) as peer:
        with pytest.raises(
            ContractError, match=r"malformed request 'echo': .*`int`.*`str`.*\$\[0\]"
        ):
            await peer.call(Endpoint("echo", list[str], Ask), ["one", "two"])


async def test_the_deadline_expires_without_progress_and_cancels_the_handler(
    addresses: dict[str, str],
) -> None:
    async with served(addresses) as server, reached(addresses) as peer:
        with pytest.raises(
            DeadlineExceeded, match=r"worker\.3: no sign of progress for 0\.2 s in hang"
        ):
            await peer.call(HANG, Ask(0), deadline_s=0.2)
        async with asyncio.timeout(10):
            await server.cancelled.wait()


async def test_progress_extends_the_deadline(addresses: dict[str, str]) -> None:
    """The handler takes 2.5 s and reports at most once a second; 1.6 s without a sign would end the
    call.
    """
    async with served(addresses), reached(addresses) as peer:
        assert await peer.call(TOIL, Ask(10), deadline_s=1.6) == Ask(10)


async def test_closing_a_stream_early_cancels_its_handler(addresses: dict[str, str]) -> None:
    async with served(addresses) as server, reached(addresses) as peer:
        stream = peer.stream(HUGE_ITEMS, Ask(10))
        async with contextlib.aclosing(stream):
            async for item in stream:
                assert len(item) == 10
                break
        async with asyncio.timeout(10):
            await server.cancelled.wait()


async def test_cancelling_a_call_cancels_its_handler(addresses: dict[str, str]) -> None:
    async with served(addresses) as server, reached(addresses) as peer:
        task = asyncio.ensure_future(peer.call(HANG, Ask(0)))
        async with asyncio.timeout(10):
            await server.started.wait()
            task.cancel()
            await server.cancelled.wait()


async def test_a_wrong_secret_is_refused(addresses: dict[str, str]) -> None:
    async with served(addresses), reached(addresses, secret=b"t" * 32) as peer:
        for _ in range(2):  # and stays refused
            with pytest.raises(
                ContractError, match=r"refused the connection\n  wrong or missing run secret"
            ):
                await peer.call(ECHO, Ask(0))


async def test_a_different_version_is_refused_and_both_are_named(
    addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(addresses), reached(addresses) as peer:
        ours = __version__
        greeting = partial(proof.Greeting, version="9.9.9")  # both ends share the module
        monkeypatch.setattr(
            proof,
            "Greeting",
            lambda secret, version, python: greeting(secret=secret, python=python),
        )
        with pytest.raises(
            ContractError, match=re.escape(f"gcore-core {ours} here") + r".*9\.9\.9 \(.*\) there"
        ):
            await peer.call(ECHO, Ask(0))


async def test_a_server_that_ends_during_a_call_raises_worker_died(
    addresses: dict[str, str],
) -> None:
    async with reached(addresses) as peer:
        async with served(addresses) as server:
            calls = [asyncio.ensure_future(peer.call(HANG, Ask(0))) for _ in range(3)]
            async with asyncio.timeout(10):
                await server.started.wait()
            server.release.clear()
            server.release.set = lambda: None  # type: ignore[method-assign]  # the handler never answers
        for call in calls:
            with pytest.raises(WorkerDied, match=r"worker\.3: the process is gone") as caught:
                await call
            assert caught.value.facts["process"] == "worker.3"


async def test_a_restarted_server_is_reached_again(addresses: dict[str, str]) -> None:
    async with reached(addresses) as peer:
        for number in range(3):
            async with served(addresses):
                assert await insist(peer, ECHO, Ask(number), 60.0) == Ask(number)


async def test_a_caller_may_connect_before_its_server_listens(addresses: dict[str, str]) -> None:
    async with reached(addresses) as peer:
        early = asyncio.ensure_future(peer.call(ECHO, Ask(1)))
        await asyncio.sleep(0)  # it has begun to connect
        async with served(addresses):
            assert await early == Ask(1)


async def test_all_callers_of_a_server_that_never_comes_fail_together(
    addresses: dict[str, str],
) -> None:
    loop = asyncio.get_running_loop()
    async with reached(addresses, timeout_s=0.5) as peer:
        began_s = loop.time()
        calls = [peer.call(ECHO, Ask(0)) for _ in range(10)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        took_s = loop.time() - began_s
    assert [type(error) for error in errors] == [WorkerDied] * 10
    assert "nobody answers at unix:" in str(errors[0])
    assert took_s < 4.0  # one after the other would take 5


async def test_a_message_over_the_limit_fails_and_affects_no_other_call(
    addresses: dict[str, str],
) -> None:
    limit = rf"has \d+ bytes, the limit is {MESSAGE_LIMIT_BYTES}"
    too_long = MESSAGE_LIMIT_BYTES + 1
    async with served(addresses) as server, reached(addresses) as peer:
        other = asyncio.ensure_future(peer.call(HANG, Ask(0)))
        with pytest.raises(ContractError, match=f"a request of echo {limit}"):
            await peer.call(ECHO, Ask(0, "x" * too_long))
        with pytest.raises(ContractError, match=f"the reply to huge {limit}"):
            await peer.call(HUGE, Ask(too_long))
        with pytest.raises(ContractError, match=f"an item of huge_items {limit}"):
            async for _ in peer.stream(HUGE_ITEMS, Ask(too_long)):
                pass
        server.release.set()
        assert await other is None


async def test_messages_that_together_exceed_the_limit_arrive(addresses: dict[str, str]) -> None:
    size = MESSAGE_LIMIT_BYTES // 2 - 16
    async with served(addresses), reached(addresses) as peer:
        answers = await asyncio.gather(*(peer.call(HUGE, Ask(size)) for _ in range(5)))
    assert [len(answer) for answer in answers] == [size] * 5


async def test_error_for_a_too_long_socket_path_names_the_key_to_set(tmp_path: Path) -> None:
    network = RpcNetwork({"worker.3": f"unix:{tmp_path}/{'x' * 120}"}, SECRET)
    for attempt in (network.peer, check_free):
        with pytest.raises(
            AddressError, match=r"the socket path has \d+ bytes, the system allows 107"
        ) as caught:
            attempt("worker.3" if attempt == network.peer else network.addresses["worker.3"])
        assert "launcher.config.socket_dir" in caught.value.todo


async def test_error_for_a_port_in_use_names_the_key_to_set() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp:127.0.0.1:{taken.getsockname()[1]}"
        network = RpcNetwork({"worker.3": address}, SECRET)
        with pytest.raises(AddressError, match="the address is in use") as caught:
            await network.serve("worker.3", Server().service)
    assert caught.value.where == address
    assert "launcher.config.port" in caught.value.todo
    assert caught.value.exit_code == 7


async def test_a_file_where_the_socket_is_to_be_is_an_address_in_use(directory: Path) -> None:
    (directory / "w").touch()
    network = RpcNetwork({"worker.3": f"unix:{directory}/w"}, SECRET)
    with pytest.raises(AddressError, match="the address is in use"):
        await network.serve("worker.3", Server().service)


@pytest.mark.parametrize(
    "address", ["tcp:0.0.0.0:7000", "tcp:192.168.0.1:7000", "tcp:[::]:7000", "tcp:7000", "http://x"]
)
def test_an_address_that_other_machines_reach_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="other machines can reach"):
        RpcNetwork({"worker.3": address}, SECRET).peer("worker.3")


async def test_without_the_secret_the_socket_cannot_be_used(
    addresses: dict[str, str],
) -> None:
    """Who calls without a greeting is shown the door, and its call never runs."""
    async with served(addresses) as server:
        reader, writer = await asyncio.open_unix_connection(
            addresses["worker.3"].removeprefix("unix:")
        )
        writer.write(framed(encode([Frame(1, CALL, "hang", msgspec.Raw(encode(Ask(0))))])))
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        assert not server.started.is_set()
        writer.close()


async def test_a_greeting_too_long_ends_the_connection_before_it_is_read(
    addresses: dict[str, str],
) -> None:
    async with served(addresses):
        reader, writer = await asyncio.open_unix_connection(
            addresses["worker.3"].removeprefix("unix:")
        )
        writer.write(b"\xff\xff\xff\x7f")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_a_connection_that_sends_no_greeting_is_closed(
    addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "GREETING_S", 0.1)
    async with served(addresses):
        reader, writer = await asyncio.open_unix_connection(
            addresses["worker.3"].removeprefix("unix:")
        )
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("kind", [DataError, ContractError, DeadlineExceeded, AddressError])
async def test_every_error_class_survives_the_wire(
    kind: type[GcoreError], addresses: dict[str, str]
) -> None:
    async with served(addresses) as server, reached(addresses) as peer:

        async def refuse(request: Ask, call: Call) -> None:
            raise kind("no", where="here")

        server.service.add(REFUSE, refuse)
        with pytest.raises(kind, match="here: no"):
            await peer.call(REFUSE, Ask(0))


@pytest.mark.parametrize("answer", [b"\xff\xff\xff\x7f", framed(b"\xc1"), framed(encode(7))])
async def test_a_malformed_answer_to_a_greeting_is_reported_at_once(
    answer: bytes, directory: Path
) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(answer)
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(speak, f"{directory}/w")
    async with server, reached({"worker.3": f"unix:{directory}/w"}) as peer:
        with pytest.raises(ContractError, match="malformed"):
            await peer.call(ECHO, Ask(0))


async def test_a_peer_that_leaves_before_answering_the_greeting_is_retried(directory: Path) -> None:
    tries = []

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tries.append(await reader.read(4096))
        writer.close()

    server = await asyncio.start_unix_server(leave, f"{directory}/w")
    async with server, reached({"worker.3": f"unix:{directory}/w"}, timeout_s=1.0) as peer:
        with pytest.raises(WorkerDied, match="nobody answers at unix:"):
            await peer.call(ECHO, Ask(0))
    assert len(tries) > 2


async def test_a_network_whose_close_is_cancelled_serves_nobody_any_more(
    addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def linger(peer: sockets.RpcPeer) -> None:
        begun.set()
        await asyncio.Event().wait()

    network = RpcNetwork({**addresses, "worker.4": "unix:/nowhere"}, SECRET)
    await network.serve("worker.3", Server().service)
    network.peer("worker.4")
    async with reached(addresses, timeout_s=0.2) as caller:
        await caller.call(ECHO, Ask(1))
        with monkeypatch.context() as patch:
            patch.setattr(sockets.RpcPeer, "close", linger)
            closing = asyncio.ensure_future(network.close())
            await begun.wait()
            closing.cancel()
            await asyncio.wait([closing])
        with pytest.raises(WorkerDied):
            async with asyncio.timeout(5):
                await caller.call(HANG, Ask(1))
        with pytest.raises(WorkerDied, match="nobody answers"):
            await caller.call(ECHO, Ask(1))
