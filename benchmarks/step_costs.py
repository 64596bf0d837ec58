"""Measures what a step costs in virtual time, which no machine changes.

The step programs are the real ones, and so are ledger and shells; every message takes ``TRAVEL_S``
seconds. Of each case, over all seeds and steps: the seconds of a rollout and of a step, how many
groups a step issues, and how many messages a step takes, of all processes.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash
from gcore_testing.faults import Faults
from gcore_testing.simulation import Outcome, Program, SimulatedJob, run_virtual, simulate

from gcore_core.contract.algorithms import GroupScalars
from gcore_core.contract.factories import FactorySpec
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.synchronous import SynchronousController

TRAVEL_S = 0.1
#: A run does the same in virtual time wherever it runs, so few are enough: other moments of the
#: same work change the figures by less than 1%.
SEEDS = (0, 1)
SYNC = "sync"
ASYNC = "async"


class Keeps:
    """Lets a share of all groups teach; which ones, their content decides."""

    rate: float

    def __init__(self, config: None = None) -> None:
        pass

    def keep(self, group: GroupScalars) -> tuple[bool, str]:
        content = group.rewards.tobytes() + group.lengths.tobytes()
        return xxhash.xxh3_64_intdigest(content) / 2**64 < self.rate, "chance"


class Keeps30(Keeps):
    """Lets three of ten teach."""

    rate = 0.3


class Keeps60(Keeps):
    """Lets six of ten teach."""

    rate = 0.6


#: Keep rate -> its filter.
FILTERS = {
    0.3: f"{__name__}:{Keeps30.__name__}",
    0.6: f"{__name__}:{Keeps60.__name__}",
    1.0: "gcore_core.builtin.filters:KeepAll",
}


class Even(Faults):
    """Weather in which each message takes as long, and one generator may be killed.

    n_messages: how many there were.
    """

    def __init__(self, killed_at: int = 0) -> None:
        """killed_at: the first generator is killed at its answer of this number; 0: never."""
        super().__init__(0)
        self.n_messages = 0
        self._killed_at = killed_at
        self._answers = 0

    async def travel(self, source: str, target: str, method: str) -> int:
        self.n_messages += 1
        await asyncio.sleep(TRAVEL_S)
        if (source, method) == ("rollout.0", "generate"):
            self._answers += 1
            if self._answers == self._killed_at:
                self.hits[source, method, "kill"] += 1
                self._kill(source)
        return 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A simulated job, and the program that runs it.

    ahead: how far generation runs ahead in the asynchronous program; unused in the other.
    killed_at: as in ``Even``.
    """

    job: SimulatedJob
    program: str = SYNC
    ahead: int = 0
    killed_at: int = 0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Says what a step takes, on average.

    rollout_s: until enough groups teach.
    step_s: in all.
    issued: groups that are begun.
    messages: of all processes.
    """

    rollout_s: float
    step_s: float
    issued: float
    messages: float


JOB = SimulatedJob(
    shards=2,
    replicas=3,
    scorers=1,
    steps=3,
    prompts=8,
    samples=4,
    max_new_tokens=24,
    late_end=16,
    evaluate_prompts=0,
)
#: As many groups as the most controllers have to share.
WIDE = replace(JOB, replicas=8, prompts=64, samples=2, steps=1, max_new_tokens=8, late_end=4)
JUDGED = replace(JOB, replicas=3, judges=3)


def cases() -> dict[str, Case]:
    """Returns all cases by their names."""
    found = {}
    for rate, keeps in FILTERS.items():
        job = replace(JOB, filter=keeps)
        for program in (SYNC, ASYNC):
            found[f"{program}_keep_{rate:g}"] = Case(job=job, program=program)
        if rate < 1:
            kept = replace(job, takes_stale=True)
            found[f"{SYNC}_keep_{rate:g}_surplus_kept"] = Case(job=kept)
    for shards in (1, 16, 64):
        for program in (SYNC, ASYNC):
            job = replace(WIDE, shards=shards)
            found[f"{program}_{shards}_controllers"] = Case(job=job, program=program)
    placement = FactorySpec("gcore_testing.fake_judge:InTurns")
    found["sync_in_turns"] = Case(job=replace(JUDGED, placement=placement))
    found["sync_sleeping"] = Case(job=replace(JUDGED, rests=True))
    for program in (SYNC, ASYNC):
        found[f"{program}_killed"] = Case(job=JOB, program=program, killed_at=20)
    return found


def program_of(case: Case) -> Program:
    """Returns what makes a shard of the case's program."""
    if case.program == SYNC:
        return SynchronousController
    from gcore_async.config import AsyncConfig
    from gcore_async.program import AsynchronousController

    def made(config: SyncConfig, context: ControllerContext) -> AsynchronousController:
        bounds = AsyncConfig(**asdict(config), ahead=case.ahead, age=case.ahead)
        return AsynchronousController(bounds, context)

    return made


def run_case(case: Case, seed: int, weather: Faults | None = None) -> Outcome:
    """Runs a case with the samples of a seed.

    weather: None: that of the case.
    """
    job = replace(case.job, seed=seed)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        weather = Even(case.killed_at) if weather is None else weather
        return run_virtual(simulate(job, folder / "store", weather, program_of(case)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cost_of(case: Case, seeds: Sequence[int]) -> Cost:
    """Runs a case with each seed; raises RuntimeError where a generator should be killed once."""
    outcomes = []
    n_messages = 0
    for seed in seeds:
        weather = Even(case.killed_at)
        outcomes.append(run_case(case, seed, weather))
        n_messages += weather.n_messages
        if sum(weather.hits.values()) != bool(case.killed_at):
            raise RuntimeError(f"{sum(weather.hits.values())} generators were killed")
    steps = [report.metrics for outcome in outcomes for report in outcome.reports[1:]]
    return Cost(
        rollout_s=statistics.mean(metrics["seconds/rollout"] for metrics in steps),
        step_s=sum(outcome.virtual_s for outcome in outcomes) / len(steps),
        issued=statistics.mean(metrics["groups/issued"] for metrics in steps),
        messages=n_messages / len(steps),
    )


def measure_costs(
    chosen: Callable[[str], bool] = lambda name: True, seeds: Sequence[int] = SEEDS
) -> Mapping[str, float]:
    """Returns the figures of all cases that are chosen by their names."""
    return {
        f"{what}_{name}": value
        for name, case in cases().items()
        if chosen(name)
        for what, value in asdict(cost_of(case, seeds)).items()
    }
