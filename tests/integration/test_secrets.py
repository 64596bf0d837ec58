"""The run's secret is in the processes' memory and nowhere else, and nobody outside the machine can
knock.
"""

from __future__ import annotations

import base64
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

SECRET = b"the-secret-of-this-run-32-bytes!"
FORMS = [SECRET, SECRET.hex().encode(), base64.b64encode(SECRET)[:-4]]
KNOWN = f'''
"""Gives every run the same secret, so that a test can look for it."""
import secrets, sys

_drawn = secrets.token_bytes


def token_bytes(size=None):
    launching = sys._getframe(1).f_globals["__name__"] == "gcore_core.node.launchers"
    return {SECRET!r} if launching else _drawn(size)


secrets.token_bytes = token_bytes
'''


def job(**changes: Any) -> dict[str, Any]:
    return {**runs.job(**changes), "local": [*runs.JOB["local"], "known.py"]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "known.py").write_text(KNOWN)
    return tmp_path


def files_with_the_secret(*roots: Path) -> list[str]:
    found = []
    for root in roots:
        for file in (
            path
            for path in root.rglob("*")
            if path.is_file() and not path.name.startswith("known.")
        ):
            content = file.read_bytes()
            found += [str(file)] * any(form in content for form in FORMS)
    return found


def told_to(pid: int) -> bytes:
    """What everybody on the machine, or a dump of the environment, can read of a process."""
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def listening(pid: int) -> Iterator[str]:
    """The process's listening sockets of the internet families, as the kernel lists them."""
    mine = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                yield words[1]


@pytest.mark.protects
def test_a_run_s_secret_is_in_no_argument_environment_file_or_message(place: Path) -> None:
    with runs.running(place, job(run={"steps": 1_000_000})) as run:
        run.read_until(" 1/")
        store, (sockets,) = run.store(), run.private.iterdir()
        processes = [run.process.pid, *runs.descendants(run.process.pid)]
        assert len(processes) >= 7
        for pid in processes:
            words = told_to(pid)
            assert words
            assert not any(form in words for form in FORMS)
            assert list(listening(pid)) == []
        for directory in (sockets, store):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) & 0o077 for file in store.iterdir()} <= {0}
        assert any(path.is_socket() for path in sockets.iterdir())
        assert files_with_the_secret(store, sockets) == []
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 143
    assert not any(form.decode() in run.output for form in FORMS)
    assert files_with_the_secret(place) == []


@pytest.mark.protects
@pytest.mark.parametrize("rollout", ["trouble/raises", "trouble/leaves", "trouble/gap"])
def test_a_crash_does_not_reveal_the_secret(rollout: str, place: Path) -> None:
    code, run = runs.finish(place, job(roles={"rollout": {"use": rollout}}))
    assert code != 0
    assert not any(form.decode() in run.output for form in FORMS)
    assert files_with_the_secret(place) == []


def test_the_search_finds_a_secret_that_was_written(place: Path) -> None:
    """And the run has the secret that is searched for: a plugin that writes its spec down is
    caught.
    """
    (place / "leak.py").write_text(
        "import sys\n"
        "from gcore_core import hookimpl; from gcore_core.contract import providers as p\n"
        "from gcore_testing import fake\n"
        "class Leak(fake.FakeScorer):\n"
        "    def __init__(self, config, context):\n"
        "        super().__init__(config, context)\n"
        "        frame = sys._getframe()\n"
        "        while not hasattr(frame.f_locals.get('self'), '_spec'):\n"
        "            frame = frame.f_back\n"
        "        print(frame.f_locals['self']._spec)\n"
        "@hookimpl\n"
        "def gcore_rewards():\n"
        "    yield p.RewardProvider(summary='-', factory='leak:Leak')\n"
    )
    config = {
        **job(rewards={"letters": {"use": "leak"}}),
        "local": [*runs.JOB["local"], "known.py", "leak.py"],
    }
    code, run = runs.finish(place, config)
    assert code == 0, run.output
    assert [Path(file).name for file in files_with_the_secret(place)] == ["scorer.0.log"]
