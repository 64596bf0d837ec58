"""Runs the real step program, ledger and shells on virtual time, with faults, then planted bugs.

    python benchmarks/protocol_sim.py [--json] [--check] [--seeds 0:10000] [--mutant-seeds 250]
    [--processes 2]

A run has 4 shards, 2 generators, 1 judge, 3 scorers, 2 trainer ranks, 3 steps. Every message takes
a random time; some are lost (noticed or silent), come twice, late or overtaken; at some a
generator, judge or scorer is killed, and started again with an empty memory. Every other seed keeps
surplus groups. The loss of a trainer, a controller or a machine is a restart of the run from its
checkpoint, which is not simulated here.

``pairs_share``: pairs of message kind (sender's role, method) and fault that were hit, of all there
are.
``planted_bugs_found_share``: of the bugs of protocol_mutants.py, those that break a run of the
first seeds.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from gcore_testing.faults import FAULTS, Faults
from gcore_testing.simulation import Outcome, SimulatedJob, run_virtual, simulate, violations
from protocol_mutants import MUTANTS, planted
from report import Claim, add_options, publish

JOB = SimulatedJob(
    replicas=2,
    ranks=2,
    judges=1,
    prompts=4,
    max_new_tokens=4,
)
BLOCK = 25


@dataclass
class Tally:
    """What some runs had.

    seeds: number of runs.
    least_faults: faults of the run with the fewest.
    kinds: (sender's role, method) of all messages.
    hits: (sender's role, method, fault) -> how often it happened.
    broken: seed -> what did not hold.
    """

    seeds: int = 0
    least_faults: int = sys.maxsize
    kinds: set[tuple[str, str]] = field(default_factory=set)
    hits: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Adds the counts of other runs."""
        self.seeds += other.seeds
        self.least_faults = min(self.least_faults, other.least_faults)
        self.kinds |= other.kinds
        self.hits.update(other.hits)
        self.broken |= other.broken


def job_of(seed: int) -> SimulatedJob:
    """Returns the job of a seed.

    In two of every eight it is evaluated and leaves out groups that teach nothing. Its groups are
    small, so many teach nothing and more are issued than taken.
    """
    job = replace(JOB, takes_stale=bool(seed % 2), samples=3, evaluate_prompts=0)
    if _drops(seed):
        varied = "gcore_core.builtin.filters:Varied"
        job = replace(job, samples=2, evaluate_prompts=1, filter=varied)
    return job


def _drops(seed: int) -> bool:
    """Returns whether the job of a seed leaves out groups that teach nothing."""
    return seed % 8 < 2


@cache
def calm(drops: bool) -> Outcome:
    """Returns the outcome without faults, on one shard and one replica."""
    return _run(replace(job_of(0 if drops else 2), shards=1, replicas=1), None)


def _run(job: SimulatedJob, weather: Faults | None) -> Outcome:
    """Runs a job on virtual time."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        return run_virtual(simulate(job, directory / "store", weather))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


#: A tally, or that of a program with more to count.
AnyTally = TypeVar("AnyTally", bound="Tally")


def play(first: int, last: int, until_found: bool = False) -> Tally:
    """Runs the seeds from ``first`` to below ``last``.

    until_found: whether to stop at the first seed in which something does not hold.
    """
    logging.disable(logging.CRITICAL)
    tally = Tally()
    for seed in range(first, last):
        weather = Faults(seed)
        job = job_of(seed)
        try:
            wrong = "; ".join(violations(_run(job, weather), calm(_drops(seed)), weather, job))
        except Exception as error:  # isolation point: what ends a run is a violation of its seed
            wrong = f"{type(error).__name__}: {error}"
        tally_of_seed = Tally(
            1,
            sum(weather.hits.values()),
            weather.role_calls,
            weather.hits,
            {seed: wrong} if wrong else {},
        )
        tally.add(tally_of_seed)
        if wrong and until_found:
            break
    return tally


def hunt(mutant: str, seeds: int) -> tuple[str, Tally]:
    """Plants a bug and runs seeds until one shows it.

    mutant: a key of MUTANTS; empty: no bug.
    """
    for drops in (True, False):
        calm(drops)  # before the bug is there
    with planted(mutant) if mutant else nullcontext():
        return mutant, play(0, seeds, until_found=True)


def play_and_hunt(
    args: argparse.Namespace,
    tally: AnyTally,
    play: Callable[[int, int], AnyTally],
    hunt: Callable[[str, int], tuple[str, AnyTally]],
    mutants: Collection[str],
) -> tuple[float, int]:
    """Runs all seeds, then hunts each planted bug, in processes.

    Violations and what found a bug are printed to stderr as they come.

    args: seeds, mutant_seeds, processes: the options of the command.
    tally: gets what the seeds gave.
    play, hunt: run seeds, and look for a bug by its name.
    Returns the seconds that the seeds took, and how many bugs were found.
    """
    first, last = map(int, args.seeds.split(":"))
    began_s = time.perf_counter()
    with ProcessPoolExecutor(args.processes) as pool:
        starts = range(first, last, BLOCK)
        for part in pool.map(play, starts, [min(start + BLOCK, last) for start in starts]):
            tally.add(part)
            for seed, wrong in part.broken.items():
                print(f"seed {seed}: {wrong}", file=sys.stderr, flush=True)
        took_s = time.perf_counter() - began_s
        caught = 0
        for mutant, hunted in pool.map(hunt, mutants, [args.mutant_seeds] * len(mutants)):
            caught += bool(hunted.broken)
            first_broken = next(iter(hunted.broken.items()), "NOT FOUND")
            print(f"{mutant}: {str(first_broken)[:110]}", file=sys.stderr, flush=True)
    return took_s, caught


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--seeds", default="0:10000", help="first and behind the last")
    parser.add_argument("--mutant-seeds", type=int, default=250)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    tally = Tally()
    took_s, caught = play_and_hunt(args, tally, play, hunt, MUTANTS)
    # only requests come twice
    kinds = sorted(tally.kinds)
    requests = {(role, method) for role, method, fault in tally.hits if fault == "twice"}
    pairs = {
        (*kind, fault) for kind in kinds for fault in FAULTS if fault != "twice" or kind in requests
    }
    for role, method in kinds if not args.json else []:
        print(
            f"{role:11} {method:14}"
            + "".join(f"{fault:>10} {tally.hits[role, method, fault]:<6}" for fault in FAULTS)
        )
    pairs_not_hit = sorted(pairs - tally.hits.keys())
    print(f"not hit: {pairs_not_hit}", file=sys.stderr)
    claims = [
        Claim("seeds", tally.seeds, "runs", 10_000),
        Claim("violations", len(tally.broken), "runs", 0, "<="),
        Claim("planted_bugs_found_share", caught / len(MUTANTS), "share", 0.9),
        Claim("planted_bugs", len(MUTANTS), "bugs", 20),
        Claim("pairs_share", 1 - len(pairs_not_hit) / len(pairs), "share", 1.0),
        Claim("pairs", len(pairs), "pairs"),
        Claim("least_faults_of_a_run", tally.least_faults, "faults", 5),
        Claim("faults_per_run", sum(tally.hits.values()) / tally.seeds, "faults"),
        Claim(
            "kills_per_run",
            sum(n for key, n in tally.hits.items() if key[2] == "kill") / tally.seeds,
            "kills",
        ),
        Claim("seconds", took_s, "s", 600, "<="),
    ]
    return publish("protocol_sim", claims, args, ["gcore-core"])


if __name__ == "__main__":
    sys.exit(main())
