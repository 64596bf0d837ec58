"""Nodes that know the token get in, and home proves to them that it knows it too. Nobody else gets
anything, whatever he has heard or stands between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from gcore_nodes.channel import (
    Challenge,
    Channel,
    Claim,
    Joining,
    Over,
    Refused,
    Turned,
    Welcome,
    connect,
    fingerprint,
    proof,
)
from gcore_nodes.door import Door
from gcore_nodes.facts import MachineFacts, machine_facts
from gcore_nodes.hosts import natural_order
from gcore_nodes.identity import make_identity, server_context
from gcore_nodes.join import main
from gcore_nodes.token import read_token

from gcore_core import __version__
from gcore_core.contract.errors import AddressError, ConfigError, ContractError, WorkerDied
from gcore_core.kits.wire import certificate_of

TOKEN = b"the token of this run, long enough"
OTHER = b"another token, which is long enough"
LONG_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.asynccontextmanager
async def opened(
    wanted: int | list[str] = 1, token: bytes = TOKEN, said: list[str] | None = None
) -> AsyncIterator[tuple[Door, int]]:
    port = free_port()
    say = (said if said is not None else []).append
    door = Door(token, wanted, port=port, address="127.0.0.1", silence_s=5.0, say=say)
    await door.open()
    try:
        yield door, port
    finally:
        await door.close(Over(well=True))


def reached(port: int, token: bytes = TOKEN) -> Awaitable[Channel]:
    return connect("127.0.0.1", port, token, LONG_S)


def joining(name: str, machine: str = "", version: str = __version__) -> Joining:
    facts = msgspec.structs.replace(machine_facts(), machine=machine or name)
    return Joining(name, version, sys.executable, msgspec.msgpack.encode(facts))


async def stranger(port: int) -> Channel:
    """Connects with TLS, and proves nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return Channel(*await asyncio.open_connection("127.0.0.1", port, ssl=context))


def certificate_shown(channel: Channel) -> bytes:
    shown = channel._writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return fingerprint(shown)


# -- who gets in -----------------------------------------------------------------------------------


async def test_nodes_join_in_the_order_of_their_names() -> None:
    async with opened(3) as (door, port):
        channels = [await reached(port) for _ in range(3)]
        for channel, name in zip(channels, ("n10", "n9", "n1"), strict=True):
            channel.send(joining(name))
        nodes = await door.gather(LONG_S)
        assert [node.name for node in nodes] == ["n1", "n9", "n10"]
        assert {(node.address, node.home_address) for node in nodes} == {("127.0.0.1",) * 2}
        assert isinstance(nodes[0].facts, MachineFacts)
        await door.close(Over(well=False, why="a reason"))
        assert [await channel.receive() for channel in channels] == [
            Over(well=False, why="a reason")
        ] * 3
        for channel in channels:
            await channel.close()


async def test_nodes_that_are_named_join_in_the_order_of_the_job() -> None:
    async with opened(["b", "a"]) as (door, port):
        strange, *others = [await reached(port) for _ in range(3)]
        strange.send(joining("c"))
        assert await strange.receive() == Turned("launcher.config.hosts has no c: b, a", False)
        for channel, name in zip(others, ("a.site.org", "b"), strict=True):
            channel.send(joining(name))
        assert [node.name for node in await door.gather(LONG_S)] == ["b", "a"]
        for channel in (strange, *others):
            await channel.close()


async def test_one_more_node_than_wanted_may_come_again() -> None:
    async with opened(1) as (door, port):
        first, second = await reached(port), await reached(port)
        first.send(joining("a"))
        await door.gather(LONG_S)
        second.send(joining("b"))
        assert (await second.receive()) == Turned("all nodes of the run have joined", True)
        for channel in (first, second):
            await channel.close()


@contextlib.asynccontextmanager
async def growing(later_names: list[str] | None = None) -> AsyncIterator[tuple[Door, int]]:
    """Opens a door for the node n1, and for one more later."""
    port = free_port()
    settings: dict[str, Any] = {"most": 2, "later_names": later_names, "say": lambda line: None}
    door = Door(TOKEN, ["n1"], port=port, address="127.0.0.1", silence_s=5.0, **settings)
    await door.open()
    try:
        yield door, port
    finally:
        await door.close(Over(well=True))


