"""The commands as processes: what is answered is on the disk before the browser knows."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

_FIELD = re.compile(r'name="(key|order|number)" value="([^"]*)"')


@dataclass
class Page:
    """A page that a process serves, and a rater before it."""

    process: subprocess.Popen[str]
    address: str
    said: list[str]

    @contextlib.contextmanager
    def rater(self, name: str) -> Iterator[httpx2.Client]:
        base, _, token = self.address.partition("?token=")
        with httpx2.Client(base_url=base.rstrip("/"), follow_redirects=True) as client:
            client.get("/", params={"token": token})
            client.post("/name", data={"name": name})
            yield client


@contextlib.contextmanager
def serving(*words: str) -> Iterator[Page]:
    process = subprocess.Popen(
        [sys.executable, "-m", "gcore_core", "human", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith("open "):
                yield Page(process, line.split()[1], said)
                return
        pytest.fail(f"no page: {''.join(said)}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def refused(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "gcore_core", "human", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stderr


def answer(client: httpx2.Client, choice: str) -> int:
    """Judges what the page shows; returns the status, 0 where it shows nothing."""
    fields = dict(_FIELD.findall(client.get("/").text))
    if "key" not in fields:
        return 0
    form = {"key": fields["key"], "order": fields["order"], "choice": choice}
    return client.post("/answer", data=form).status_code


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"p{i}", "answers": ["good", "bad"]} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_killed_page_has_lost_nothing_and_goes_on_where_it_stopped(
    answers: Path, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl.judgements.jsonl"
    with serving("rate", "--file", str(answers)) as page, page.rater("anna") as anna:
        assert [answer(anna, "left"), answer(anna, "tie")] == [200, 200]
        page.process.send_signal(signal.SIGKILL)
        page.process.wait()
        assert [line["verdict"] for line in lines_of(path)] == ["better", "tie"]
    with serving("rate", "--file", str(answers)) as page, page.rater("anna") as anna:
        assert [answer(anna, "right"), answer(anna, "right"), answer(anna, "right")] == [
            200,
            200,
            0,
        ]
    lines = lines_of(path)
    assert len({line["pair"] for line in lines}) == len(lines) == 4
    assert [line["number"] for line in lines] == [1, 2, 3, 4]


def test_a_page_listens_on_loopback_alone_and_ends_with_the_users_signal(answers: Path) -> None:
    with serving("rate", "--file", str(answers)) as page:
        port = int(re.findall(r":(\d+)/", page.address)[0])
        listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        homes = re.findall(rf": ([0-9A-F]+):{port:04X} \S+ 0A ", listening)
        assert homes == ["0100007F"]
        page.process.send_signal(signal.SIGINT)
        assert page.process.wait(20) in (0, 130)


def test_a_port_in_use_and_a_file_in_use_are_refused(answers: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = refused("rate", "--file", str(answers), "--port", port)
    assert code == 7 and f"port {port} is taken" in said and "--port" in said
    with serving("rate", "--file", str(answers)):
        code, said = refused("rate", "--file", str(answers))
    assert code == 2 and "another process writes to this file" in said and "--to" in said
