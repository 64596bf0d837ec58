"""``rewards/http`` against a real server on a real socket: every fault costs a score, none gives a
wrong one.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcore_rewards import service
from gcore_rewards.breaker import Breaker, CircuitOpen
from gcore_rewards.config import HttpConfig
from gcore_rewards.service import HttpReward
from omegaconf import OmegaConf

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord

CONTEXT = WorkerContext(role="scorer")


@dataclass
class Reply:
    """What the server does with one request: ``hold`` waits for the event, ``cut`` ends the
    connection.
    """

    status: int = 200
    content: bytes | None = None  # None: each record's number as its score
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None
    cut: bool = False


class Service:
    """A server whose first requests get the replies of a list, and later ones the right answer.

    requests, headers: what came, in order.
    connections: how many there were.
    at_a_time: requests "now", and the "most" that there ever were.
    arrived: released with each request.
    """

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.at_a_time = Counter({"now": 0, "most": 0})
        self.lock = threading.Lock()
        self.arrived = threading.Semaphore(0)
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                with service.lock:
                    service.connections += 1

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service.lock:
                    service.requests.append(request)
                    service.headers.append(dict(self.headers))
                    service.at_a_time["now"] += 1
                    service.at_a_time["most"] = max(service.at_a_time.values())
                    reply = service.replies.pop(0) if service.replies else Reply()
                service.arrived.release()
                if reply.hold:
                    reply.hold.wait(10)
                with service.lock:
                    service.at_a_time["now"] -= 1
                if reply.cut:
                    self.close_connection = True
                    return
                content = right(request) if reply.content is None else reply.content
                self.send_response(reply.status)
                for name, value in {**reply.headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """A client that gave up is part of the tests."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    @asynccontextmanager
    async def reward(self, **config: Any) -> AsyncIterator[HttpReward]:
        settings = {"url": self.url, "backoff_s": 0.001, "request_timeout_s": 5.0, **config}
        reward = HttpReward(HttpConfig(**settings), CONTEXT)
        yield reward
        await reward.close()


def right(request: dict[str, Any]) -> bytes:
    """The answer that scores each completion by the number that it is."""
    return json.dumps(
        {"scores": [{"id": r["id"], "score": int(r["completion"])} for r in request["records"]]}
    ).encode()


@pytest.fixture
def server() -> Iterator[Service]:
    service = Service()
    yield service
    service.server.shutdown()
    service.server.server_close()


def records(count: int = 2, **fields: Any) -> list[ScoredRecord]:
    """Record i has ordinal i and the completion "i"."""
    return [
        ScoredRecord(
            ordinal=i,
            sample=1,
            prompt=Prompt(row=i, text=f"question {i}", fields=fields),
            text=str(i),
            status="finished",
            columns={},
        )
        for i in range(count)
    ]


async def values(reward: HttpReward, count: int = 2) -> list[float | None]:
    return [score.value for score in await reward.score(records(count))]


async def reasons(reward: HttpReward, count: int = 1) -> list[str]:
    """The reasons of records that must all fail."""
    scores = await reward.score(records(count))
    assert all(score.value is None and score.status == "failed" for score in scores)
    return [score.reason for score in scores]


# -- what is sent ----------------------------------------------------------------------------------


async def test_the_service_gets_prompt_completion_and_fields(server: Service) -> None:
    async with server.reward() as reward:
        await reward.score(records(1, answer="7", source={"page": 3}))
        sent = {"id": "0.1", "prompt": "question 0", "completion": "0", "status": "finished"}
        assert server.requests == [
            {"records": [{**sent, "fields": {"answer": "7", "source": {"page": 3}}}]}
        ]
    async with server.reward(fields=["source"]) as reward:
        await reward.score(records(1, answer="7", source=2))
        assert server.requests[1]["records"][0]["fields"] == {"source": 2}


async def test_chat_prompts_are_sent_as_their_turns(server: Service) -> None:
    turns = [{"role": "user", "content": "hi"}]
    prompt = Prompt(row=0, messages=turns)
    async with server.reward() as reward:
        await reward.score(
            [
                ScoredRecord(
                    ordinal=0, sample=0, prompt=prompt, text="0", status="truncated", columns={}
                )
            ]
        )
    assert server.requests[0]["records"][0]["prompt"] == turns
    assert server.requests[0]["records"][0]["status"] == "truncated"