async def joined(port: int, name: str) -> Channel:
    channel = await reached(port)
    channel.send(joining(name))
    return channel


async def test_a_node_that_joins_later_is_told_of_once_there_is_room() -> None:
    """Before the others have joined it has to wait; when it is lost, another may take its place."""
    async with growing() as (door, port):
        early = await joined(port, "n2")
        assert await early.receive() == Turned("the run is starting with others", again=True)
        first = await joined(port, "n1")
        await door.gather(LONG_S)
        second = await joined(port, "n2")
        assert await door.newcomer() == "n2"
        third = await joined(port, "n3")
        assert await third.receive() == Turned("all nodes of the run have joined", again=True)
        await second.close()
        await until(lambda: "n2" not in door._nodes)
        fourth = await joined(port, "n3")
        assert await door.newcomer() == "n3"
        for channel in (early, first, third, fourth):
            await channel.close()


async def test_a_node_that_has_gone_before_it_was_told_of_is_forgotten() -> None:
    async with growing() as (door, port):
        first = await joined(port, "n1")
        await door.gather(LONG_S)
        gone = await joined(port, "n2")
        await until(lambda: "n2" in door._nodes)
        await gone.close()
        await until(lambda: "n2" not in door._nodes)
        there = await joined(port, "n3")
        assert await door.newcomer() == "n3"
        for channel in (first, there):
            await channel.close()


async def test_a_node_that_leaves_is_told_that_all_is_well_whatever_the_others_are() -> None:
    port = free_port()
    door = Door(TOKEN, ["n1", "n2"], port=port, address="127.0.0.1", silence_s=5.0)
    await door.open()
    first, second = await joined(port, "n1"), await joined(port, "n2")
    await door.gather(LONG_S)
    door.let_go("n2")
    again = Over(well=False, again=True)
    await door.close(again)
    assert [await first.receive(), await second.receive()] == [again, Over(well=True)]
    for channel in (first, second):
        await channel.close()


async def test_a_node_that_the_job_does_not_name_cannot_join_later() -> None:
    async with growing(["n1", "n2"]) as (door, port):
        first = await joined(port, "n1")
        await door.gather(LONG_S)
        other = await joined(port, "n9")
        answer = await other.receive()
        assert isinstance(answer, Turned) and not answer.again
        assert "launcher.config.hosts has no n9" in answer.why
        for channel in (first, other):
            await channel.close()


async def test_fewer_nodes_will_do_when_no_other_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcore_nodes.door._SETTLE_S", 0.05)
    async with opened(3) as (door, port):
        gathering = asyncio.ensure_future(door.gather(LONG_S, least=2))
        first = await joined(port, "n1")
        await asyncio.sleep(0.2)
        assert not gathering.done()
        second = await joined(port, "n2")
        assert [node.name for node in await gathering] == ["n1", "n2"]
        for channel in (first, second):
            await channel.close()


async def test_a_machine_that_joins_twice_is_counted_once() -> None:
    async with opened(2) as (door, port):
        first, second, third = [await reached(port) for _ in range(3)]
        first.send(joining("a", "one"))
        await until(lambda: "a" in door._nodes)
        second.send(joining("b", "one"))
        assert (await first.receive()) == Turned("this machine has joined again", False)
        third.send(joining("c", "two"))
        assert [node.name for node in await door.gather(LONG_S)] == ["b", "c"]
        for channel in (first, second, third):
            await channel.close()


async def test_a_second_command_on_a_machine_does_not_end_the_first_while_a_run_goes_on() -> None:
    async with growing() as (door, port):
        first = await joined(port, "n1")
        await door.gather(LONG_S)
        second = await reached(port)
        second.send(joining("n2", "n1"))
        answer = await asyncio.wait_for(second.receive(), LONG_S)
        assert answer == Turned("this machine has joined already", again=True)
        assert list(door._nodes) == ["n1"]
        for channel in (first, second):
            await channel.close()


async def test_two_machines_of_one_name_are_told_apart() -> None:
    async with opened(2) as (door, port):
        first, second = await reached(port), await reached(port)
        first.send(joining("a", "one"))
        await until(lambda: "a" in door._nodes)
        second.send(joining("a", "two"))
        why = "another machine (127.0.0.1) has joined as a; set --name"
        assert (await second.receive()) == Turned(why, False)
        for channel in (first, second):
            await channel.close()


