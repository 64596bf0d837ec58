"""A run relies on nothing that its starter has set: signals, streams, variables, priority."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs
from tests.support.runs import REPOSITORY

#: Signals by which processes of a run are ended, waited for, or asked for their stacks.
RELIED_ON = {signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1}
#: Blocks every signal and becomes the command.
BLOCKED = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals());"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)
#: How a run is started -> a shell script whose words are the command.
STARTS = {
    "nohup": 'exec nohup "$@"',
    "signals ignored": "trap '' CHLD ALRM USR1 USR2 HUP; exec \"$@\"",
    "signals blocked": f'exec {shlex.quote(sys.executable)} -c {shlex.quote(BLOCKED)} "$@"',
    "streams closed": 'exec "$@" <&- >&- 2>&-',
    "no variables": f'exec env -i OMP_NUM_THREADS=1 PYTHONPATH={REPOSITORY} "$@"',
    "other variables": "export LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii PYTHONUNBUFFERED=1"
    ' PYTHONOPTIMIZE=2 PYTHONHASHSEED=5 PYTHONSAFEPATH=1; exec "$@"',
    "private files and a low priority": 'umask 077; exec nice -n 5 "$@"',
}


def config(steps: int = 4) -> dict[str, Any]:
    """A job whose generator waits in its third step for the file ``go on``."""
    job: dict[str, Any] = runs.job(run={"steps": steps}, checkpoint={"every": 1})
    job["roles"] = {"policy": {"use": "trouble/recording"}, "rollout": {"use": "trouble/halting"}}
    return job


def before(how: str) -> list[str]:
    return ["bash", "-c", STARTS[how], "start"] if how else []


def signals_of(pid: int, word: str) -> set[int]:
    """Returns signals of a process: those it ignores ("SigIgn") or blocks ("SigBlk")."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith(f"{word}:"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


@pytest.mark.parametrize("how", STARTS)
def test_a_run_ends_well_however_it_was_started(how: str, tmp_path: Path) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config(), before=before(how)) as run:
        runs.wait_for(tmp_path / "at rollout", run.process)
        for name, pid in {**run.pids(), "supervisor": run.supervisor()}.items():
            assert not signals_of(pid, "SigIgn") & RELIED_ON, name
            assert not signals_of(pid, "SigBlk") & RELIED_ON, name
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
    assert (run.path / "weights" / "logits.json").exists()


@pytest.mark.parametrize("how", ["nohup", "signals ignored", "signals blocked", "streams closed"])
def test_a_run_saves_its_state_and_ends_by_sigterm_however_it_was_started(
    how: str, tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config(1000), before=before(how)) as run:
        runs.wait_for(tmp_path / "at rollout", run.process)
        watched = runs.Watched(runs.descendants(run.process.pid))
        os.kill(run.process.pid, signal.SIGTERM)
        (tmp_path / "go on").touch()
        assert run.wait() == 143, run.output
        assert watched.all_end_within(0), "a process survives"
    assert list((run.path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("how", "code"), [("nohup", 0), ("", -signal.SIGHUP)])
def test_a_run_outlives_its_terminal_under_nohup_alone(how: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config(), before=before(how)) as run:
        runs.wait_for(tmp_path / "at rollout", run.process)
        os.killpg(run.process.pid, signal.SIGHUP)
        (tmp_path / "go on").touch()
        assert run.wait() == code, run.output


def test_a_command_without_standard_streams_ends_with_its_own_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gcore_core", "check", str(tmp_path / "no.yaml")]
    done = subprocess.run([*before("streams closed"), *command], check=False, timeout=120)
    assert done.returncode == 2
