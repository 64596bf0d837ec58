"""Runs the real asynchronous program on virtual time, with faults, then planted bugs.

    python benchmarks/protocol_async.py [--json] [--check] [--seeds 0:10000] [--mutant-seeds 160]
    [--processes 2]

The program is ``gcore_async``'s own, with the core's window, ledger and shells, as in
protocol_sim.py. A run has 1 to 8 shards, 2 generators, 5 steps of 2 groups, and bounds from
``WINDOWS``. Messages are late, lost, doubled and overtaken; generators, scorers and judges are
killed. In half of the runs one controller is slow all the time, and one generator stands still for
a while. Two of three leave out groups that teach nothing, so steps draw again for each other.

What must hold in any weather (``broken_rules``): each ordinal has one verdict and is trained on at
most once; no record is older than ``age``; nothing is begun further ahead than ``ahead``; with
``midway: wait`` no record has two versions; steps are full. The trainer compares the first action
of each record with the weights that the record names, so ages are not taken on trust. Memory of a
step that was released cannot be opened: who tries ends the run, and what ends a run breaks the
rules. In deterministic runs, a sixth of all, every sample is drawn under the version that a run
without faults draws it under, and the run ends with the bits of that run; or it ends since a
version is gone, and goes back. It goes back to its beginning, which stands for a checkpoint, under
other weather. In these runs four times as many processes are killed, and half as many after each
time that one goes back: a run of the program itself has a newer checkpoint each time, and ends.

``async_planted_bugs_found_share``: of the bugs of protocol_async_mutants.py, those that break a run
of the first seeds.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import shutil
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from gcore_async.config import AsyncConfig
from gcore_async.program import AsynchronousController
from gcore_testing.faults import Faults, Laggards
from gcore_testing.simulation import Outcome, Program, SimulatedJob, run_virtual, simulate
from protocol_async_mutants import ASYNC_MUTANTS
from protocol_mutants import planted
from protocol_sim import Tally, play_and_hunt
from report import Claim, add_options, publish

from gcore_core.contract.errors import WeightsGone
from gcore_core.contract.records import TRAINED
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext

JOB = SimulatedJob(
    replicas=2,
    scorers=1,
    prompts=2,
    samples=2,
    steps=5,
    max_new_tokens=6,
    evaluate_prompts=0,
    takes_stale=True,
)
#: A message is followed by a kill so often.
KILLS = 0.0025
#: A deterministic run goes back at most so often.
ATTEMPTS = 10
VARIED = "gcore_core.builtin.filters:Varied"


@dataclass(frozen=True)
class Bounds:
    """The settings of the program that a run has."""

    ahead: int
    age: int
    midway: str


WINDOWS = (
    Bounds(1, 1, "wait"),
    Bounds(1, 4, "recompute"),
    Bounds(2, 4, "recompute"),
    Bounds(1, 1, "recompute"),
    Bounds(2, 4, "wait"),
    Bounds(2, 2, "recompute"),
    Bounds(1, 4, "wait"),
    Bounds(0, 0, "wait"),
)


def bounds_of(seed: int) -> Bounds:
    """Returns the bounds of a seed; eight seeds in a row have the same."""
    return WINDOWS[seed // 8 % len(WINDOWS)]


def job_of(seed: int) -> SimulatedJob:
    """Returns the job of a seed."""
    return replace(
        JOB,
        shards=1 + seed % 8,
        ranks=1 + (seed % 5 == 0),
        judges=int(seed % 16 == 5),
        filter=VARIED if seed % 3 else JOB.filter,
        deterministic=bounds_of(seed).midway == "wait" and seed // 64 % 3 == 0,
        seed=seed % 7,
    )


def weather_of(seed: int, attempt: int = 0) -> Faults:
    """Returns the weather of a seed, another one for each attempt of its run."""
    kills = KILLS * (4 * 0.5**attempt if job_of(seed).deterministic else 1)
    number = seed + 1_000_000 * attempt
    if seed % 2:
        return Faults(number, kills=kills)
    chance = random.Random(number)
    begins_s = chance.uniform(0, 60)
    return Laggards(
        number,
        slow=f"controller.{chance.randrange(job_of(seed).shards)}",
        stalled=f"rollout.{chance.randrange(JOB.replicas)}",
        stalls_s=(begins_s, begins_s + chance.uniform(0, 120)),
        kills=kills,
    )


def program_of(bounds: Bounds) -> Program:
    """Returns what makes a shard of the asynchronous program with these bounds."""

    def made(config: SyncConfig, context: ControllerContext) -> AsynchronousController:
        return AsynchronousController(AsyncConfig(**asdict(config), **asdict(bounds)), context)

    return made


@lru_cache(maxsize=256)
def calm(seed: int) -> Outcome:
    """Returns the outcome of a seed's job without faults, on one shard and one replica."""
    job = replace(job_of(seed), shards=1, replicas=1)
    return _run(job, bounds_of(seed), None)


