"""Measures what lending the trainer's devices to generators would bring, in simulation alone.

    python benchmarks/lending.py [--json] [--check] [--seeds 0:1]

The simulator of ``g-core simulate --async`` tries splits of the devices with generation one
step ahead, records at most four versions old and pushes that samples go through; with lending it
tries them again. A step trains on 64 groups of 8 answers. Lengths are log-normal, half of
the variance is the prompt's, at most 65,536 tokens. Changing the use of the trainer's devices and
back takes 12 s (what benchmarks/swap.py makes of a model of 32e9 parameters on four devices), a
push 5 s.

workload  units  median  sigma  engine                            training on all units
tail         16   1,500    1.4  as fast with any batch            120 s
bound         8   4,000    0.7  default profile, long caches      120 s
drift         8   4,000    0.7  the same; lengths grow 6 times    120 s
coarse        3   6,000    0.7  the same as bound                 400 s

A unit is an engine or a rank of the trainer. For each workload and each way to give samples back
(``gcore_sim.lending.GiveBack``):

<workload>_<way>_gain       seconds a step without lending over those with it, each at its best
                            split
<workload>_<way>_gain_few   the same, both with half of the generators of the best split without
<workload>_generators       generators of the best split without lending
<workload>_waits            the share of its time that the trainer waits there
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import numpy as np
from gcore_sim.ahead import (
    AheadJob,
    AheadStep,
    GroupLengths,
    Layout,
    TrainerPace,
    mean_seconds,
    simulate_ahead,
)
from gcore_sim.config import EngineProfile
from gcore_sim.lending import GiveBack
from report import Claim, add_options, publish, repeated

from gcore_core.contract.engine_profiles import Profile

PROMPTS = 64
SAMPLES = 8
LIMIT = 65_536
SWITCH_S = 12.0
PUSH_S = 5.0
SHARDS = 2
WAYS: tuple[GiveBack, ...] = get_args(GiveBack)
#: Steps of a run, and those that are left out while the window fills and where it runs empty.
STEPS, FIRST, LAST = 20, 6, 4


@dataclass(frozen=True)
class Workload:
    """One job on one cluster.

    units: engines and ranks of the trainer together.
    median, sigma: of the lengths of answers, in tokens.
    grows: factor of the median from the first to the last step.
    train_all_s: seconds of training with all units.
    profile: of an engine.
    """

    name: str
    units: int
    median: float
    sigma: float
    train_all_s: float
    profile: Profile | EngineProfile = Profile()
    grows: float = 1.0

    @property
    def splits(self) -> Sequence[int]:
        """The numbers of generators that are tried: an eighth to a half of the units.

        With more, steps of these workloads take longer, with lending and without.
        """
        return range(max(1, self.units // 8), max(2, self.units // 2) + 1)


WORKLOADS = (
    Workload("tail", 16, 1500, 1.4, 120.0, EngineProfile(cached_s=0.0, cache_tokens=10**9)),
    Workload("bound", 8, 4000, 0.7, 120.0),
    Workload("drift", 8, 4000, 0.7, 120.0, grows=6.0),
    Workload("coarse", 3, 6000, 0.7, 400.0),
)


@dataclass(frozen=True)
class Lengths:
    """The lengths of a workload's answers."""

    workload: Workload
    seed: int

    def group(self, ordinal: int) -> GroupLengths:
        """Returns a group's lengths; see ``AnswerSource``."""
        workload = self.workload
        normal = np.random.default_rng((self.seed, ordinal)).standard_normal(SAMPLES + 1)
        part = ordinal / (PROMPTS * STEPS) - 0.5  # of the run, from -0.5 to 0.5
        spread = workload.sigma * (normal[0] + normal[1:]) / np.sqrt(2)
        tokens = workload.median * workload.grows**part * np.exp(spread)
        return GroupLengths(100, [int(one) for one in np.clip(tokens, 1, LIMIT)])


@cache
def steps_of(
    workload: Workload, seed: int, generators: int, way: GiveBack | None
) -> tuple[AheadStep, ...]:
    """Returns the steps that count. way: None: nothing is lent."""
    ranks = workload.units - generators
    record_s = workload.train_all_s * workload.units / (PROMPTS * SAMPLES)
    job = AheadJob(
        prompts=PROMPTS,
        waits=False,
        profile=workload.profile,
        trainer=TrainerPace(record_s=record_s),
        push_s=PUSH_S,
        give_back=way or "redraw",
    )
    lent = ranks if way else 0
    layout = Layout(generators, ranks, switch_s=SWITCH_S if lent else 0.0, shards=SHARDS, lent=lent)
    steps = simulate_ahead(job, layout, Lengths(workload, seed), STEPS)
    return tuple(steps[FIRST : STEPS - LAST])


def step_s(workload: Workload, seed: int, generators: int, way: GiveBack | None) -> float:
    """Returns the mean seconds of a step."""
    return mean_seconds(steps_of(workload, seed, generators, way), 0)


def best(workload: Workload, seeds: Iterable[int], way: GiveBack | None) -> int:
    """Returns the number of generators with which all seeds together are fastest."""
    return min(
        workload.splits, key=lambda count: sum(step_s(workload, seed, count, way) for seed in seeds)
    )


def claims_of(workload: Workload, seeds: Sequence[int]) -> list[Claim]:
    """Returns what lending brings to a workload."""
    without = best(workload, seeds, None)
    few = max(1, without // 2)

    def gains(at: int, way: GiveBack, lending_at: int) -> list[float]:
        return [
            step_s(workload, seed, at, None) / step_s(workload, seed, lending_at, way)
            for seed in seeds
        ]

    def mean(name: str, values: list[float], unit: str) -> Any:
        return repeated(f"{workload.name}_{name}", values, statistics.fmean, unit)

    waits = [
        sum(step.waited_s for step in steps) / sum(step.seconds for step in steps)
        for steps in (steps_of(workload, seed, without, None) for seed in seeds)
    ]
    claims = [
        Claim(f"{workload.name}_generators", without, f"of {workload.units} units"),
        mean("waits", waits, "of the time"),
    ]
    for way in WAYS:
        lending = best(workload, seeds, way)
        claims += [
            mean(f"{way}_gain", gains(without, way, lending), "times"),
            Claim(f"{workload.name}_{way}_generators", lending, f"of {workload.units} units"),
            mean(f"{way}_gain_few", gains(few, way, few), "times"),
        ]
    return claims


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:1", help="first and end (0:1)")
    parser.add_argument("--workloads", nargs="+", choices=[one.name for one in WORKLOADS])
    add_options(parser)
    args = parser.parse_args()
    seeds = range(*map(int, args.seeds.split(":")))
    claims = []
    for workload in WORKLOADS:
        if args.workloads is None or workload.name in args.workloads:
            claims += claims_of(workload, seeds)
            print(f"{workload.name} is simulated", file=sys.stderr, flush=True)
    return publish("lending", claims, args, ["gcore-core", "gcore-sim", "numpy"])


if __name__ == "__main__":
    sys.exit(main())
