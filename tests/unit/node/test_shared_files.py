"""Files that engines leave in shared memory: each worker's own are removed, and no others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gcore_core.node.shared_files import Maker, SharedFiles

#: Makes the files that its arguments name and holds them: mapped with a closed descriptor, open, or
#: open in a child with a session of its own.
PROGRAM = """
import mmap, subprocess, sys
mapped, opened, given = sys.argv[1:]
with open(mapped, "xb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
held = open(opened, "xb")
with open(given, "xb") as file:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[file.fileno()], start_new_session=True)
print("made", flush=True)
sys.stdin.read()
"""  # noqa: E501
WORDS = ("engine_*",)
Make = Callable[[str], Maker]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Starts a worker that makes three files, by their common start."""
    workers = []

    def start(name: str) -> Maker:
        paths = [str(tmp_path / f"{name}{i}") for i in range(3)]
        worker = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        workers.append(worker)
        assert worker.stdout is not None and worker.stdout.readline() == b"made\n"
        return Maker(worker.pid, WORDS)

    yield start
    for worker in workers:
        worker.kill()
        worker.communicate()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_workers_files_go_with_it_and_all_others_stay(make: Make, tmp_path: Path) -> None:
    (tmp_path / "engine_before").touch()
    files = SharedFiles(tmp_path)
    makers = {"rollout.0": make("engine_a"), "rollout.1": make("engine_b")}
    make("engine_c")  # of another run
    make("data")  # held by no worker of this run, and of another name
    makers["rollout.2"] = make("other")  # a worker's own, of another name
    files.look(makers)
    assert len(files.owned()) == 6
    del makers["rollout.0"]
    everything = names(tmp_path)
    files.ended("rollout.0", makers)
    assert everything - names(tmp_path) == {"engine_a0", "engine_a1", "engine_a2"}
    del makers["rollout.1"]
    files.ended("rollout.1", makers)
    assert {name for name in names(tmp_path) if name.startswith("engine")} == {
        "engine_before",
        "engine_c0",
        "engine_c1",
        "engine_c2",
    }
    assert files.owned() == []


def test_a_file_that_another_worker_holds_stays_until_that_has_ended_too(
    make: Make, tmp_path: Path
) -> None:
    files = SharedFiles(tmp_path)
    maker = make("engine_a")
    makers = {"rollout.0": maker}
    files.look(makers)
    makers = {"rollout.1": maker}  # the same processes stand for another worker
    files.ended("rollout.0", makers)
    assert len(names(tmp_path)) == 3
    files.ended("rollout.1", {})
    assert names(tmp_path) == set()


def test_a_new_file_of_the_same_name_is_not_the_workers(make: Make, tmp_path: Path) -> None:
    files = SharedFiles(tmp_path)
    files.look({"rollout.0": make("engine_a")})
    (tmp_path / "engine_a1").rename(tmp_path / "moved")
    (tmp_path / "engine_a1").touch()
    files.ended("rollout.0", {})
    assert names(tmp_path) == {"engine_a1", "moved"}


def test_a_file_that_its_worker_has_removed_is_forgotten(make: Make, tmp_path: Path) -> None:
    """Else what is known, and written down, would grow with all that an engine ever made."""
    files = SharedFiles(tmp_path)
    makers = {"rollout.0": make("engine_a")}
    files.look(makers)
    assert len(files.owned()) == 3
    (tmp_path / "engine_a1").unlink()
    files.look(makers)
    assert {Path(file.path).name for file in files.owned()} == {"engine_a0", "engine_a2"}


def test_somebody_elses_file_is_looked_at_only_a_few_times(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SharedFiles(tmp_path)
    makers = {"rollout.0": make("other")}
    (tmp_path / "engine_x").touch()
    looked = []
    monkeypatch.setattr(
        "gcore_core.node.shared_files._held_paths",
        lambda pids, prefix: looked.append(pids) or set(),
    )
    for _ in range(20):
        files.look(makers)
    assert len(looked) == 5


def test_a_directory_that_is_not_there_holds_no_files(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path / "absent")
    files.look({"rollout.0": Maker(1, WORDS)})
    assert files.owned() == []
