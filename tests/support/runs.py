"""Runs of fakes in real processes: start one, read what it wrote, look at its processes."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
FAKE = REPOSITORY / "plugins" / "gcore-testing" / "gcore_testing" / "fake.py"
PATIENCE_S = 120.0

TROUBLE = '''
"""Fakes that misbehave, and a trainer that writes down what it was given."""
import faulthandler, json, os, re, secrets, signal, subprocess, threading, time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.scorer import Score
from gcore_core.contract.traits import Traits
from gcore_testing import fake


class Recording(fake.FakeTrainer):
    def prepare(self, records, scalars):
        with open("batches.jsonl", "a") as file:
            file.write(json.dumps([[r.ordinal, r.sample] for r in records]) + "\\n")
        return super().prepare(records, scalars)


def halt(what):
    """Where a test has laid the file ``halt <what>``: says that it is here, and waits until the test says "go on"."""
    if os.path.exists("halt " + what):
        Path("at " + what).touch()
        while not os.path.exists("go on"):
            time.sleep(0.01)


class Halting(fake.FakeGenerator):
    def step(self):
        evaluates = any(request.greedy for request, _ in self._running.values())
        halt({0: "begin", 2: "evaluation" if evaluates else "rollout"}.get(self.version, ""))
        return super().step()


class Evaluated(fake.FakeGenerator):
    """Writes down which weights an evaluation asks, each once a process."""

    def submit(self, requests):
        greedy = any(request.greedy for request in requests)
        if greedy and getattr(self, "_seen", None) != self.version:
            self._seen = self.version
            with open("evaluated.txt", "a") as file:
                file.write(f"{self.version}\\n")
        return super().submit(requests)


class Freezes(fake.FakeGenerator):
    def begin_weights(self, plan):
        if plan.version == 2 and not os.path.exists("frozen"):
            Path("frozen").touch()
            os.kill(os.getpid(), 19)  # SIGSTOP
        super().begin_weights(plan)


class Stops(fake.FakeGenerator):
    """The first process is stopped as it starts."""

    def __init__(self, *told):
        if not os.path.exists("stopped"):
            Path("stopped").touch()
            os.kill(os.getpid(), 19)  # SIGSTOP
        super().__init__(*told)


class Crashes(fake.FakeGenerator):
    """While the file ``crash`` is there, every process that draws beyond version 2 ends like one without memory."""

    def step(self):
        if self.version >= 2 and os.path.exists("crash"):
            print("no memory for the cache of keys", flush=True)
            os.kill(os.getpid(), 9)
        return super().step()


class Hangs(fake.FakeGenerator):
    """Where a test has laid the file ``hang <what>``, the thread of the one that comes there first hangs for ever."""

    def _hang(self, what):
        try:
            os.rename("hang " + what, "hung")
        except FileNotFoundError:
            return
        Path("hung").touch()
        threading.Event().wait()

    def begin_weights(self, plan):
        self._pushed = plan.version
        super().begin_weights(plan)

    def load_weights(self, tensors):
        if self._pushed == 2:
            self._hang("load")
        super().load_weights(tensors)

    def commit_weights(self, plan):
        if self._pushed == 2:
            self._hang("commit")
        super().commit_weights(plan)


class Halts(Recording):
    def train(self, step, *told):
        if step == 2:
            halt("train")
        return super().train(step, *told)

    def finish_save(self):
        if self.version > 2:
            halt("save")
        return super().finish_save()


class Raises:
    def __init__(self, config, context):
        raise RuntimeError("no such device")


class Leaves:
    def __init__(self, config, context):
        print("about to leave")
        os._exit(3)


class Gap(fake.FakeGenerator):
    def _finished(self, request, letters, status):
        found = super()._finished(request, letters, status)
        return replace(found, columns={**found.columns, "logp": found.columns["logp"] + 0.5})


class Pictures(fake.FakeGenerator):
    """A group's records share a picture."""

    def _finished(self, request, letters, status):
        found = super()._finished(request, letters, status)
        return replace(found, media={"image": np.full((64, 64, 3), request.ordinal % 251, np.uint8)})


def looked_at(record):
    image = record.media["image"]
    if image.shape != (64, 64, 3) or set(image.flat) != {record.ordinal % 251}:
        raise ValueError("another picture")
    with open("pictures.txt", "a") as file:
        file.write(f"{record.ordinal} {image.__array_interface__['data'][0]}\\n")


class Looks(fake.FakeScorer):
    def score(self, records):
        for record in records:
            looked_at(record)
        return super().score(records)


class Sees(Recording):
    def prepare(self, records, scalars):
        for record in records:
            looked_at(record)
        return super().prepare(records, scalars)


class Told(Sees):
    """Writes down every record that older weights had sampled: what it is, its columns and its picture."""

    def prepare(self, records, scalars):
        with open("stale.jsonl", "a") as file:
            for r in (record for record in records if not record.fresh):
                told = {name: np.asarray(column).tolist() for name, column in sorted(r.columns.items())}
                row = [self.version, r.ordinal, r.sample, told, int(r.media["image"].sum())]
                file.write(json.dumps(row) + "\\n")
        return super().prepare(records, scalars)