async def test_another_version_is_turned_away_with_both() -> None:
    said: list[str] = []
    async with opened(1, said=said) as (_, port):
        channel = await reached(port)
        channel.send(joining("a", version="0.0.1"))
        why = f"it has gcore-core 0.0.1 ({sys.executable}), home has {__version__} ("
        answer = await channel.receive()
        assert answer.why.startswith(why) and not answer.again
        assert said == [f"a cannot join: {answer.why}"]
        await channel.close()


async def test_who_is_missing_is_said() -> None:
    async with opened(["a", "b", "c"]) as (door, port):
        channel = await reached(port)
        channel.send(joining("b"))
        await until(lambda: "b" in door._nodes)
        with pytest.raises(ConfigError) as error:
            await door.gather(0.01)
        assert error.value.what == "not all nodes have joined within 0.01 s"
        assert error.value.why == f"1 of 3 nodes have joined 127.0.0.1:{port}; missing: a, c"
        await channel.close()
        await until(lambda: not door._nodes)  # one that leaves is missing again


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not holds():
            await asyncio.sleep(0.01)


# -- who does not ----------------------------------------------------------------------------------


async def test_a_node_with_another_token_is_refused_and_told() -> None:
    said: list[str] = []
    async with opened(1, said=said) as (door, port):
        for _ in range(2):
            with pytest.raises(ConfigError, match="its token is not the one of the run"):
                await reached(port, OTHER)
        assert not door._nodes
        assert said == ["127.0.0.1 is refused: it does not know the token"]


async def test_a_home_with_another_token_is_refused() -> None:
    """Also one that takes whoever comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        channel.send(Challenge(bytes(32)))
        claim = await channel.expect(Claim)
        shown = fingerprint(ssl.PEM_cert_to_DER_cert(certificate_of(identity).decode()))
        channel.send(Welcome(proof(OTHER, "home", shown, bytes(32), claim.nonce), 5.0))
        with contextlib.suppress(WorkerDied):
            got.append(await channel.receive())
        writer.close()
        done.set()

    identity = make_identity()
    got: list[Any] = []
    done = asyncio.Event()
    async with await asyncio.start_server(
        serve, "127.0.0.1", 0, ssl=server_context(identity)
    ) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match="does not know the token"):
            await reached(port)
        await done.wait()
    assert got == []


async def test_a_proof_that_was_heard_is_of_no_use_again() -> None:
    """It is about the nonce of its connection. Nor does home's own proof make a node."""
    async with opened(2) as (door, port):
        first = await stranger(port)
        challenge = await first.receive()
        nonce = bytes(32)
        claim = Claim(nonce, proof(TOKEN, "node", certificate_shown(first), challenge.nonce, nonce))
        first.send(claim)
        welcome = await first.receive()
        assert isinstance(welcome, Welcome)
        for replayed in (claim, Claim(nonce, welcome.proof)):
            second = await stranger(port)
            assert (await second.receive()).nonce != challenge.nonce
            second.send(replayed)
            assert await second.receive() == Refused()
            with pytest.raises(WorkerDied):
                await second.receive()
            await second.close()
        await first.close()
        assert not door._nodes


