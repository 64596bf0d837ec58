"""The page: who gets in, what it shows, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gcore_rewards.human.answers import Answer, Pair
from gcore_rewards.human.comparing import Comparing, Rules
from gcore_rewards.human.judgements import read_lines
from gcore_rewards.human.page import make_app
from starlette.testclient import TestClient

from gcore_core.kits.loopback import Door

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
HERE = "http://127.0.0.1:8123"
DOOR = Door(name="human", token="a-long-secret", port=8123, may_omit_origin=True)


def a_pair(number: int = 0, **changes: str) -> Pair:
    return Pair(
        prompt=changes.get("prompt", f"question {number}"),
        answers=(
            Answer(text=changes.get("first", f"a {number}"), origin="runs/secret step 0 greedy"),
            Answer(text=changes.get("second", f"b {number}"), origin="runs/secret step 9 greedy"),
        ),
    )


class Site:
    def __init__(self, path: Path, pairs: list[Pair]) -> None:
        self.path = path
        self.task = Comparing(pairs, path, Rules(raters=2))
        self.client = TestClient(make_app(self.task, DOOR), base_url=HERE)

    def enter(self, rater: str = "anna") -> TestClient:
        client = TestClient(self.client.app, base_url=HERE)
        client.get("/", params={"token": DOOR.token})
        client.post("/name", data={"name": rater})
        return client

    def form(self, rater: str = "anna", choice: str = "left") -> dict[str, str]:
        shown = self.task.next(rater)
        assert shown is not None
        return {"key": shown.key, "order": shown.order, "choice": choice, "seconds": "2"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "j.jsonl", [a_pair(i) for i in range(3)])
    yield site
    site.task.close()


# -- who gets in -----------------------------------------------------------------------------------


def test_nothing_is_shown_without_the_token(site: Site) -> None:
    for path in ("/", "/page.js", "/page.css", "/?token=wrong", "/?token=", "/docs"):
        answer = site.client.get(path)
        assert answer.status_code == 403
        assert "question" not in answer.text and DOOR.token not in answer.text


def test_nothing_is_taken_without_the_cookie(site: Site) -> None:
    for path in ("/answer", "/undo", "/name", f"/answer?token={DOOR.token}"):
        assert site.client.post(path, data=site.form()).status_code == 403
    site.client.cookies.set(DOOR.cookie, "guessed")
    assert site.client.post("/answer", data=site.form()).status_code == 403
    assert site.path.read_text() == ""


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(site: Site) -> None:
    answer = site.client.get("/", params={"token": DOOR.token}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8123", "0.0.0.0:8123", ""])
def test_another_name_of_this_machine_is_refused(site: Site, host: str) -> None:
    """A page elsewhere may have its own name lead here (DNS rebinding)."""
    client = site.enter()
    assert client.get("/", headers={"Host": host}).status_code == 400
    assert client.post("/answer", data=site.form(), headers={"Host": host}).status_code == 400


@pytest.mark.parametrize("origin", ["http://127.0.0.1:9999", "https://evil.example", "null"])
def test_a_form_of_another_page_is_refused(site: Site, origin: str) -> None:
    """Pages on other ports of this machine count as the same site, so they send the cookie."""
    client = site.enter()
    answer = client.post("/answer", data=site.form(), headers={"Origin": origin})
    assert answer.status_code == 403
    assert site.path.read_text() == ""
    assert client.post("/answer", data=site.form(), headers={"Origin": HERE}).status_code == 200


def test_every_answer_forbids_scripts_and_frames_from_elsewhere(site: Site) -> None:
    for answer in (site.client.get("/"), site.enter().get("/"), site.enter().get("/page.js")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"


# -- what it shows ---------------------------------------------------------------------------------


def test_an_answer_that_holds_a_script_is_shown_as_text(tmp_path: Path) -> None:
    pair = a_pair(prompt=f"prompt {EVIL}", first=f"first {EVIL}", second=f"second {EVIL}")
    page = Site(tmp_path / "j.jsonl", [pair]).enter(f"anna {EVIL[:8]}").get("/").text
    assert EVIL not in page and "<img" not in page
    assert page.count("&lt;script&gt;document.title=") == 3
    assert page.count("<script") == 1  # the page's own


def test_raters_see_no_step_run_or_reward(site: Site) -> None:
    page = site.enter().get("/").text
    assert "question " in page
    for word in ("secret", "step", "greedy", "reward"):
        assert word not in page


def test_a_chat_is_shown_by_turns(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "in parts"}, {"type": "image"}]
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    pair = Pair(prompt=turns, answers=a_pair().answers)
    page = Site(tmp_path / "j.jsonl", [pair]).enter().get("/").text
    assert all(word in page for word in ("system", "be brief", "user", "in parts"))


def test_the_page_loads_nothing_from_elsewhere(site: Site) -> None:
    client = site.enter()
    for text in (client.get("/").text, client.get("/page.js").text, client.get("/page.css").text):
        assert "http:" not in text and "https:" not in text and "//" not in text.replace("// ", "")


# -- what it takes ---------------------------------------------------------------------------------


def test_raters_by_name_judge_until_nothing_is_left(site: Site) -> None:
    for rater in ("anna", "ben"):
        client = site.enter(rater)
        for _ in range(3):
            assert client.post("/answer", data=site.form(rater, "tie")).status_code == 200
        assert "nothing left" in client.get("/").text
    said = read_lines(site.path)
    assert (
        sorted((each.rater, each.category) for each in said)
        == [("anna", "tie")] * 3 + [("ben", "tie")] * 3
    )
    assert "6 of 6" in client.get("/").text


def test_undo_and_another_rater_are_a_click_away(site: Site) -> None:
    client = site.enter()
    client.post("/answer", data=site.form())
    page = client.get("/").text
    assert 'action="/undo"' in page and "Not anna?" in page
    assert client.post("/undo", data={"number": "1"}).status_code == 200
    assert read_lines(site.path) == []
    assert client.post("/undo", data={"number": "1"}).status_code == 409
    client.post("/name", data={"name": ""})
    assert "Your name" in client.get("/").text


def test_a_judgement_of_a_pair_that_does_not_exist_is_refused(site: Site) -> None:
    answer = site.enter().post("/answer", data=site.form() | {"key": "no such"})
    assert answer.status_code == 404 and "no such pair" in answer.text
    assert site.path.read_text() == ""


def test_odd_forms_are_refused_and_write_nothing(site: Site) -> None:
    client = site.enter()
    assert client.post("/answer", data={"key": "x" * 70_000}).status_code == 413
    assert client.post("/name", data={"name": "x" * 41}).status_code == 422
    assert client.post("/name", data={"name": "a\u202eb"}).status_code == 422
    assert client.post("/undo", data={"number": "-1"}).status_code == 409
    assert client.post("/answer", content=b"\xff\xfe=%zz").status_code == 404
    nameless = TestClient(client.app, base_url=HERE)
    nameless.get("/", params={"token": DOOR.token})
    assert nameless.post("/answer", data=site.form()).status_code == 422
    assert site.path.read_text() == ""


def test_a_judgement_that_could_not_be_written_is_told_and_can_be_given_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(file: int) -> None:
        raise OSError(28, "No space left on device")

    client, form = site.enter(), site.form()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        answer = client.post("/answer", data=form)
    assert answer.status_code == 507 and "No space left" in answer.text
    assert client.post("/answer", data=form).status_code == 200
    assert len(read_lines(site.path)) == 1
