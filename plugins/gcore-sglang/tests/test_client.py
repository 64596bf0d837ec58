"""The HTTP client, against servers that fail in the ways a network does."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from gcore_sglang.client import Client, Event, Refused, Unreachable

KEY = "secret"
Handler = Callable[[web.Request], Any]


@pytest.fixture
def serving() -> Iterator[Callable[[Handler], Client]]:
    """Serves one handler under every path; gives a client of it, with two connections for
    samples.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runners, clients = [], []

    async def start(handler: Handler) -> int:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        return port

    def serve(handler: Handler) -> Client:
        port = asyncio.run_coroutine_threadsafe(start(handler), loop).result()
        clients.append(Client(f"http://127.0.0.1:{port}", KEY, connections=2))
        return clients[-1]

    yield serve
    for client in clients:
        client.close()
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set in the end, so that no handler is waited for after a test that failed."""
    found = threading.Event()
    yield found
    found.set()


def events(client: Client, count: int) -> list[Event]:
    found: list[Event] = []
    while len(found) < count:
        new = client.wait(10)
        assert new, "nothing came for 10 s"
        found += new
    return found


def answer(rid: str, ids: list[int], *, ended: bool) -> bytes:
    reason = {"type": "length"} if ended else None
    told = {"output_ids": ids, "meta_info": {"id": rid, "finish_reason": reason}}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def test_samples_share_one_request_and_each_streamed_answer_ends_once(
    serving: Any,
) -> None:
    bodies = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        bodies.append(body := await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        for rid in body["rid"]:
            await response.write(answer(rid, [5], ended=False))
        for rid in reversed(body["rid"]):
            await response.write(answer(rid, list(range(100_000)), ended=True))
        await response.write(b"data: [DONE]\n\n")
        return response

    client = serving(handler)
    client.sample(
        {name: {"input_ids": [i], "return_logprob": True} for i, name in enumerate("abcde")}
    )
    found = events(client, 10)
    assert [(e.rid, e.ended) for e in found] == [(rid, False) for rid in "abcde"] + [
        (rid, True) for rid in "edcba"
    ]
    assert {len(e.answer["output_ids"]) for e in found if e.ended} == {100_000}
    assert not any(e.lost or e.error for e in found)
    expected = {"input_ids": [[0], [1], [2], [3], [4]], "return_logprob": [True] * 5}
    assert bodies == [{**expected, "rid": list("abcde"), "stream": True}]


def test_waiting_samples_are_sent_together_and_can_be_withdrawn(
    serving: Any, release: threading.Event
) -> None:
    bodies = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body["rid"])
        response = web.StreamResponse()
        await response.prepare(request)
        for rid in body["rid"]:
            await response.write(answer(rid, [5], ended=False))
        await asyncio.to_thread(release.wait)
        for rid in body["rid"]:
            await response.write(answer(rid, [5, 6], ended=True))
        return response

    client = serving(handler)
    for name in "abcdef":
        client.sample({name: {}})
        if name in "ab":
            events(client, 1)  # two have connections and begin, the others wait
    client.withdraw(["b", "c", "f", "unknown"])
    withdrawn = events(client, 2)
    assert [(e.rid, dict(e.answer), e.ended, e.lost) for e in withdrawn] == [
        ("c", {}, True, False),
        ("f", {}, True, False),
    ]
    release.set()
    found = events(client, 6)
    assert sorted(e.rid for e in found if e.ended) == ["a", "b", "d", "e"]
    assert bodies[2] == ["d", "e"]


def test_a_refused_sample_fails_alone_and_no_other_is_sent_again_by_its_id(serving: Any) -> None:
    """SGLang aborts the ids of a refused request two seconds later."""
    sent: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sent.extend(body["rid"])
        if bad := sorted(rid[1:] for rid in body["rid"] if rid[1:] in "cg"):
            return web.Response(status=400, text=f"{bad[0]} is bad")
        response = web.StreamResponse()
        await response.prepare(request)
        for rid in body["rid"]:
            await response.write(answer(rid, [5], ended=True))
        return response

    client = serving(handler)
    client.sample({f"0{name}": {} for name in "abcdefgh"})
    found = sorted(events(client, 8), key=lambda event: event.rid)
    assert [(e.rid, e.error, e.lost) for e in found] == [
        (f"0{name}", f"{name} is bad" if name in "cg" else "", False) for name in "abcdefgh"
    ]
    assert len(sent) == len(set(sent)) > 8
    assert {len(rid) for rid in sent} == {2}


def test_a_broken_connection_is_reported_as_lost(serving: Any) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(answer(body["rid"][0], [5], ended=False))
        if body["rid"] == ["cut"]:
            assert request.transport is not None
            request.transport.abort()
        return response

    client = serving(handler)
    for rid in ("cut", "without an end"):
        client.sample({rid: {}})
        *_, last = events(client, 2)
        assert (last.rid, last.lost, last.ended) == (rid, True, True)


def test_a_request_never_meets_the_end_of_a_connection_that_idled(serving: Any) -> None:
    """As if the server's limit for idle connections passed each time the next request comes."""
    used: set[Any] = set()

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        if request.protocol in used:
            request.transport.abort()
        used.add(request.protocol)
        if request.path != "/generate":
            return web.Response(text="done")
        rid = (await request.json())["rid"][0]
        return web.Response(body=answer(rid, [5], ended=True))

    client = serving(handler)
    for path in ("/pause_generation", "/update_weight_version", "/continue_generation"):
        assert client.call("POST", path) == "done"
    for rid in ("a", "b"):
        client.sample({rid: {}})
        (event,) = events(client, 1)
        assert (event.rid, event.error, event.lost) == (rid, "", False)


def test_a_refusal_quotes_the_server(serving: Any) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=400, text="too long")

    client = serving(handler)
    client.sample({"a": {}})
    (event,) = events(client, 1)
    assert (event.error, event.lost) == ("too long", False)
    with pytest.raises(Refused, match="/flush_cache gives 400: too long"):
        client.call("POST", "/flush_cache")
    assert not client.is_healthy()


def test_an_absent_server_is_reported(serving: Any) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens
        client = Client(f"http://127.0.0.1:{held.getsockname()[1]}", KEY, connections=1)
        assert not client.is_healthy()
        with pytest.raises(Unreachable, match="/model_info"):
            client.call("GET", "/model_info")
        client.sample({"a": {}})
        (event,) = events(client, 1)
        assert event.lost
        client.close()


def test_an_unresponsive_server_is_reported(serving: Any, release: threading.Event) -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.to_thread(release.wait)
        return web.Response()

    client = serving(handler)
    with pytest.raises(Unreachable, match="/flush_cache"):
        client.call("POST", "/flush_cache", timeout_s=0.2)
    release.set()