async def test_many_records_go_in_batches_and_come_back_in_order(server: Service) -> None:
    async with server.reward(batch=4, max_in_flight=3) as reward:
        assert await values(reward, 18) == list(range(18))
    assert sorted(len(request["records"]) for request in server.requests) == [2, 4, 4, 4, 4]


async def test_no_more_requests_are_in_flight_than_allowed_and_connections_are_kept(
    server: Service,
) -> None:
    go = threading.Event()
    server.replies = [Reply(hold=go) for _ in range(8)]
    async with server.reward(batch=1, max_in_flight=3) as reward:
        calls = [asyncio.ensure_future(values(reward, 4)) for _ in range(2)]  # they overlap
        for _ in range(3):
            await asyncio.to_thread(server.arrived.acquire)
        go.set()
        assert await asyncio.gather(*calls) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert server.at_a_time["most"] == 3
    assert server.connections == 3


async def test_a_connection_that_idled_is_not_used_again(
    server: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services close such connections, and a request that comes just then is lost."""
    monkeypatch.setattr(service, "_IDLE_S", 0.0)
    async with server.reward() as reward:
        for _ in range(3):
            assert await values(reward, 2) == [0, 1]
    assert server.connections == 3


async def test_headers_come_from_a_file_only_its_owner_can_read(
    server: Service, tmp_path: Path
) -> None:
    file = tmp_path / "headers"
    file.write_text("Authorization: Bearer s3cret\n\nX-Team: a: b\n")
    file.chmod(0o600)
    async with server.reward(headers_file=str(file)) as reward:
        await values(reward)
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert server.headers[0]["X-Team"] == "a: b"


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("A: b", 0o640, "others may read or write it"),
        ("A: b\nBearer s3cret", 0o600, "line 2 is not of the form 'Name: value'"),
        ("A: s3cret\u00e9", 0o600, "cannot be read: UnicodeDecodeError"),
    ],
)
def test_a_bad_file_of_headers_is_refused_without_showing_it(
    tmp_path: Path, text: str, mode: int, said: str
) -> None:
    file = tmp_path / "headers"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        HttpReward(HttpConfig(url="http://localhost", headers_file=str(file)), CONTEXT)
    assert "s3cret" not in str(caught.value)


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [Reply(status=500), Reply(status=503), Reply(status=429), Reply(cut=True)]
)
async def test_what_passes_is_tried_again(server: Service, fault: Reply) -> None:
    server.replies = [fault, fault]
    async with server.reward(retries=2) as reward:
        assert await values(reward) == [0, 1]
    assert len(server.requests) == 3


async def test_what_does_not_pass_is_a_failure_that_says_what_it_was(server: Service) -> None:
    server.replies = [Reply(status=500)] * 3
    async with server.reward(retries=2) as reward:
        assert await reasons(reward, 2) == ["the service answered 500"] * 2
        assert await values(reward) == [0, 1]


async def test_an_answer_without_end_is_given_up(server: Service) -> None:
    server.replies = [Reply(content=b" " * ((16 << 20) + 1))]
    async with server.reward() as reward:
        assert await reasons(reward) == ["the service answered with more than 16 MiB"]
    assert len(server.requests) == 1


async def test_a_refusal_is_not_tried_again(server: Service) -> None:
    server.replies = [Reply(status=401, content=b"who are you?")]
    async with server.reward() as reward:
        assert await reasons(reward) == ["the service answered 401: who are you?"]
    assert len(server.requests) == 1


async def test_a_slow_answer_is_given_up_and_asked_for_again(server: Service) -> None:
    never = threading.Event()
    server.replies = [Reply(hold=never)]
    async with server.reward(request_timeout_s=0.2) as reward:
        assert await values(reward) == [0, 1]
        server.replies = [Reply(hold=never)]
    async with server.reward(request_timeout_s=0.2, retries=0) as reward:
        assert await reasons(reward) == ["the service gave no answer within 0.2 s"]
    never.set()


async def test_nobody_at_the_address_is_a_failure(server: Service) -> None:
    server.server.server_close()
    async with server.reward(retries=1) as reward:
        (reason,) = await reasons(reward)
    assert reason.startswith("the service cannot be reached: ")


@pytest.mark.parametrize(
    "content",
    [
        b"<html>",
        b"",
        b"[]",
        b'{"scores": 3}',
        b'{"scores": [1]}',
        b'{"scores": [{"score": 1}]}',
        b"[" * 9999,
    ],
)
async def test_an_answer_of_another_form_fails_its_records(server: Service, content: bytes) -> None:
    server.replies = [Reply(content=content)]
    async with server.reward() as reward:
        (reason,) = await reasons(reward)
    assert reason.startswith("the service answered something else")
    assert content[:20].decode() in reason


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ('{"id": "0.1", "score": NaN}', "the service gave nan"),
        ('{"id": "0.1", "score": -Infinity}', "the service gave -inf"),
        ('{"id": "0.1", "score": 1' + "0" * 400 + "}", "the service gave inf"),
        ('{"id": "0.1", "score": "0.5"}', "the service gave 0.5, not a number"),
        ('{"id": "0.1", "score": true}', "the service gave True, not a number"),
        ('{"id": "0.1"}', "the service gave None, not a number"),
        ('{"id": "0.1", "error": "too long"}', "the service failed: too long"),
        ('{"id": "7.7", "score": 1}', "the service left this record out"),
    ],
)
async def test_a_record_without_a_finite_score_fails_alone(
    server: Service, item: str, said: str
) -> None:
    server.replies = [
        Reply(content=f'{{"scores": [{{"id": "1.1", "score": 0.5}}, {item}]}}'.encode())
    ]
    async with server.reward() as reward:
        first, second = await reward.score(records())
    assert (first.value, first.status, first.reason) == (None, "failed", said)
    assert second.value == 0.5


async def test_a_record_that_is_scored_twice_fails_its_batch(server: Service) -> None:
    server.replies = [
        Reply(content=b'{"scores": [{"id": "0.1", "score": 1}, {"id": "0.1", "score": 2}]}')
    ]
    async with server.reward() as reward:
        assert await reasons(reward) == ["the service scored a record twice in one answer"]


@pytest.mark.parametrize("value", [b"\0", {1: "a"}, {"a": {1: 2}}, 2**64, {1}])
async def test_a_row_that_is_not_json_is_a_failure(server: Service, value: object) -> None:
    async with server.reward() as reward:
        (score,) = await reward.score(records(1, picture=value))
    assert score.value is None and score.reason.startswith("the row is not JSON")


async def test_a_row_that_is_not_json_fails_alone(server: Service) -> None:
    first, second = records()
    odd = msgspec.structs.replace(first.prompt, fields={"level": float("nan")})
    async with server.reward() as reward:
        wrong, fine = await reward.score([replace(first, prompt=odd), second])
    assert wrong.value is None and wrong.reason.startswith("the row is not JSON")
    assert fine.value == 1.0
    assert [record["id"] for record in server.requests[0]["records"]] == ["1.1"]


# -- waiting ---------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which are not waited for."""
    seconds_waited: list[float] = []

    async def sleep(seconds: float) -> None:
        seconds_waited.append(seconds)

    monkeypatch.setattr(service.asyncio, "sleep", sleep)
    return seconds_waited


async def test_waits_are_drawn_below_a_bound_that_doubles(
    server: Service, waits: list[float]
) -> None:
    server.replies = [Reply(status=500)] * 60
    async with server.reward(
        retries=5, backoff_s=1.0, longest_wait_s=6.0, breaker_failures=99
    ) as reward:
        for _ in range(10):
            await reasons(reward)
    by_attempt = [waits[i::5] for i in range(5)]
    for attempt, drawn in enumerate(by_attempt):
        assert all(0 <= wait_s <= min(6.0, 2.0**attempt) for wait_s in drawn)
        assert len({*drawn}) > 1
    assert max(map(max, by_attempt)) > 2.0


@pytest.mark.parametrize("asked", ["7", formatdate(4e9, usegmt=True)])
async def test_a_service_is_not_asked_again_before_it_wants_to_be(
    server: Service, waits: list[float], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.time, "time", lambda: 4e9 - 7)
    server.replies = [Reply(status=429, headers={"Retry-After": asked})]
    async with server.reward(backoff_s=0.5) as reward:
        assert await values(reward) == [0, 1]
    (wait_s,) = waits
    assert 7 <= wait_s <= 7.5


async def test_a_service_that_wants_a_longer_wait_than_allowed_has_failed(
    server: Service, waits: list[float]
) -> None:
    server.replies = [Reply(status=503, headers={"Retry-After": "3600"})]
    async with server.reward() as reward:
        assert await reasons(reward) == ["the service answered 503"]
    assert waits == []


# -- the circuit breaker ---------------------------------------------------------------------------


async def test_a_service_that_is_down_is_left_alone_then_tried_once(
    server: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    async with server.reward(retries=0, breaker_failures=3, breaker_s=20.0) as reward:
        monkeypatch.setattr(reward._breaker, "_clock", lambda: now[0])
        server.replies = [Reply(status=500)] * 4
        for _ in range(3):
            assert await reasons(reward) == ["the service answered 500"]
        assert await reasons(reward) == ["the service left alone after 3 failures, for 20 s more"]
        assert len(server.requests) == 3
        now[0] += 20
        assert await reasons(reward) == ["the service answered 500"]
        assert (await reasons(reward))[0].startswith("the service left alone after 4 failures")
        assert len(server.requests) == 4
        now[0] += 20
        assert await values(reward) == [0, 1]
        assert await values(reward) == [0, 1]


async def test_a_refusal_does_not_open_the_circuit(server: Service) -> None:
    server.replies = [Reply(status=404)] * 3
    async with server.reward(breaker_failures=2) as reward:
        for _ in range(3):
            assert (await reasons(reward))[0].startswith("the service answered 404")
        assert await values(reward) == [0, 1]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: Breaker) -> None:
    with pytest.raises(OSError), breaker.call():
        raise OSError


def test_only_failures_in_a_row_open_the_circuit() -> None:
    breaker = Breaker(2, 10.0, Clock())
    for _ in range(3):
        fail(breaker)
        with breaker.call():
            pass
    fail(breaker)
    fail(breaker)
    with pytest.raises(CircuitOpen), breaker.call():
        pass


def test_one_call_at_a_time_tries_whether_the_service_is_back() -> None:
    clock = Clock()
    breaker = Breaker(1, 10.0, clock)
    fail(breaker)
    clock.now = 10.0
    with breaker.call():
        with pytest.raises(CircuitOpen), breaker.call():
            pass
    with breaker.call(), breaker.call():  # closed again: calls overlap
        pass


def test_a_trial_that_is_cancelled_counts_as_failed() -> None:
    clock = Clock()
    breaker = Breaker(1, 10.0, clock)
    fail(breaker)
    clock.now = 10.0
    with pytest.raises(asyncio.CancelledError), breaker.call():
        raise asyncio.CancelledError
    with pytest.raises(CircuitOpen), breaker.call():
        pass
    clock.now = 20.0
    with breaker.call():
        pass


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": "scores.example"}, "url: 'scores.example' is no http"),
        ({"url": "ftp://scores.example"}, "is no http:// or https:// address"),
        ({"url": "https://me:s3cret@scores.example"}, "url: holds a name or password"),
        (
            {"headers_file": "token.txt"},
            "headers_file: must be absolute, or start with ~, is 'token.txt'",
        ),
        (
            {"url": "http://scores.example", "headers_file": "~/t"},
            "url: its headers would be sent unencrypted",
        ),
        ({"batch": 0}, "batch: must be at least 1, is 0"),
        ({"max_in_flight": 0}, "max_in_flight: must be at least 1"),
        ({"breaker_failures": 0}, "breaker_failures: must be at least 1"),
        ({"request_timeout_s": 0}, "request_timeout_s: must be positive, is 0"),
        ({"backoff_s": float("nan")}, "backoff_s: must be positive, is nan"),
        ({"retries": -1}, "retries: must not be negative"),
    ],
)
def test_a_bad_setting_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpConfig(**{"url": "https://scores.example", **wrong})
    assert said in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_the_settings_travel_as_plain_values() -> None:
    given = HttpConfig(url="https://scores.example/v1", fields=["answer"])
    merged = OmegaConf.merge(
        OmegaConf.structured(HttpConfig), {"url": given.url, "fields": ["answer"]}
    )
    convert: Callable[..., Any] = msgspec.convert
    assert convert(OmegaConf.to_container(merged), HttpConfig) == given
