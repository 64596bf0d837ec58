"""Runs that wait for people: a scripted rater labels their answers on the page."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gcore_rewards.human.answers import pairs_of_runs

from tests.support import runs

pytestmark = pytest.mark.rest

_FIELD = re.compile(r'name="key" value="([^"]*)"')
_ANSWER = re.compile(r'<article class="text">([^<]*)</article>')


def config(steps: int = 2, **changes: Any) -> dict[str, Any]:
    """A run of fakes whose one reward is what people say."""
    job = runs.job(
        run={"steps": steps, "deterministic": True, **changes.pop("run", {})},
        controller={"shards": 1, "config": {"prompts": 2}},
        **changes,
    )
    # Evaluations are not asked about, and write the answers that people may compare later.
    job["evaluation"] = {"every": 2, "prompts": 4, "show": 4, "data": {"use": "fake"}}
    human = {"wait_s": 100.0, "poll_s": 0.05}
    job["rewards"] = {"liked": {"use": "human", "timeout_s": 120.0, "config": human}}
    return job


def is_liked(answer: str) -> bool:
    return answer.count("a") > 0


class Rater(threading.Thread):
    """Labels what the page of a queue shows, until it is stopped.

    pause_s: between two labels.
    """

    def __init__(self, queue: Path, pause_s: float) -> None:
        super().__init__(daemon=True)
        self._queue = queue
        self._pause_s = pause_s
        self._is_over = threading.Event()
        self.labels = 0

    def stop(self) -> None:
        self._is_over.set()
        self.join(30)

    def run(self) -> None:
        while not (self._queue / "questions.jsonl").exists() and not self._is_over.wait(0.05):
            pass
        command = [sys.executable, "-m", "gcore_core", "human", "label", str(self._queue)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                words = (word for line in process.stdout for word in line.split())
                address = next(word for word in words if word.startswith("http:"))
                self._label(address)
            finally:
                process.kill()

    def _label(self, address: str) -> None:
        base, _, token = address.partition("/?token=")
        with httpx2.Client(base_url=base, follow_redirects=True) as client:
            client.get("/", params={"token": token})
            page = client.post("/name", data={"name": "anna"}).text
            while not self._is_over.wait(self._pause_s):
                keys = _FIELD.findall(page)
                if not keys:
                    time.sleep(0.05)
                    page = client.get("/").text
                    continue
                choice = str(int(is_liked(_ANSWER.findall(page)[0])))
                answer = client.post("/answer", data={"key": keys[0], "choice": choice})
                assert answer.status_code == 200, answer.text
                page = answer.text
                self.labels += 1


@contextlib.contextmanager
def labelling(queue: Path, pause_s: float = 0.0) -> Iterator[Rater]:
    rater = Rater(queue, pause_s)
    rater.start()
    yield rater
    rater.stop()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(run: runs.Run, steps: int = 2) -> None:
    """Each record's reward is its answer's label, and no answer was labelled twice."""
    queue = run.path / "human"
    answers = {
        line["key"]: line["answer"]
        for line in lines_of(queue / "questions.jsonl")
        if line["what"] == "question"
    }
    labels = lines_of(queue / "labels.jsonl")
    assert max(Counter(label["key"] for label in labels).values()) == 1
    assert {label["key"] for label in labels} == {*answers}
    assert all(label["value"] == is_liked(answers[label["key"]]) for label in labels)
    trained = [
        line
        for path in (run.path / "trace").glob("*.jsonl")
        for line in lines_of(path)
        if line.get("verdict") == "trained"
    ]
    assert len(trained) == steps * 2 * 4  # steps, prompts, samples
    assert {line["rewards"]["liked"] for line in trained} == {0.0, 1.0}


def test_a_run_waits_for_people_and_trains_on_what_they_say(tmp_path: Path) -> None:
    with runs.running(tmp_path, config()) as run, labelling(run.path / "human"):
        assert run.wait() == 0, run.output
    assert f"this run waits for people: g-core human label {run.path}" in run.output
    check(run)
    found = pairs_of_runs(run.path)
    assert 0 < len(found.pairs) <= 8
    assert {pair.prompt for pair in found.pairs} <= {f"row {i}" for i in range(4)}


@pytest.mark.slow
def test_a_wait_longer_than_the_runs_patience_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    with runs.running(tmp_path, config(run={"patience_s": 3.0})) as run:
        questions = run.path / "human" / "questions.jsonl"
        while not questions.exists():
            assert run.process.poll() is None, run.output
            time.sleep(0.1)
        time.sleep(8)
        assert len(lines_of(questions)) == len({line["key"] for line in lines_of(questions)})
        with labelling(run.path / "human"):
            assert run.wait() == 0, run.output
    assert "no sign of progress" not in run.output
    check(run)


@pytest.mark.slow
def test_a_run_that_is_killed_and_goes_on_asks_nobody_twice(tmp_path: Path) -> None:
    job = config(steps=3, checkpoint={"every": 1})
    with runs.running(tmp_path, job) as run, labelling(run.path / "human", pause_s=0.2) as rater:
        run.read_until("step 2/3")
        before = rater.labels
        while rater.labels < before + 3:
            assert run.process.poll() is None, run.output
            time.sleep(0.02)
        run.process.kill()
    labels_before = lines_of(run.path / "human" / "labels.jsonl")
    resume = [sys.executable, "-m", "gcore_core", "resume", str(run.path)]
    with labelling(run.path / "human"):
        done = subprocess.run(
            [*resume, "launcher.config.socket_dir=/tmp"],
            cwd=run.directory,
            env=runs.os.environ | {"PYTHONPATH": f"{runs.REPOSITORY}:{run.directory}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    check(run, steps=3)
    questions = lines_of(run.path / "human" / "questions.jsonl")
    times_asked = Counter(line["key"] for line in questions if line["what"] == "question")
    assert {times_asked[label["key"]] for label in labels_before} == {1}


@pytest.mark.slow
def test_a_run_whose_people_do_not_come_says_so(tmp_path: Path) -> None:
    job = config()
    job["rewards"]["liked"]["config"]["wait_s"] = 1.0
    code, run = runs.finish(tmp_path, job)
    assert code == 6
    assert "not labelled within wait_s, 1 s" in run.output


def test_a_job_whose_time_limit_comes_before_the_people_is_refused(tmp_path: Path) -> None:
    job = config()
    job["rewards"]["liked"]["timeout_s"] = 10.0
    code, run = runs.finish(tmp_path, job)
    assert code == 2
    assert "rewards.liked.timeout_s: must be longer than config.wait_s (100 s), is 10" in run.output