def _run(job: SimulatedJob, bounds: Bounds, weather: Faults | None) -> Outcome:
    """Runs a job on virtual time."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        return run_virtual(simulate(job, directory / "store", weather, program_of(bounds)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def broken_rules(outcome: Outcome, job: SimulatedJob, bounds: Bounds) -> list[str]:
    """Returns the rules that a run broke, of those that hold in any weather."""
    batches = [sorted({key[0] for key in batch}) for batch in outcome.batches]
    committed = sorted(ordinal for _, ordinal in outcome.verdicts)
    given = list(outcome.verdicts.values())
    trained = sorted(o for (_, o), verdicts in outcome.verdicts.items() if verdicts == [TRAINED])
    base = outcome.ledger["next_ordinal"]
    begun = [(step, *one) for step, part in enumerate(outcome.begun) for one in part.items()]
    metrics = [report.metrics for report in outcome.reports[1:]]
    holds = {
        "every ordinal has one verdict": len(set(committed)) == len(committed)
        and max(map(len, given)) == 1,
        "the base is the lowest ordinal without a verdict": committed[:base] == list(range(base))
        and base not in committed,
        "what is trained has that verdict": trained == sorted(itertools.chain(*batches)),
        "steps are full": [len(step) for step in batches] == [job.prompts] * job.steps,
        "every step reports once": [report.step for report in outcome.reports]
        == list(range(job.steps + 1)),
        "no record is older than promised": all(
            0 <= step - version <= bounds.age for step, _, version in begun
        ),
        "ages are reported as they are": [one["age/largest"] for one in metrics]
        == [max(step - v for v in part.values()) for step, part in enumerate(outcome.begun)],
        "no record has two versions where a push waits": bounds.midway != "wait"
        or not any(one["age/spanning_share"] for one in metrics),
    }
    if job.filter == JOB.filter:
        holds["nothing is begun too far ahead"] = all(
            ordinal < job.prompts * (version + bounds.ahead + 1)
            for _, (ordinal, _), version in begun
        )
    return [name for name, is_kept in holds.items() if not is_kept]


def differences(outcome: Outcome, other: Outcome) -> list[str]:
    """Returns in what a deterministic run differs from one without faults."""
    same = {
        "every sample is drawn under the version of the calm run": outcome.begun == other.begun,
        "batches are those of the calm run": outcome.batches == other.batches,
        "weights are those of the calm run": outcome.logits == other.logits,
        "the ledger is that of the calm run": outcome.ledger == other.ledger,
        "digests are those of the calm run": [one.digests for one in outcome.reports]
        == [one.digests for one in other.reports],
    }
    return [name for name, is_kept in same.items() if not is_kept]


@dataclass
class AsyncTally(Tally):
    """Adds the largest age that any record had, and how often deterministic runs went back."""

    largest_age: int = 0
    went_back: int = 0

    def add(self, other: Tally) -> None:
        super().add(other)
        if isinstance(other, AsyncTally):
            self.largest_age = max(self.largest_age, other.largest_age)
            self.went_back += other.went_back


def _attempts(seed: int) -> tuple[Outcome, Faults, int]:
    """Runs a seed's job until it ends without having to go back.

    Returns its outcome, the weather of its last attempt and how often it went back.
    """
    job = job_of(seed)
    for attempt in itertools.count():
        weather = weather_of(seed, attempt)
        try:
            return _run(job, bounds_of(seed), weather), weather, attempt
        except WeightsGone:
            if not job.deterministic or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def play_one(seed: int) -> AsyncTally:
    """Runs one seed."""
    weather = weather_of(seed)
    job = job_of(seed)
    bounds = bounds_of(seed)
    largest = 0
    went_back = 0
    try:
        outcome, weather, went_back = _attempts(seed)
        wrong = broken_rules(outcome, job, bounds)
        if job.deterministic:
            wrong += differences(outcome, calm(seed))
        ages = [step - v for step, part in enumerate(outcome.begun) for v in part.values()]
        largest = max(ages)
    except Exception as error:  # isolation point: what ends a run is a violation of its seed
        wrong = [f"{type(error).__name__}: {error}"]
    broken = {seed: "; ".join(wrong)} if wrong else {}
    hits = weather.hits
    return AsyncTally(
        1, sum(hits.values()), weather.role_calls, hits, broken, largest, went_back=went_back
    )


def play(first: int, last: int, until_found: bool = False) -> AsyncTally:
    """Runs the seeds from ``first`` to below ``last``.

    until_found: whether to stop at the first seed in which something does not hold.
    """
    logging.disable(logging.CRITICAL)
    tally = AsyncTally()
    for seed in range(first, last):
        tally.add(play_one(seed))
        if tally.broken and until_found:
            break
    return tally


def hunt(mutant: str, seeds: int) -> tuple[str, AsyncTally]:
    """Plants a bug and runs seeds until one shows it.

    mutant: a key of ASYNC_MUTANTS; empty: no bug.
    """
    for seed in range(seeds):
        if job_of(seed).deterministic:
            calm(seed)  # before the bug is there
    with planted(mutant, ASYNC_MUTANTS) if mutant else nullcontext():
        return mutant, play(0, seeds, until_found=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--seeds", default="0:10000", help="first and behind the last")
    parser.add_argument("--mutant-seeds", type=int, default=160)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    tally = AsyncTally()
    took_s, caught = play_and_hunt(args, tally, play, hunt, ASYNC_MUTANTS)
    claims = [
        Claim("async_seeds", tally.seeds, "runs", 10_000),
        Claim("async_violations", len(tally.broken), "runs", 0, "<="),
        Claim("async_planted_bugs_found_share", caught / len(ASYNC_MUTANTS), "share", 0.9),
        Claim("async_planted_bugs", len(ASYNC_MUTANTS), "bugs", 10),
        Claim("async_largest_age", tally.largest_age, "versions", 4, "<="),
        Claim("async_runs_gone_back", tally.went_back, "runs"),
        Claim("async_least_faults_of_a_run", tally.least_faults, "faults", 5),
        Claim("async_faults_per_run", sum(tally.hits.values()) / tally.seeds, "faults"),
        Claim(
            "async_kills_per_run",
            sum(n for key, n in tally.hits.items() if key[2] == "kill") / tally.seeds,
            "kills",
        ),
        Claim("async_seconds", took_s, "s", 600, "<="),
    ]
    return publish("protocol_async", claims, args, ["gcore-core", "gcore-async"])


if __name__ == "__main__":
    sys.exit(main())
