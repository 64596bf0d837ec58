"""Runs the quickstart on machines of namespaces, and disturbs it while it goes on."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.machines import SHELL, Machine

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
#: The shortest that a launcher takes.
PATIENCE_S = 8.0
#: For what takes long only on a machine that is busy.
LONG_S = 120.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def words(*overrides: str) -> list[str]:
    """Returns the command of a small quickstart that repeats bit for bit."""
    small = ("evaluation.every=0", "controller.config.prompts=8", "plugins=[]")
    command = [sys.executable, "-u", "-m", "gcore_core", "run", str(RECIPE)]
    return [*command, *small, "run.deterministic=true", *overrides]


def on(machines: Sequence[Machine], template: str = f"{SHELL} {{host}}") -> list[str]:
    """Returns the overrides that run a job on machines, each with one device."""
    hosts = ",".join(machine.address for machine in machines)
    return [
        "launcher.use=nodes/command",
        f"launcher.config.hosts=[{hosts}]",
        f"launcher.config.command={template}",
        "launcher.config.devices=1",
        f"launcher.config.patience_s={PATIENCE_S}",
    ]


def hash_of(output: str) -> str:
    """Returns the hash of the weights that a run has made."""
    (line,) = [line for line in output.splitlines() if line.startswith("weights_sha256")]
    return line.split()[1]


def alone(directory: Path, *overrides: str) -> str:
    """Runs the same job undisturbed, on this machine; returns the hash of its weights."""
    directory.mkdir()
    done = subprocess.run(
        words("cluster.devices=2", *overrides),
        cwd=directory,
        env=ENVIRONMENT,
        timeout=600,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return hash_of(done.stdout)


def left_on(machine: Machine) -> list[str]:
    """Returns the processes and the shared memory that a run has left on a machine."""
    return machine.processes() + machine.run(["ls", "/dev/shm"]).stdout.split()


def wait_until(holds: Callable[[], bool], within_s: float = LONG_S) -> None:
    """Waits until something holds. Fails when it does not come to hold."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < within_s, "it never came to hold"
        time.sleep(0.02)


class Watched:
    """A run whose lines are read as they come.

    run: its directory.
    """

    def __init__(self, process: subprocess.Popen[str], run: Path) -> None:
        self.run = run
        self._process = process
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._printed: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def line(self, pattern: str, within_s: float = LONG_S) -> str:
        """Waits for the next line in which a pattern is found, and returns it."""
        ends_s = time.monotonic() + within_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, ends_s - time.monotonic()))
            except queue.Empty:
                line = ""
            self._printed.append(line)
            assert line, f"no line has {pattern!r}:\n{self.output()[-4000:]}"
            if re.search(pattern, line):
                return line

    def step(self, after: int = 0) -> int:
        """Waits for the next line of a step behind ``after``; returns its number."""
        while True:
            number = int(self.line(r"^step +\d+/").split("/")[0].split()[1])
            if number > after:
                return number

    def output(self) -> str:
        return "".join(self._printed)

    def pid(self, agent: str, worker: str) -> str:
        """Returns the pid of a worker, on its machine, as its agent has told it last."""
        log = (self.run / "logs" / f"{agent}.log").read_text()
        return str(re.findall(rf"{re.escape(worker)} is started, pid (\d+)", log)[-1])

    def ends(self, within_s: float = LONG_S) -> str:
        """Waits for a good end; returns all that was printed."""
        code = self._process.wait(within_s)
        self._reader.join()
        while line := self._lines.get():
            self._printed.append(line)
        assert code == 0, self.output()
        return self.output()


@contextlib.contextmanager
def watched(machine: Machine, directory: Path, *overrides: str) -> Iterator[Watched]:
    """Starts a run on a machine; kills it at the end of the block, if it has not ended."""
    directory.mkdir(exist_ok=True)
    process: subprocess.Popen[str] = machine.start(
        words(*overrides),
        cwd=directory,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield Watched(process, directory / "runs" / "quickstart" / "001")
        finally:
            machine.run(["pkill", "-KILL", "-f", "gcore_core run"], check=False)
            process.wait(LONG_S)