class Shares(fake.FakeGenerator):
    """Makes a file in shared memory, as engines do; a child that holds it, too, outlives its worker."""

    def __init__(self, config, context):
        super().__init__(config, context)
        path = f"/dev/shm/gctrouble_{secrets.token_hex(8)}"
        self._held = open(path, "xb")
        with open("shared.txt", "a") as file:
            file.write(path + "\\n")
        subprocess.Popen(["sleep", "1000"], pass_fds=[self._held.fileno()])


class Verbose(fake.FakeGenerator):
    def _finished(self, request, letters, status):
        found = super()._finished(request, letters, status)
        return replace(found, media={f"image {i}": np.zeros(i) for i in range(9)})


class HangsOnce(fake.FakeScorer):
    def score(self, records):
        if not os.path.exists("hung"):
            Path("hung").touch()
            time.sleep(3600)
        return super().score(records)


class HoldsLock(fake.FakeScorer):
    """Never returns from a regular expression, which holds the interpreter's lock, for one prompt."""

    def score(self, records):
        if any(record.ordinal == 2 for record in records):
            re.match("(a+)+$", "a" * 64 + "b")
        return super().score(records)


class Disarms(HoldsLock):
    """Takes all signals and timers for itself before that."""

    def score(self, records):
        signal.signal(signal.SIGALRM, lambda number, frame: Path("rung").touch())
        signal.alarm(0)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        return super().score(records)


class HoldsLoop(fake.FakeScorer):
    """A coroutine that computes for ever for one prompt, in place of waiting."""

    async def score(self, records):
        while any(record.ordinal == 2 for record in records):
            pass
        return super().score(records)


class NoLuck(fake.FakeScorer):
    def score(self, records):
        raise ValueError("no luck")


class NoMore(fake.FakeScorer):
    """Fails from the third step of six prompts on, unless a test has laid the file ``mended``."""

    def score(self, records):
        if any(record.ordinal >= 12 for record in records) and not os.path.exists("mended"):
            raise ValueError("no more")
        return super().score(records)


class Nan(fake.FakeScorer):
    def score(self, records):
        return [Score(value=float("nan")) for _ in records]


@dataclass(frozen=True, kw_only=True)
class Saves(fake.FakeTrainerConfig):
    def traits(self):
        return replace(super().traits(), saves_in_background=True)


@dataclass(frozen=True, kw_only=True)
class Repeats(fake.FakeGeneratorConfig):
    def traits(self):
        return Traits(receives_weights=True, fingerprints=True, determinism=True, abort=True)


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(name="recording", summary="-", factory="trouble:Recording", config=fake.FakeTrainerConfig)
    yield p.TrainerProvider(
        name="halts", summary="-", factory="trouble:Halts", config=Saves,
    )
    yield p.TrainerProvider(name="told", summary="-", factory="trouble:Told", config=fake.FakeTrainerConfig)
    yield p.TrainerProvider(name="sees", summary="-", factory="trouble:Sees", config=fake.FakeTrainerConfig)


@hookimpl
def gcore_generators():
    for cls in (Raises, Leaves, Gap, Pictures, Verbose, Halting, Evaluated, Freezes, Stops, Crashes, Hangs):
        yield p.GeneratorProvider(
            name=cls.__name__.lower(), summary="-", factory=f"trouble:{cls.__name__}", config=Repeats,
        )
    yield p.GeneratorProvider(
        name="shares", summary="-", factory="trouble:Shares", config=Repeats,
        shared_memory=("gctrouble_*",),
    )


@hookimpl
def gcore_rewards():
    for cls in (HangsOnce, HoldsLock, HoldsLoop, Disarms, NoLuck, NoMore, Nan, Leaves, Raises, Looks):
        yield p.RewardProvider(name=cls.__name__.lower(), summary="-", factory=f"trouble:{cls.__name__}")