async def test_who_stands_between_is_refused_by_both() -> None:
    """He shows the node a certificate of his own, and passes all messages on."""
    async with opened(1) as (door, port):

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            to_node = Channel(reader, writer)
            to_home = await stranger(port)
            to_node.send(await to_home.expect(Challenge))
            to_home.send(await to_node.expect(Claim))
            answers.append(await to_home.receive())
            to_node.send(answers[-1])
            await to_home.close()
            await to_node.close()

        answers: list[Any] = []
        context = server_context(make_identity())
        async with await asyncio.start_server(between, "127.0.0.1", 0, ssl=context) as server:
            with pytest.raises(ConfigError, match="this node is refused"):
                await reached(server.sockets[0].getsockname()[1])
        assert answers == [Refused()]
        assert not door._nodes


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(msgspec.msgpack.encode(Claim(bytes(32), bytes(32))), id="a claim in plain"),
        pytest.param(b"\x16\x03\x01" + bytes(400), id="no TLS at all"),
    ],
)
async def test_without_tls_nothing_is_answered(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with opened(1) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(content)
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await asyncio.wait_for(reader.read(), LONG_S)
            writer.close()
    assert len(answer) <= 7 and answer[:1] in (b"", b"\x15")  # at most an alert of TLS
    assert caplog.messages == []


async def test_a_stranger_cannot_make_home_keep_much() -> None:
    async with opened(1) as (_, port):
        channel = await stranger(port)
        await channel.receive()
        channel.send(Claim(bytes(1 << 20), b""))
        with pytest.raises(WorkerDied):
            await channel.receive()
        await channel.close()


async def test_a_stranger_who_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcore_nodes.door._PROOF_S", 0.05)
    async with opened(1) as (_, port):
        channel = await stranger(port)
        await channel.receive()
        with pytest.raises(WorkerDied):
            await channel.receive()
        await channel.close()


async def test_a_port_that_is_taken_is_told() -> None:
    async with opened(1) as (_, port):
        door = Door(TOKEN, 1, port=port, address="127.0.0.1", silence_s=5.0)
        with pytest.raises(AddressError) as error:
            await door.open()
        what = f"nodes cannot join at 127.0.0.1:{port}: Address already in use"
        assert (error.value.what, error.value.where) == (what, "launcher.config.join_port")


def test_proofs_are_about_all_that_they_should_be() -> None:
    parts = [(TOKEN, OTHER), ("node", "home"), *[(bytes(32), bytes([1] * 32))] * 3]
    first = [pair[0] for pair in parts]
    proofs = {proof(*first)}  # type: ignore[arg-type]
    for index, pair in enumerate(parts):
        proofs.add(proof(*[*first[:index], pair[1], *first[index + 1 :]]))  # type: ignore[arg-type]
    assert len(proofs) == 6


async def test_a_nonce_has_one_length() -> None:
    """Else who answers could shift bytes between the parts of a proof."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        channel.send(Challenge(bytes(31)))
        with pytest.raises(WorkerDied):
            await channel.receive()
        writer.close()

    context = server_context(make_identity())
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        with pytest.raises(ContractError, match="no nonce"):
            await reached(server.sockets[0].getsockname()[1])


# -- the token and the command ---------------------------------------------------------------------


def test_a_token_comes_from_a_file_or_the_environment(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    assert read_token(str(file), "UNSET", "here") == TOKEN
    monkeypatch.setenv("HOME", str(file.parent))
    assert read_token(f"~/{file.name}", "UNSET", "here") == TOKEN
    monkeypatch.setenv("A_TOKEN", TOKEN.decode())
    assert read_token(None, "A_TOKEN", "here") == TOKEN
    for arguments, message in (
        ((None, "UNSET", "here"), "here: no token is given"),
        ((str(tmp_path / "none"), "", "here"), "here: the token cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError) as error:
            read_token(*arguments)
        assert str(error.value).startswith(message)
    file.write_text("short")
    with pytest.raises(ConfigError, match="too short: 5 bytes of at least 16"):
        read_token(str(file), "", "here")


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:x", "host:70000"])
def test_the_command_takes_an_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        main([address])


def test_the_command_gives_up_in_time(tmp_path: Any) -> None:
    file = tmp_path / "token"
    file.write_bytes(TOKEN)
    with pytest.raises(AddressError) as error:
        main([f"127.0.0.1:{free_port()}", f"--token-file={file}", "--wait=0"])
    assert error.value.what == "nobody to join was found in 0 s"
    assert "Connect call failed" in error.value.why


async def test_a_lost_node_ends_its_agent_for_home() -> None:
    """An agent cannot be told to have ended by a node that is gone."""
    async with opened(1) as (door, port):
        channel = await reached(port)
        channel.send(joining("a"))
        (node,) = await door.gather(LONG_S)
        assert node.returncode is None
        await channel.close()
        assert await asyncio.wait_for(node.wait(), LONG_S) == node.returncode == 255


def test_names_are_counted_as_people_do() -> None:
    names = ["n10", "n9", "n1", "a2-3", "a2-20", "a"]
    assert natural_order(names) == ["a", "a2-3", "a2-20", "n1", "n9", "n10"]
