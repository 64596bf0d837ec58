"""Measures what a fault costs: processes of the quickstart are killed while it trains.

    python benchmarks/back_to_work.py [--json] [--check] [--faults 3] [--kills 8] [--every 60]

Two runs, each with a checkpoint after every step and the same result as an undisturbed one. In the
first, each kind of process is killed at the beginning of a step, some times, when the processes are
ready that take the place of lost ones. ``fault_to_training_again_s`` is the time from the SIGKILL
to the moment at which the trainer next begins to train: the median of each kind, and of these the
worst. In the second, one process is killed every so many seconds, the kinds by turns.
``effective_training_time_at_a_kill_a_minute`` is the share of its time that was not lost: the steps
that it made, each counted once and as long as the median of those without a fault, over the time
from its first step to its last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from report import Claim, add_options, publish

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
KINDS = ("rollout.0", "scorer.0", "policy.0", "controller.0", "controller.1")
#: Nothing that is kept ready outlives these: what takes their place imports everything anew.
WHOLE = ("agent.0", "supervisor")
SPARES = ("policy", "rollout", "scorer", "controller")
_STEP = re.compile(r"^step +(\d+)/")
_LOOK_S = 0.02


@dataclass
class Run:
    """A quickstart that goes on until the block around it ends.

    directory: the run's.
    step: the newest that was made.
    """

    directory: Path
    process: subprocess.Popen[str]
    step: int = 0
    printed: list[str] = field(default_factory=list)

    def next_step(self) -> int:
        """Waits for the next step that was not made before, and returns its number."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            found = _STEP.match(line)
            if found is not None and int(found[1]) > self.step:
                self.step = int(found[1])
                return self.step
        raise RuntimeError(f"the run has ended:\n{''.join(self.printed[-20:])}")

    def pids(self) -> dict[str, int]:
        """Returns the process of each worker, of the node agent and of the supervisor."""
        record = json.loads((self.directory / "logs" / "processes.json").read_text())
        pids = {name: worker["pid"] for name, worker in record["workers"].items()}
        return pids | {"agent.0": record["agent"]["pid"], "supervisor": record["supervisor"]["pid"]}

    def make_steps_until_ready(self) -> None:
        """Makes steps until a process is ready for each kind of worker of the present agent."""
        self.next_step()
        while True:
            agent = str(self.pids()["agent.0"])
            log = (self.directory / "logs" / "agent.0.log").read_text()
            ready = {
                role
                for role, pid in re.findall(r"spare\.(\w+) \(pid (\d+)\) is ready", log)
                if _parent(int(pid)) == agent
            }
            if ready >= set(SPARES):
                return
            self.next_step()

    def training_begins(self, after_s: float) -> float:
        """Returns when the first training after a moment began, by the trace of shard 0."""
        path = self.directory / "trace" / "controller.0.jsonl"
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            stages = [json.loads(line) for line in lines if '"train"' in line and line[-1] == "}"]
            begins = [stage["start_s"] for stage in stages if stage["start_s"] > after_s]
            if begins:
                return float(min(begins))
            self.next_step()

    def step_times(self) -> dict[int, float]:
        """Returns step -> when it ended; of a step that was made twice, the second time."""
        rows = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["time_unix_s"] for row in rows}


def _parent(pid: int) -> str:
    """Returns the parent of a process; "" for one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Run]:
    """Starts a quickstart without evaluation, and kills what is left of it afterwards."""
    command = [sys.executable, "-u", "-m", "gcore_core", "run", str(RECIPE), "run.steps=100000"]
    command += [f"run.dir={directory}", "run.spares=always", "evaluation.every=0"]
    command += ["checkpoint.every=1", "checkpoint.restarts=100000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield Run(directory, process)
    finally:
        process.kill()  # all others end with it
        process.wait()


def measure_faults(run: Run, victims: Sequence[str], faults: int) -> dict[str, list[float]]:
    """Returns victim -> seconds until the trainer trained again, for each time it was killed."""
    took_s: dict[str, list[float]] = {victim: [] for victim in victims}
    for victim in list(victims) * faults:
        run.make_steps_until_ready()
        run.next_step()
        killed_s = time.monotonic()
        os.kill(run.pids()[victim], signal.SIGKILL)
        run.next_step()
        took_s[victim].append(run.training_begins(killed_s) - killed_s)
    return took_s


def effective_share(run: Run, victims: Sequence[str], every_s: float) -> float:
    """Kills one victim after the other, and returns the share of the time that was not lost."""
    run.make_steps_until_ready()
    first = run.next_step()
    killed_unix_s = []
    for victim in victims:
        next_s = time.monotonic() + every_s
        while time.monotonic() < next_s:
            run.next_step()
        killed_unix_s.append(time.time())
        os.kill(run.pids()[victim], signal.SIGKILL)
    next_s = time.monotonic() + every_s
    while time.monotonic() < next_s:
        run.next_step()
    times = run.step_times()
    last = max(times)
    steps_s = [
        times[step] - times[step - 1]
        for step in range(first + 1, last + 1)
        if not any(times[step - 1] < killed < times[step] for killed in killed_unix_s)
    ]
    return (last - first) * statistics.median(steps_s) / (times[last] - times[first])


def measure(faults: int, kills: int, every_s: float) -> list[Claim]:
    """Returns the claims. The machine should be quiet: these are seconds of a clock."""
    claims = []
    with tempfile.TemporaryDirectory() as folder:
        with running(Path(folder) / "faults") as run:
            took_s = measure_faults(run, KINDS, faults) | measure_faults(run, WHOLE, 1)
        medians = {victim: statistics.median(seconds) for victim, seconds in took_s.items()}
        worst = max(medians[victim] for victim in KINDS)
        claims.append(Claim("fault_to_training_again_s", worst, "s", 3.0, "<="))
        for victim, seconds in medians.items():
            name = f"fault_to_training_again_s_{victim.replace('.', '_')}"
            claims.append(Claim(name, seconds, "s"))
        if kills:
            with running(Path(folder) / "kills") as run:
                victims = list(islice(cycle(KINDS), kills))
                share = effective_share(run, victims, every_s)
            name = "effective_training_time_at_a_kill_a_minute"
            claims.append(Claim(name, share, "share", 0.95, ">="))
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--faults", type=int, default=3, help="of each kind of worker")
    parser.add_argument("--kills", type=int, default=8, help="in the second run; 0: without it")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between them")
    args = parser.parse_args()
    claims = measure(args.faults, args.kills, args.every)
    return publish("back_to_work", claims, args, ["gcore-core", "gcore-torch", "torch"])


if __name__ == "__main__":
    sys.exit(main())
