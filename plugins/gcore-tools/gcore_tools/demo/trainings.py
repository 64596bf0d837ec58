"""Trains the quickstart twice at once, kills processes of one run, and compares the weights.

This is ``g-core demo``. Each run is a ``g-core run`` of its own, in a process group of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from gcore_core.contract.errors import ConfigError, WorkerDied
from gcore_core.contract.installing import install_command
from gcore_core.contract.run_files import LOGS, WEIGHTS, log_path, read_metrics
from gcore_core.kits.calls import numbered_directory
from gcore_core.kits.commands import package_folders
from gcore_core.kits.runs import saved_steps, weights_sha256

RECIPE = "quickstart.yaml"
_FOLDER = "recipes"
UNDISTURBED = "undisturbed"
KILLED = "killed"
_POLL_S = 0.2
#: Seconds in which a run that is told to end saves its state and ends its processes; then it is
#: killed.
_END_WITHIN_S = 30.0
_STARTED = re.compile(r"INFO (\S+) is started, pid (\d+)")
_AGENT = "agent.0"
_AGENT_MODULE = "gcore_core.node.agent"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Says what is shown.

    steps: of each run.
    kills: how many processes of the second run are killed.
    seed: of both runs, and of the choice of processes and moments.
    recipe: the file that both train.
    """

    steps: int
    kills: int
    seed: int
    recipe: Path

    @property
    def checkpoint_every(self) -> int:
        """Steps from one checkpoint to the next: at most so many are trained again after a kill."""
        return max(1, min(5, self.steps // 8))


@dataclass
class _Training:
    """One ``g-core run`` that trains in ``directory``."""

    directory: Path
    process: subprocess.Popen[bytes]
    output: Path
    kills: list[str] = field(default_factory=list)
    is_told: bool = False

    def stop(self) -> None:
        """Tells the run to save its state and end; told again, it would end without saving."""
        if self.process.poll() is None and not self.is_told:
            self.is_told = True
            self.process.send_signal(signal.SIGTERM)  # Ctrl-C may be ignored, in a script

    @property
    def steps(self) -> int:
        """How many steps are finished."""
        rows = read_metrics(self.directory)
        return int(rows[-1]["step"]) if rows else 0

    def phase(self) -> str:
        """Returns the last line that the run has printed."""
        text = self.output.read_text("utf-8", "replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "starting"


def find_recipe(named: Path | None) -> Path:
    """Returns the recipe to train: the named one, or the quickstart.

    The quickstart of the working directory, which a user may have changed, goes before the one that
    is installed. Raises ConfigError when there is none.
    """
    if named is not None:
        if not named.is_file():
            raise ConfigError("no such file.", where=str(named), todo="name a file of YAML")
        return named
    for folder in (Path.cwd() / _FOLDER, *(folder for _, folder in package_folders(_FOLDER))):
        if (folder / RECIPE).is_file():
            return folder / RECIPE
    raise ConfigError(
        f"{_FOLDER}/{RECIPE} is not here.",
        where="g-core demo",
        why="the gcore-tools that is installed has no recipes",
        todo=f"{install_command('gcore-tools')}, or name a file: --recipe FILE",
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Says how the two runs ended.

    directory: of both runs.
    hashes: SHA-256 of the weights, of the undisturbed run first.
    kills: the processes that were killed, in order.
    """

    directory: Path
    hashes: tuple[str, str]
    kills: list[str]


def run(settings: Settings, show: Callable[[str, bool], None]) -> Outcome:
    """Trains both runs to their end, and hashes their weights.

    The second run's processes are killed at random steps. Every process has ended when this
    returns or raises.

    show: called with a line of text, and whether it stays; one that does not is replaced by the
        next.

    Raises WorkerDied when a run fails.
    """
    directory = numbered_directory(Path("runs"), "demo").absolute()
    with _training(settings, directory / UNDISTURBED) as calm:
        with _training(settings, directory / KILLED) as harmed:
            try:
                _watch(settings, calm, harmed, show)
            except BaseException:
                calm.stop()  # beside the other, which is stopped and waited for here
                raise
    first, second = (weights_sha256(one.directory / WEIGHTS) for one in (calm, harmed))
    return Outcome(directory=directory, hashes=(first, second), kills=harmed.kills)


@contextlib.contextmanager
def _training(settings: Settings, directory: Path) -> Iterator[_Training]:
    """Starts a run; when the block ends, nothing of it is left."""
    output = directory.with_suffix(".log")
    command = [sys.executable, "-u", "-m", "gcore_core", "run", str(settings.recipe)]
    overrides = {
        "run.dir": json.dumps(str(directory)),  # YAML, whatever is in its name
        "run.steps": settings.steps,
        "run.seed": settings.seed,
        "run.deterministic": "true",  # replicas and batches by ordinal: so what it computes repeats
        "evaluation.every": 0,
        "checkpoint.every": settings.checkpoint_every,
        "checkpoint.restarts": settings.kills,
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, *(f"{key}={value}" for key, value in overrides.items())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    training = _Training(directory, process, output)
    try:
        yield training
    finally:
        training.stop()
        try:
            process.wait(_END_WITHIN_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()  # its agent notices that, and ends the rest
            process.wait()


def _watch(
    settings: Settings, calm: _Training, harmed: _Training, show: Callable[[str, bool], None]
) -> None:
    """Returns when both runs have ended well; meanwhile kills processes of one of them."""
    chance = random.Random(settings.seed)
    # After the first checkpoint, from which a run goes on that has lost its trainer.
    first = settings.checkpoint_every + 1
    moments = sorted(chance.randrange(first, settings.steps) for _ in range(settings.kills))
    shown = ""
    while True:
        running = [one for one in (calm, harmed) if one.process.poll() is None]
        for one in (calm, harmed):
            if one.process.returncode:
                raise _failure(one)
        is_due = moments and harmed.steps >= moments[0] and harmed in running
        if is_due and (victim := _kill(harmed, chance)):
            harmed.kills.append(victim)
            show(f"step {harmed.steps}: SIGKILL to {victim} of the second run", True)
            moments.pop(0)
        line = _progress(settings, calm, harmed)
        if line != shown:
            show(line, False)
            shown = line
        if not running:
            return
        time.sleep(_POLL_S)


def _progress(settings: Settings, calm: _Training, harmed: _Training) -> str:
    if not calm.steps and not harmed.steps:
        return harmed.phase() if "%" in harmed.phase() else calm.phase()
    parts = [
        f"{name} {one.steps}/{settings.steps}"
        for name, one in ((UNDISTURBED, calm), (KILLED, harmed))
    ]
    return "steps: " + "   ".join(parts)


def _kill(training: _Training, chance: random.Random) -> str:
    """Kills one process of a run at random, its node agent or a worker; returns its name.

    It is "" where none was found, since the run is just starting again, and where the run has no
    checkpoint yet to go on from.
    """
    alive = _processes(training) if saved_steps(training.directory) else {}
    if not alive:
        return ""
    name = chance.choice(sorted(alive))
    try:
        os.kill(alive[name], signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return name


def _processes(training: _Training) -> dict[str, int]:
    """Returns the live processes of a run, by name: its node agent, and the agent's workers."""
    try:
        descendants = psutil.Process(training.process.pid).children(recursive=True)
        commands = {process.pid: process.cmdline() for process in descendants}
        log = log_path(training.directory, _AGENT).read_text("utf-8", "replace")
    except (psutil.Error, OSError):
        return {}
    named = {int(pid): name for name, pid in _STARTED.findall(log)}
    workers = {named[pid]: pid for pid in commands if pid in named}
    agents = [pid for pid, command in commands.items() if _AGENT_MODULE in command]
    return {**workers, _AGENT: agents[0]} if workers and agents else {}


def _failure(training: _Training) -> WorkerDied:
    text = training.output.read_text("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return WorkerDied(
        f"the run ended with exit code {training.process.returncode}",
        where=str(training.directory),
        why="\n".join(lines[-3:]),
        todo=f"what it printed: {training.output}, its logs: {training.directory / LOGS}",
    )
