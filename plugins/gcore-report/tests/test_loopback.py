"""Pages on loopback: where they listen, whom they let in, and what every answer carries."""

from __future__ import annotations

import inspect
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from gcore_report import loopback
from gcore_report.loopback import HEADERS, Door, guarded
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from gcore_core.contract.errors import AddressError

HERE = "http://127.0.0.1:8123"
DOOR = Door(name="test", token="a-long-secret", port=8123)


async def content(request: Request) -> Response:
    return PlainTextResponse("the content", headers={"X-Frame-Options": "SAMEORIGIN"})


async def stream(request: Request) -> Response:
    async def pieces() -> AsyncIterator[str]:
        yield "one"
        yield "two"

    return StreamingResponse(pieces())


ROUTES = [
    Route("/", content),
    Route("/change", content, methods=["POST", "PUT", "DELETE"]),
    Route("/stream", stream),
]


def outside(door: Door = DOOR, base: str = HERE) -> TestClient:
    return TestClient(guarded(ROUTES, door, headers={"X-Own": "1"}), base_url=base)


def inside(door: Door = DOOR) -> TestClient:
    client = outside(door)
    assert client.get("/", params={"token": door.token}).text == "the content"
    return client


# -- where it listens ------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has the server note its sockets' addresses in place of running."""
    seen: list[Any] = []

    def run(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        seen.extend(each.getsockname() for each in sockets)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    return seen


def serve(port: int = 0, doors: list[Door] | None = None) -> None:
    def make(door: Door) -> Any:
        if doors is not None:
            doors.append(door)
        return guarded(ROUTES, door)

    loopback.serve(make, port, name="test", note="stop with Ctrl-C")


def test_it_listens_on_loopback_and_no_argument_names_another_address(
    served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    doors: list[Door] = []
    serve(doors=doors)
    [(host, port)] = served
    assert host == "127.0.0.1"
    assert set(inspect.signature(loopback.serve).parameters) == {
        "make_app",
        "port",
        "name",
        "note",
        "may_omit_origin",
        "patience_s",
    }
    assert capsys.readouterr().out.splitlines() == [
        f"open http://127.0.0.1:{port}/?token={doors[0].token}",
        "stop with Ctrl-C",
    ]


def test_each_start_draws_another_token_of_24_bytes(served: list[Any]) -> None:
    doors: list[Door] = []
    serve(doors=doors)
    serve(doors=doors)
    assert doors[0].token != doors[1].token
    assert len(doors[0].token) == 32  # 24 bytes in base64


def test_a_port_that_is_taken_is_refused_with_what_to_do(served: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressError, match=f"port {port} is taken") as caught:
            serve(port)
    assert caught.value.where == "--port" and served == []


# -- whom it lets in -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/stream", "/nothing", "/?token=", "/?token=wrong", "/?token=é"]
)
def test_without_the_token_there_is_no_content_and_no_word_of_what_exists(path: str) -> None:
    answer = outside().get(path)
    assert answer.status_code == 403
    assert "content" not in answer.text and DOOR.token not in answer.text


@pytest.mark.parametrize("token", ["", "guessed", "a-long-secre", "a-long-secret2"])
def test_a_wrong_cookie_is_refused(token: str) -> None:
    client = outside()
    client.cookies.set(DOOR.cookie, token)
    assert client.get("/").status_code == 403
    assert client.post("/change", headers={"Origin": HERE}).status_code == 403


def test_a_token_counts_only_in_the_address_of_the_page_itself() -> None:
    client = outside()
    for path in ("/stream", "/nothing"):
        assert client.get(path, params={"token": DOOR.token}).status_code == 403
    change = client.post("/change", params={"token": DOOR.token}, headers={"Origin": HERE})
    assert change.status_code == 403


def test_the_token_leaves_the_address_and_becomes_a_cookie_of_this_port() -> None:
    answer = outside().get("/", params={"token": DOOR.token}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith("gcore_test_8123=") and "path=/" in cookie
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert inside().get("/").text == "the content"


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were one compared otherwise, it would open a door that this comparison keeps shut."""
    compared: list[bytes] = []

    def compare(given: bytes, own: bytes) -> bool:
        compared.append(given)
        return False

    monkeypatch.setattr(secrets, "compare_digest", compare)
    client = outside()
    assert client.get("/", params={"token": DOOR.token}).status_code == 403
    client.cookies.set(DOOR.cookie, DOOR.token)
    assert client.get("/").status_code == 403
    assert compared == [DOOR.token.encode()] * 2


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8123", "0.0.0.0:8123", "[::1]", ""])
def test_another_name_of_this_machine_is_refused_even_with_the_cookie(host: str) -> None:
    assert inside().get("/", headers={"Host": host}).status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1:8123", "localhost:8123", "localhost:9000"])
def test_the_end_of_a_tunnel_may_call_it_localhost_at_any_port(host: str) -> None:
    assert inside().get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("origin", ["http://127.0.0.1:9999", "https://evil.example", "null", None])
def test_what_changes_something_is_taken_from_the_page_alone(
    method: str, origin: str | None
) -> None:
    client = inside()
    headers = {} if origin is None else {"Origin": origin}
    assert client.request(method, "/change", headers=headers).status_code == 403
    for own in (HERE, "http://localhost:8123"):
        assert client.request(method, "/change", headers={"Origin": own}).status_code == 200


def test_a_program_may_come_without_an_origin_only_where_the_door_says_so() -> None:
    door = Door(name="test", token="a-long-secret", port=8123, may_omit_origin=True)
    client = inside(door)
    assert client.post("/change").status_code == 200
    assert client.post("/change", headers={"Origin": "null"}).status_code == 403


# -- what every answer carries ---------------------------------------------------------------------


def test_every_answer_has_the_headers_and_its_own_win() -> None:
    client = inside()
    for answer in (outside().get("/"), client.get("/stream"), client.get("/nothing")):
        for name, value in {**HEADERS, "X-Own": "1"}.items():
            assert answer.headers[name] == value
    assert client.get("/stream").text == "onetwo"
    assert client.get("/").headers["X-Frame-Options"] == "SAMEORIGIN"


def test_a_plugin_says_in_its_own_way_who_is_not_let_in() -> None:
    app = guarded(ROUTES, DOOR, refused=lambda why: PlainTextResponse(why.upper(), 403))
    answer = TestClient(app, base_url=HERE).get("/")
    assert (answer.status_code, answer.text) == (403, "OPEN THE ADDRESS THAT THE COMMAND PRINTED.")