'''  # noqa: E501

JOB: dict[str, Any] = {
    "run": {"name": "fake", "steps": 3, "seed": 3},
    "launcher": {"use": "core/local"},
    "controller": {"shards": 2, "config": {"prompts": 6}},
    "data": {"use": "fake"},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "trouble/recording"}, "rollout": {"use": "fake"}},
    "rewards": {"letters": {"use": "fake"}},
    "local": [str(FAKE), "trouble.py"],
}


@dataclass
class Run:
    """One ``g-core run``. ``directory`` is its working directory; ``private`` the parent of its
    sockets.
    """

    directory: Path
    private: Path
    process: subprocess.Popen[str]
    printed: list[str] = field(default_factory=list)

    def read_until(self, text: str) -> str:
        """The first line that holds ``text``; fails when the output ends without it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if text in line:
                return line
        raise AssertionError(f"the run ended without {text!r}:\n{''.join(self.printed)}")

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code; everything it printed is in ``printed``."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.printed.append(rest)
        return self.process.returncode

    @property
    def output(self) -> str:
        return "".join(self.printed)

    @property
    def path(self) -> Path:
        return self.directory / "runs" / "fake" / "001"

    def metrics(self) -> list[dict[str, float]]:
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return [{**row, **row.get("metrics", {})} for row in rows]

    def weights(self) -> list[float]:
        return list(json.loads((self.path / "weights" / "logits.json").read_text()))

    def batches(self) -> list[list[list[int]]]:
        return [
            json.loads(line) for line in (self.directory / "batches.jsonl").read_text().splitlines()
        ]

    def pids(self) -> dict[str, int]:
        """Worker -> pid of its latest start, and the agent's own, as the agent wrote them down."""
        told = (self.path / "logs" / "agent.0.log").read_text()
        found = {
            name: int(pid) for name, pid in re.findall(r"INFO (\S+) is started, pid (\d+)", told)
        }
        record = json.loads((self.path / "logs" / "processes.json").read_text())
        return {**found, "agent.0": record["agent"]["pid"]}

    def supervisor(self) -> int:
        """The pid of the supervisor, which the process of ``g-core run`` starts."""
        (supervisor,) = children(self.process.pid)
        return supervisor

    def store(self) -> Path:
        """Where its slabs are, while it runs."""
        (sockets,) = self.private.iterdir()
        return Path("/dev/shm") / sockets.name


def job(**changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``JOB``, which a test may change, with some sections' keys replaced."""
    found = deepcopy(JOB)
    for name, part in changes.items():
        found[name] = {**found.get(name, {}), **part}
    return found


@contextmanager
def running(
    directory: Path, config: Mapping[str, Any], *overrides: str, before: Sequence[str] = ()
) -> Iterator[Run]:
    """Starts a run in a process group of its own; nothing of it is left when the block ends,
    whatever it did.

    before: words in front of the command, which start it as some shell would.
    """
    directory.mkdir(exist_ok=True)
    (directory / "trouble.py").write_text(TROUBLE)
    (directory / "job.yaml").write_text(json.dumps(config))  # JSON is YAML
    private = Path(tempfile.mkdtemp(prefix="gc-", dir="/tmp"))  # socket paths must be short
    launcher = [] if "config" in config["launcher"] else [f"launcher.config.socket_dir={private}"]
    if config["launcher"]["use"] == "core/inline":
        launcher = []
    process = subprocess.Popen(
        [
            *before,
            *(sys.executable, "-u", "-m", "gcore_core", "run", "job.yaml"),
            *launcher,
            *overrides,
        ],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield Run(directory, private, process)
    finally:
        pids = descendants(process.pid)
        left = Watched(pids)
        process.kill()  # the agent ends the rest
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # one that a test has stopped cannot end
        process.wait()
        left.all_end_within(20)
        left.close()
        shutil.rmtree(private, ignore_errors=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Returns when a file is there; fails when the process ends before, or takes too long."""
    until_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert process.poll() is None, f"it ended with {process.returncode} before {path.name}"
        assert time.monotonic() < until_s, f"{path.name} does not come"
        time.sleep(0.05)


def finish(directory: Path, config: Mapping[str, Any], *overrides: str) -> tuple[int, Run]:
    """Runs a job to its end: (exit code, run)."""
    with running(directory, config, *overrides) as run:
        return run.wait(), run


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if parent == pid:
            found.append(int(status.parent.name))
    return found


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in [child, *descendants(child)]]


class Watched:
    """Some processes, to be waited for although they are nobody's children here."""

    def __init__(self, pids: list[int]) -> None:
        self._handles = []
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                self._handles.append(os.pidfd_open(pid))

    def all_end_within(self, timeout_s: float) -> bool:
        poll = select.poll()
        for handle in self._handles:
            poll.register(handle, select.POLLIN)
        waiting = set(self._handles)
        while waiting:
            ready = poll.poll(timeout_s * 1000)
            if not ready:
                return False
            for handle, _ in ready:
                poll.unregister(handle)
                waiting.discard(handle)
        return True

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)


def checked(directory: Path, job: dict[str, Any]) -> str:
    """Has ``g-core check`` look at a job; returns exit code and what it printed, in one line."""
    directory.mkdir(exist_ok=True)
    (directory / "trouble.py").write_text(TROUBLE)
    (directory / "job.yaml").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "gcore_core", "check", "job.yaml"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{done.returncode} " + " ".join((done.stdout + done.stderr).split())


def rows_of_recipe(name: str, directory: Path, *words: str, timeout_s: float) -> list[Any]:
    """Runs a recipe to its end, without evaluations on the way; returns the rows of its metrics.

    directory: the run's is "run" in it.
    words: overrides.
    """
    recipe = REPOSITORY / "recipes" / f"{name}.yaml"
    command = [sys.executable, "-m", "gcore_core", "run", str(recipe)]
    done = subprocess.run(
        [*command, f"run.dir={directory / 'run'}", *words, "evaluation.every=0"],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
