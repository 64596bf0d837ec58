"""The page of a run that goes on: who gets in, what it serves, what its buttons may do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import gcore_report.watch
import pytest
from gcore_report.loopback import Door
from gcore_report.page.document import PANELS
from gcore_report.page.runs import open_runs
from gcore_report.watch import app
from gcore_report.watch.app import make_app
from gcore_report.watch.rows import NewRows
from starlette.testclient import TestClient

from gcore_core.contract.run_files import METRICS, SAVE
from tests.support.page_runs import EVIL, write_run

HERE = "http://127.0.0.1:8123"
DOOR = Door(name="watch", token="a-long-secret", port=8123)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "job" / "001", steps=10)


@pytest.fixture
def outside(directory: Path) -> TestClient:
    return TestClient(make_app(open_runs([directory])[0], DOOR), base_url=HERE)


@pytest.fixture
def client(outside: TestClient) -> TestClient:
    outside.get("/", params={"token": DOOR.token})
    return outside


# -- who gets in -----------------------------------------------------------------------------------


def test_nothing_is_shown_or_done_without_the_token(outside: TestClient) -> None:
    for path in ("/", "/data/curves", "/events", "/?token=wrong", "/?token="):
        answer = outside.get(path)
        assert answer.status_code == 403
        assert "reward" not in answer.text and DOOR.token not in answer.text
    for path in ("/save", "/stop", f"/stop?token={DOOR.token}"):
        assert outside.post(path, headers={"Origin": HERE}).status_code == 403


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(
    outside: TestClient,
) -> None:
    answer = outside.get("/", params={"token": DOOR.token}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8123", "0.0.0.0:8123", ""])
def test_another_name_of_this_machine_is_refused(client: TestClient, host: str) -> None:
    """A page elsewhere may have its own name lead here (DNS rebinding)."""
    assert client.get("/", headers={"Host": host}).status_code == 400
    assert client.post("/stop", headers={"Host": host, "Origin": HERE}).status_code == 400


@pytest.mark.parametrize("origin", [None, "http://127.0.0.1:9999", "https://evil.example", "null"])
def test_a_button_of_another_page_does_nothing(
    client: TestClient, directory: Path, origin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ask in ("ask_to_save", "ask_to_stop"):
        monkeypatch.setattr(app, ask, lambda _: pytest.fail("it was asked"))
    headers = {} if origin is None else {"Origin": origin}
    for path in ("/save", "/stop"):
        assert client.post(path, headers=headers).status_code == 403
        assert client.get(path).status_code == 405
    assert not (directory / SAVE).exists()


def test_every_answer_forbids_frames_and_scripts_from_elsewhere(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "script-src 'sha256-" in policy
    for path in ("/", "/data/curves", "/nothing"):
        answer = client.get(path)
        if answer.status_code == 200:
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"


# -- what it serves --------------------------------------------------------------------------------


def test_the_page_has_no_data_in_it_and_every_panel_is_served(client: TestClient) -> None:
    page = client.get("/").text
    assert 'id="data-head"' in page and 'id="data-curves"' not in page
    assert EVIL not in page
    for panel in PANELS:
        answer = client.get(f"/data/{panel}")
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()
    assert client.get("/data/nothing").status_code == 404


def test_new_rows_are_given_once_and_whole(directory: Path) -> None:
    rows = NewRows(directory)
    path = directory / METRICS
    assert list(rows.read()) == []
    with path.open("ab") as file:
        file.write(b'{"step":11}\n{"st')
        file.flush()
        assert list(rows.read()) == [b'{"step":11}']
        file.write(b'ep":12}\n')
        file.flush()
    assert list(rows.read()) == [b'{"step":12}']
    assert list(rows.read()) == [] and not rows.is_replaced


def test_a_row_that_gets_a_field_afterwards_is_not_given_again(directory: Path) -> None:
    """The hash of weights comes late, and then takes the place of the row's last characters."""
    rows = NewRows(directory)
    with (directory / METRICS).open("rb+") as file:
        file.seek(-2, 2)
        file.write(b',"weights_sha256":"abc"}\n{"step":11}\n')
    assert list(rows.read()) == [b'{"step":11}']
    assert list(rows.read()) == []


def test_a_run_that_goes_back_has_the_page_loaded_anew(directory: Path) -> None:
    rows = NewRows(directory)
    path = directory / METRICS
    fresh = path.with_name("fresh")
    fresh.write_bytes(b'{"step":5}\n')
    fresh.replace(path)
    assert list(rows.read()) == [b'{"step":5}'] and rows.is_replaced


def test_a_run_without_rows_yet_is_followed_from_its_first(tmp_path: Path) -> None:
    rows = NewRows(tmp_path)
    assert list(rows.read()) == []
    (tmp_path / METRICS).write_bytes(b'{"step":0}\n')
    assert list(rows.read()) == [b'{"step":0}'] and not rows.is_replaced


def test_each_step_is_an_event(directory: Path) -> None:
    site = app._Site(open_runs([directory])[0], look_s=0.001)

    async def listen() -> list[bytes]:
        events = site._events()
        first = await anext(events)
        with (directory / METRICS).open("ab") as file:
            file.write(b'{"step":11}\n')
        return [first, await anext(events)]

    state, step = asyncio.run(listen())
    assert state.endswith(b'\nevent: state\ndata: {"alive":false}\n\n')
    assert step.endswith(b'\nevent: step\ndata: {"step":11}\n\n')


def test_rows_that_came_without_a_connection_are_given_after_it(directory: Path) -> None:
    site = app._Site(open_runs([directory])[0], look_s=0.001)

    async def events(since: str, count: int) -> list[bytes]:
        coming = site._events(since)
        return [await anext(coming) for _ in range(count)]

    def add(row: bytes) -> None:
        with (directory / METRICS).open("ab") as file:
            file.write(row)

    (state,) = asyncio.run(events("", 1))
    had = state.partition(b"\n")[0].removeprefix(b"id: ").decode()
    add(b'{"step":11}\n')
    _, step = asyncio.run(events(had, 2))
    assert step.endswith(b'data: {"step":11}\n\n')
    had = step.partition(b"\n")[0].removeprefix(b"id: ").decode()
    add(b'{"step":12}\n')
    _, step = asyncio.run(events(had, 2))
    assert step.endswith(b'data: {"step":12}\n\n')


def test_buttons_ask_the_run_and_say_what_became_of_it(
    client: TestClient, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("/save", "/stop"):
        answer = client.post(path, headers={"Origin": HERE})
        assert answer.status_code == 409 and "does not go on" in answer.text
    asked: list[tuple[str, Path]] = []
    for name in ("save", "stop"):
        monkeypatch.setattr(
            app, f"ask_to_{name}", lambda path, name=name: not asked.append((name, path))
        )
        assert client.post(f"/{name}", headers={"Origin": HERE}).status_code == 200
    assert asked == [("save", directory), ("stop", directory)]


def test_the_command_is_a_plugin_of_its_own() -> None:
    assert [spec.name for spec in gcore_report.watch.gcore_commands()] == ["default"]
