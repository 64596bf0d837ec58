"""The page of a run that goes on opens every sample of it, also those that a file leaves out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_report.loopback import Door
from gcore_report.page import limits
from gcore_report.page.answers import answers
from gcore_report.page.pictures import pictures
from gcore_report.page.runs import open_runs
from gcore_report.page.tokens import tokens
from gcore_report.watch.app import make_app
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gcore_core.contract import run_files
from tests.support.page_runs import EVIL, write_answers, write_lines, write_run

DOOR = Door(name="watch", token="a-long-secret", port=8123)


def client_of(directory: Path) -> TestClient:
    app = make_app(open_runs([directory])[0], DOOR)
    client = TestClient(app, base_url="http://127.0.0.1:8123")
    client.get("/", params={"token": DOOR.token})
    return client


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "job" / "001", steps=100, answers=440)


@pytest.fixture
def client(directory: Path) -> TestClient:
    return client_of(directory)


def ask(client: TestClient, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def pages(client: TestClient, path: str, **query: Any) -> list[dict[str, Any]]:
    """Returns the whole list, read a page at a time."""
    items: list[dict[str, Any]] = []
    while True:
        page = ask(client, path, start=len(items), **query)
        items += page["items"]
        if not page["items"]:
            assert len(items) == page["matches"]
            return items


def written(directory: Path) -> list[tuple[int, int, dict[str, Any]]]:
    """Returns step, line and row of every answer that a run has written."""
    steps = open_runs([directory])[0].sampled_steps()
    rows = [(step, run_files.read_samples(directory, step)) for step in steps]
    return [(step, line, row) for step, own in rows for line, row in enumerate(own)]


# -- answers ---------------------------------------------------------------------------------------


def test_every_answer_of_a_run_is_listed_once_and_opened_whole_whatever_a_file_embeds(
    directory: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ANSWERS", 10)
    monkeypatch.setattr(limits, "TEXT_CHARACTERS", 20)
    assert answers(open_runs([directory]))["shown"] == 10
    rows = written(directory)
    items = pages(client, "/answers")
    assert [(item["step"], item["line"]) for item in items] == [row[:2] for row in rows]
    assert client.get("/data/answers").json()["total"] == len(rows) == 440
    for step, line, row in rows:
        read = ask(client, f"/answers/{step}/{line}")
        assert {name: read[name] for name in ("prompt", "text", "mode", "rewards")} == {
            name: row[name] for name in ("prompt", "text", "mode", "rewards")
        }


def test_a_search_looks_at_every_prompt_and_text_in_any_case(
    directory: Path, client: TestClient
) -> None:
    expected = [(s, n) for s, n, row in written(directory) if EVIL in row["text"]]
    found = pages(client, "/answers", search=EVIL.upper(), count=3)
    assert [(item["step"], item["line"]) for item in found] == expected
    by_prompt = ask(client, "/answers", search="Question 7")
    assert by_prompt["matches"] == sum(
        "question 7" in row["prompt"] for *_, row in written(directory)
    )
    assert ask(client, "/answers", search="in no answer") == {"matches": 0, "items": []}


def test_filters_and_orders_are_those_of_a_file_page(directory: Path, client: TestClient) -> None:
    path = run_files.samples_path(directory, 100)
    rows = run_files.read_samples(directory, 100)
    rows[3]["rewards"] = {"exact": None}
    rows[4]["rewards"] = {}
    write_lines(path, iter(rows))
    found = pages(client, "/answers", step=100, mode="greedy", order="-exact")
    assert {(item["step"], item["mode"]) for item in found} == {(100, "greedy")}
    values = [
        item["rewards"].get("exact") for item in pages(client, "/answers", step=100, order="+exact")
    ]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=True) and values[-2:] == [None, None]
    lowest = [
        item["rewards"].get("exact") for item in pages(client, "/answers", step=100, order="-exact")
    ]
    assert lowest == [*sorted(known), None, None]


def test_an_answer_names_the_other_answers_to_its_prompt(
    directory: Path, client: TestClient
) -> None:
    read = ask(client, "/answers/50/2")
    expected = [
        [step, line]
        for step, line, row in written(directory)
        if (row["prompt"], row["mode"]) == (read["prompt"], read["mode"])
        and (step, line) != (50, 2)
    ]
    assert read["others"] == expected and len(expected) == 10


def test_an_answer_that_has_a_picture_shows_it_and_no_file_from_elsewhere(
    directory: Path, client: TestClient, tmp_path: Path
) -> None:
    [(name, address)] = ask(client, "/answers/50/0")["pictures"]
    assert name == "picture" and address.startswith("data:image/webp;base64,")
    np.save(tmp_path / "private.npy", np.zeros((8, 8, 3), np.uint8))
    rows = run_files.read_samples(directory, 50)
    rows[0]["arrays"] = {"picture": str(tmp_path / "private.npy")}
    write_lines(run_files.samples_path(directory, 50), iter(rows))
    assert ask(client, "/answers/50/0")["pictures"] == []


def test_every_picture_of_a_run_is_listed_once_prompt_by_prompt_whatever_a_file_embeds(
    directory: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PICTURES", 3)
    assert pictures(open_runs([directory]))["shown"] == 3
    rows = [(step, line, row) for step, line, row in written(directory) if row.get("arrays")]
    facts = client.get("/data/pictures").json()
    assert facts["total"] == len(rows) > 3
    items = pages(client, "/pictures", count=4)
    assert sorted((item["step"], item["line"]) for item in items) == [row[:2] for row in rows]
    assert all(item["address"].startswith("data:image/webp;base64,") for item in items)
    prompts = list(dict.fromkeys(item["prompt"] for item in items))
    order = [(prompts.index(item["prompt"]), item["step"]) for item in items]
    assert order == sorted(order), "those of a prompt stand together, in the order of steps"
    [mode] = facts["modes"]
    some = pages(client, "/pictures", search=prompts[0].upper(), step=50, mode=mode)
    assert some == [i for i in items if prompts[0] in i["prompt"] and i["step"] == 50]
    assert ask(client, "/pictures", search="in no prompt") == {"matches": 0, "items": []}
    assert ask(client, "/pictures", mode="no mode")["matches"] == 0
    assert client.get("/pictures", params={"count": 10_000}).status_code == 400


def test_pictures_of_a_run_that_goes_on_are_seen_and_a_file_from_elsewhere_is_not(
    directory: Path, client: TestClient, tmp_path: Path
) -> None:
    before = ask(client, "/pictures")["matches"]
    np.save(tmp_path / "private.npy", np.zeros((8, 8, 3), np.uint8))
    rows = run_files.read_samples(directory, 50)
    rows[0]["arrays"] = {"picture": str(tmp_path / "private.npy")}
    write_lines(run_files.samples_path(directory, 50), iter(rows))
    [item] = ask(client, "/pictures", step=50)["items"]
    assert item["address"] == ""
    write_answers(directory, [105], 20)
    assert ask(client, "/pictures")["matches"] == before + 1


def test_evaluations_of_a_run_that_goes_on_or_back_are_seen_at_the_next_request(
    directory: Path, client: TestClient
) -> None:
    assert ask(client, "/answers")["matches"] == 440
    write_answers(directory, [105], 20)
    assert ask(client, "/answers", step=105)["matches"] == 20
    os.remove(run_files.samples_path(directory, 100))
    assert ask(client, "/answers")["matches"] == 440 + 20 - 40
    assert client.get("/answers/100/0").status_code == 404


def test_a_line_that_a_killed_run_left_in_half_is_not_shown(
    directory: Path, client: TestClient
) -> None:
    with run_files.samples_path(directory, 100).open("ab") as file:
        file.write(b'{"prompt": "half')
    assert ask(client, "/answers", step=100)["matches"] == 40


@pytest.mark.parametrize(
    "query",
    ["start=-1", "count=0", "count=501", "step=last", "file=/etc/passwd", f"search={'x' * 1001}"],
)
@pytest.mark.parametrize("path", ["/answers", "/tokens"])
def test_odd_questions_are_refused_with_a_reason(client: TestClient, path: str, query: str) -> None:
    answer = client.get(f"{path}?{query}")
    assert answer.status_code == 400 and "It cannot be searched for" in answer.text


@pytest.mark.parametrize("path", ["/answers", "/answers/0/0", "/tokens", "/tokens/0/0/0"])
def test_nobody_reads_a_sample_without_the_token(directory: Path, path: str) -> None:
    stranger = TestClient(client_of(directory).app, base_url="http://127.0.0.1:8123")
    assert stranger.get(path).status_code == 403


@pytest.mark.parametrize(
    "path", ["/answers/50/40", "/answers/51/0", f"/answers/50/{10**30}", "/tokens/50/0/0"]
)
def test_what_a_run_does_not_have_is_not_found(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_a_run_without_samples_has_empty_lists(tmp_path: Path) -> None:
    (tmp_path / run_files.CONFIG).write_text("{}")
    client = client_of(tmp_path)
    for path in ("/answers", "/tokens"):
        assert ask(client, path, search="x") == {"matches": 0, "items": []}
        assert client.get(f"/data{path}").json()["total"] == 0
    assert ask(client, "/answers", order="+exact")["matches"] == 0


# -- records token by token ------------------------------------------------------------------------


def test_every_trained_record_is_listed_once_and_opened_whole_whatever_a_file_embeds(
    directory: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TOKEN_RECORDS", 4)
    monkeypatch.setattr(limits, "TOKENS", 5)
    assert tokens(open_runs([directory]))["shown"] == 4
    items = pages(client, "/tokens", count=7)
    records = list(run_files.read_tokens(directory))
    assert [(i["step"], i["ordinal"], i["sample"]) for i in items] == [
        (r.step, r.ordinal, r.sample) for r in records
    ]
    assert client.get("/data/tokens").json()["total"] == len(records) == 40
    for record in records:
        read = ask(client, f"/tokens/{record.step}/{record.ordinal}/{record.sample}")
        assert read["record"]["ids"] == record.action_ids
        assert read["record"]["trainer"] == pytest.approx(record.trainer_logp, rel=1e-5)


def test_a_log_prob_that_is_no_number_is_missing_on_the_page(
    directory: Path, client: TestClient
) -> None:
    path = directory / run_files.TOKENS
    line = json.loads(path.read_bytes().splitlines()[0]) | {"step": 110}
    line["trainer_logp"][1] = None
    with path.open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
    read = ask(client, f"/tokens/110/{line['ordinal']}/{line['sample']}")
    assert read["record"]["trainer"][:3:2] == pytest.approx(line["trainer_logp"][:3:2], rel=1e-5)
    assert read["record"]["trainer"][1] is None


def test_records_are_searched_by_step_name_and_text(directory: Path, client: TestClient) -> None:
    assert {i["step"] for i in pages(client, "/tokens", step=20)} == {20}
    assert [i["step"] for i in pages(client, "/tokens", search="400/1")] == [50]
    assert ask(client, "/tokens", search="word7")["matches"] == 0  # there is no tokenizer yet
    words = {f"word{i}": i for i in range(20)} | {"[UNK]": 20}
    (directory / run_files.WEIGHTS).mkdir(exist_ok=True)
    model = WordLevel(words, unk_token="[UNK]")
    Tokenizer(model).save(str(directory / run_files.WEIGHTS / "tokenizer.json"))
    fresh = client_of(directory)
    assert ask(fresh, "/tokens", search="WORD7")["matches"] == 40
    assert ask(fresh, "/tokens", search="word70")["matches"] == 0
    assert ask(fresh, "/tokens/50/400/0")["texts"]["7"] == "word7"


def test_records_of_a_run_that_goes_on_or_back_are_seen_at_the_next_request(
    directory: Path, client: TestClient
) -> None:
    path = directory / run_files.TOKENS
    assert ask(client, "/tokens")["matches"] == 40
    line = json.loads(path.read_bytes().splitlines()[0]) | {"step": 110}
    with path.open("ab") as file:
        file.write(json.dumps(line).encode())
        file.flush()
        assert ask(client, "/tokens", step=110)["matches"] == 0  # it is being written
        file.write(b"\n")
    assert ask(client, "/tokens", step=110)["matches"] == 1
    fresh = path.with_name("fresh")
    fresh.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:8]))
    fresh.replace(path)
    assert ask(client, "/tokens")["matches"] == 8
    path.unlink()
    assert ask(client, "/tokens")["matches"] == 0
