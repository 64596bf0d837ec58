"""What a lost node agent has left is ended and removed, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from gcore_core.contract.errors import ConfigError
from gcore_core.node import process_record
from gcore_core.node.process_record import ProcessRecord, StartedProcess, clear_up, identify
from gcore_core.run import start
from gcore_core.run.restart_supervisor import Start


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def record_of(path: Path, process: subprocess.Popen[bytes], file: Path) -> dict[str, object]:
    """Writes down a worker and a file of an agent that is lost; returns what is written."""
    file.touch()
    record = ProcessRecord(str(path))
    record.started("rollout.0", process.pid)
    record.hold_files([identify(str(file))])
    contents: dict[str, object] = msgspec.json.decode(path.read_bytes())
    contents["agent"] = None
    # This process stands for the supervisor.
    contents["supervisor"] = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    path.write_bytes(msgspec.json.encode(contents))
    return contents


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_the_process_and_the_file_of_a_lost_agent_are_gone(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path, file = tmp_path / "record", tmp_path / "file"
    record_of(path, process, file)
    process.send_signal(signal.SIGSTOP)
    clear_up(path)
    assert process.poll() == -signal.SIGKILL
    assert not file.exists()
    assert not path.exists()


@pytest.mark.parametrize("what", ["pid", "boot", "file"])
def test_another_process_and_another_file_of_the_same_name_are_kept(
    what: str, process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path, file = tmp_path / "record", tmp_path / "file"
    contents = record_of(path, process, file)
    if what == "pid":
        ticks = start_ticks(process.pid) - 1
        contents["workers"] = {"rollout.0": {"pid": process.pid, "start_ticks": ticks}}
    elif what == "boot":
        contents["boot"] = "another start of the machine"
    else:
        file.rename(tmp_path / "first")  # so that its inode is not given again
        file.touch()
    path.write_bytes(msgspec.json.encode(contents))
    clear_up(path)
    assert (process.poll() is None) == (what != "file")
    assert file.exists() == (what != "pid")
    assert not path.exists()


@pytest.mark.parametrize("is_same", [True, False])
def test_the_slabs_and_sockets_of_a_lost_agent_are_removed(is_same: bool, tmp_path: Path) -> None:
    path, slabs = tmp_path / "record", tmp_path / "slabs"
    slabs.mkdir()
    (slabs / "1").touch()
    ProcessRecord(str(path), [str(slabs)])
    contents = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(contents | {"agent": None, "supervisor": None}))
    if not is_same:
        slabs.rename(tmp_path / "first")
        slabs.mkdir()
    clear_up(path)
    assert slabs.exists() == (not is_same)
    assert not path.exists()


def test_nothing_of_a_run_whose_supervisor_lives_is_touched(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path, file = tmp_path / "record", tmp_path / "file"
    contents = record_of(path, process, file)
    with subprocess.Popen(["sleep", "1000"]) as other:
        contents["supervisor"] = {"pid": other.pid, "start_ticks": start_ticks(other.pid)}
        path.write_bytes(msgspec.json.encode(contents))
        assert clear_up(path) == other.pid
        assert process.poll() is None
        assert file.exists() and path.exists()
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie is no longer alive
        assert clear_up(path) == 0
    assert process.poll() == -signal.SIGKILL
    assert not file.exists() and not path.exists()


def resumed(run_dir: Path) -> Start:
    return Start(file=run_dir / "config.yaml", resume=run_dir)


def no_display(steps: int) -> NoReturn:
    raise AssertionError("it is refused before")


def test_a_run_that_goes_on_is_not_resumed(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_ENDS_S", 0.0)
    path = tmp_path / "logs" / process_record.RECORD
    path.parent.mkdir()
    contents = record_of(path, process, tmp_path / "file")
    with subprocess.Popen(["sleep", "1000"]) as other:
        contents["supervisor"] = {"pid": other.pid, "start_ticks": start_ticks(other.pid)}
        path.write_bytes(msgspec.json.encode(contents))
        with ExitStack() as end, pytest.raises(ConfigError, match="goes on already") as error:
            start.prepare(
                Start(file=tmp_path / "config.yaml", resume=tmp_path), no_display, until_end=end
            )
        assert f"kill {other.pid}" in error.value.todo
        other.kill()
    with ExitStack() as end, pytest.raises(ConfigError, match="no such file"):
        start.prepare(
            Start(file=tmp_path / "config.yaml", resume=tmp_path), no_display, until_end=end
        )
    assert process.poll() == -signal.SIGKILL


def test_what_a_later_agent_has_written_down_is_kept(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path, file = tmp_path / "record", tmp_path / "file"
    contents = record_of(path, process, file)
    lost = StartedProcess(process.pid, start_ticks(process.pid) - 1)
    clear_up(path, lost)
    assert process.poll() is None and file.exists() and path.exists()
    contents["agent"] = msgspec.to_builtins(lost)
    path.write_bytes(msgspec.json.encode(contents))
    clear_up(path, lost)
    assert process.poll() == -signal.SIGKILL
    assert not file.exists() and not path.exists()


def test_a_record_that_is_missing_or_damaged_does_no_harm(tmp_path: Path) -> None:
    clear_up(tmp_path / "absent")
    (tmp_path / process_record.RECORD).write_text("{")
    clear_up(tmp_path / process_record.RECORD)


def test_a_worker_that_has_ended_is_forgotten_and_a_full_disk_ends_nothing(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    record = ProcessRecord(str(tmp_path / "record"))
    record.started("rollout.0", process.pid)
    assert "rollout.0" in (tmp_path / "record").read_text()
    record.ended("rollout.0")
    assert "rollout.0" not in (tmp_path / "record").read_text()
    record.close()
    assert list(tmp_path.iterdir()) == []
    ProcessRecord(str(tmp_path / "absent" / "record")).started("rollout.0", process.pid)
    ProcessRecord("").started("rollout.0", process.pid)
