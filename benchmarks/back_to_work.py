"""Measures what a fault costs: processes of the quickstart are killed while it trains.

    python benchmarks/back_to_work.py [--json] [--check] [--faults 3] [--kills 6] [--every 55]

It takes some ten minutes, and tells on stderr how far it is. There are two runs, each with a
checkpoint after every step.

In the first run each kind of process is killed at the beginning of a step, ``--faults`` times. The
time from the SIGKILL to the moment at which the trainer next begins to train is told part by part.
The parts of one fault add up to its time:

    noticed    until the node agent tells that the process has ended
    started    until the last process that takes a lost one's place is started
    up         until the last of them has imported and loaded what it needs
    training   until the trainer begins: what the step had drawn so far is drawn again

Of the supervisor and the node agent the second part holds the first one. A claim is the median of
the repetitions; ``fault_to_training_again_s`` is that of the worst kind.
``undisturbed_step_to_training_s`` is the same time in a step in which nobody is killed.

In the second run one process is killed every ``--every`` seconds, the kinds by turns.
What a kill costs is the time from it to the next one, less the steps that were made in it, each
counted once and as long as one without a fault. How long that is, is the mean of the steps in the
second half of the time, far from its fault. It is no median, with which a run without any fault
would lose time: on a machine that is shared a few steps are long, and the median is less than what
a step takes. And it is no mean of all, since what others do on the machine changes from minute to
minute. ``effective_training_time_at_a_failure_an_hour`` is the share of an hour that one kill of
mean cost leaves.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise
from pathlib import Path

from report import Claim, add_options, interval, publish

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
WORKERS = ("rollout.0", "scorer.0", "policy.0", "controller.0")
SUPERVISOR = "supervisor"
AGENT = "agent.0"
KINDS = (*WORKERS, SUPERVISOR, AGENT)
PARTS = ("noticed", "started", "up", "training")
UNDISTURBED = 5  # steps without a fault, whose time is the one to compare with
_HOUR_S = 3600.0
_STEP = re.compile(r"^step +(\d+)/")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")
_STARTED = re.compile(r"INFO (\S+) is started, pid (\d+)")
_UP = re.compile(r"INFO (\S+) is up, pid")
_ENDED = re.compile(r"INFO (\S+) \(pid \d+\) ended with")


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
        """Returns the process of each worker, of the node agent and of the supervisor.

        Empty while there is no node agent.
        """
        try:
            record = json.loads((self.directory / "logs" / "processes.json").read_text())
        except FileNotFoundError:
            return {}
        pids = {name: worker["pid"] for name, worker in record["workers"].items()}
        return pids | {AGENT: record["agent"]["pid"], SUPERVISOR: record["supervisor"]["pid"]}

    def kill(self, victim: str) -> float:
        """Kills a process at the beginning of a step in which it lives; returns when, unix time."""
        while True:
            self.next_step()
            pid = self.pids().get(victim)
            if pid is not None and Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
                return time.time()

    def training_begins(self, after_unix_s: float) -> float:
        """Returns when the first training after a moment began, by the trace of shard 0.

        Both are unix times. The trace has a clock of its own, which all processes share.
        """
        path = self.directory / "trace" / "controller.0.jsonl"
        to_unix_s = time.time() - time.monotonic()
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            stages = [json.loads(line) for line in lines if '"train"' in line and line[-1] == "}"]
            begins = [stage["start_s"] + to_unix_s for stage in stages]
            if later := [begin_s for begin_s in begins if begin_s > after_unix_s]:
                return float(min(later))
            self.next_step()

    def times(self, process: str, told: re.Pattern[str]) -> Iterator[tuple[str, float]]:
        """Yields (worker, unix time) of each line of a process's log that tells something."""
        for line in (self.directory / "logs" / f"{process}.log").read_text().splitlines():
            stamp, found = _STAMP.match(line), told.search(line)
            if stamp is not None and found is not None:
                whole_s = time.mktime(time.strptime(stamp[1], "%Y-%m-%d %H:%M:%S"))
                yield found[1], whole_s + int(stamp[2]) / 1000

    def step_times(self) -> dict[int, float]:
        """Returns step -> when it ended; of a step that was made twice, the second time."""
        rows = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["time_unix_s"] for row in rows}


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Run]:
    """Starts a quickstart without evaluation, and kills what is left of it afterwards."""
    command = [sys.executable, "-u", "-m", "gcore_core", "run", str(RECIPE), "run.steps=100000"]
    command += [f"run.dir={directory}", "evaluation.every=0"]
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
        process.communicate()


def measure_fault(run: Run, victim: str) -> dict[str, float]:
    """Kills a process; returns part -> its seconds, of the time until the trainer trains again."""
    killed_s = run.kill(victim)
    run.next_step()
    trains_s = run.training_begins(killed_s)

    def last(process: str, told: re.Pattern[str], since_s: float, name: str = "") -> float:
        """The last time before the training; ``since_s`` where nothing was told."""
        times = [
            time_s
            for worker, time_s in run.times(process, told)
            if since_s <= time_s <= trains_s and name in ("", worker)
        ]
        return max(times, default=since_s)

    # Clocks of logs are cut to milliseconds: a line may seem to come before the kill.
    noticed_s = last(AGENT, _ENDED, killed_s, victim) if victim in WORKERS else killed_s
    started_s = last(AGENT, _STARTED, noticed_s)
    up_s = last("supervisor", _UP, started_s)
    moments = (killed_s, noticed_s, started_s, up_s, trains_s)
    return {part: b - a for part, (a, b) in zip(PARTS, pairwise(moments), strict=True)}


def measure_undisturbed(run: Run) -> list[float]:
    """Returns seconds from the beginning of a step to its training, for steps without a fault."""
    took_s = []
    for _ in range(UNDISTURBED):
        run.next_step()
        begins_s = time.time()
        run.next_step()
        took_s.append(run.training_begins(begins_s) - begins_s)
    return took_s


def measure_faults(
    run: Run, faults: int, tell: Callable[[str], None]
) -> dict[str, list[dict[str, float]]]:
    """Returns victim -> the parts of each of its faults."""
    found: dict[str, list[dict[str, float]]] = {}
    plan = list(KINDS) * faults
    for i, victim in enumerate(plan):
        parts = measure_fault(run, victim)
        found.setdefault(victim, []).append(parts)
        told = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
        tell(f"fault {i + 1} of {len(plan)}: {victim}, {sum(parts.values()):.2f} s ({told})")
    return found


def kill_by_turns(
    run: Run, victims: Sequence[str], every_s: float, tell: Callable[[str], None]
) -> list[tuple[float, float]]:
    """Kills one victim after the other.

    Returns (seconds of steps that count, seconds that passed) from each kill to the next.
    """
    first = run.next_step()
    for _ in range(UNDISTURBED):
        run.next_step()
    killed_unix_s = []
    next_s = time.monotonic()
    for i, victim in enumerate(victims):
        killed_unix_s.append(run.kill(victim))
        next_s += every_s
        while time.monotonic() < next_s:
            run.next_step()
        tell(f"kill {i + 1} of {len(victims)}: {victim}; step {run.step} is made")
    times = {step: time_s for step, time_s in run.step_times().items() if step >= first}
    ends = [*killed_unix_s, max(times.values())]
    before_s = _mean_step(times, 0.0, ends[0], 0.0)
    return [
        (
            _mean_step(times, (begin + end) / 2, end, before_s)
            * sum(begin < time_s <= end for time_s in times.values()),
            end - begin,
        )
        for begin, end in pairwise(ends)
    ]


def _mean_step(times: Mapping[int, float], begin: float, end: float, default_s: float) -> float:
    """Returns the mean seconds of the steps that lie between two times; where there are none, the
    default.

    times: step -> when it ended.
    """
    took_s = [
        times[step] - times[step - 1]
        for step in times
        if step - 1 in times and begin <= times[step - 1] and times[step] <= end
    ]
    return statistics.mean(took_s) if took_s else default_s


def share_at_a_failure_an_hour(rounds: Sequence[tuple[float, float]]) -> float:
    """Returns the share of an hour that a kill of mean cost leaves."""
    lost_s = statistics.mean(passed_s - counts_s for counts_s, passed_s in rounds)
    return 1 - lost_s / _HOUR_S


def repeated(
    name: str, values: Sequence[float], unit: str = "s", bar: float | None = None
) -> Claim:
    """Returns the claim of a median, held to be at most ``bar``."""
    median = statistics.median
    return Claim(name, median(values), unit, bar, "<=", interval(values, median))


def claims_of_faults(found: dict[str, list[dict[str, float]]]) -> list[Claim]:
    """Returns the claims: the worst kind's, then each victim's, whole and part by part."""
    took_s = {victim: [sum(parts.values()) for parts in found[victim]] for victim in found}
    worst = max(KINDS, key=lambda victim: statistics.median(took_s[victim]))
    claims = [repeated("fault_to_training_again_s", took_s[worst], bar=6.0)]
    for victim, faults in found.items():
        name = f"fault_to_training_again_s_{victim.partition('.')[0]}"
        claims.append(repeated(name, took_s[victim]))
        for part in PARTS:
            if victim in WORKERS or part != "noticed":
                claims.append(repeated(f"{name}_{part}", [parts[part] for parts in faults]))
    return claims


def measure(faults: int, kills: int, every_s: float) -> list[Claim]:
    """Returns the claims. The machine should be quiet: these are seconds of a clock."""
    began_s = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - began_s:4.0f} s] {text}", file=sys.stderr, flush=True)

    # A process that is being killed may still write.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with running(Path(folder) / "faults") as run:
            tell("the first run is started")
            run.next_step()
            undisturbed_s = measure_undisturbed(run)
            claims = claims_of_faults(measure_faults(run, faults, tell))
            claims.append(repeated("undisturbed_step_to_training_s", undisturbed_s))
        if kills:
            with running(Path(folder) / "kills") as run:
                tell("the second run is started")
                victims = list(islice(cycle(KINDS), kills))
                rounds = kill_by_turns(run, victims, every_s, tell)
            share = share_at_a_failure_an_hour
            name = "effective_training_time_at_a_failure_an_hour"
            claims.append(Claim(name, share(rounds), "share", 0.95, ">=", interval(rounds, share)))
    tell("done")
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--faults", type=int, default=3, help="of each kind of process")
    parser.add_argument("--kills", type=int, default=6, help="in the second run; 0: without it")
    parser.add_argument("--every", type=float, default=55.0, help="seconds between them")
    args = parser.parse_args()
    claims = measure(args.faults, args.kills, args.every)
    return publish("back_to_work", claims, args, ["gcore-core", "gcore-torch", "torch"])


if __name__ == "__main__":
    sys.exit(main())
