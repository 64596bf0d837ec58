"""Measures placement policies against the best fixed split of each step, on a simulated cluster.

    python benchmarks/placement_sim.py [--json] [--check] [--seeds 100:106] [--devices 512,64,4096]
    [--second 512] [--processes 2]

The policies are the objects that decide in a run. The workloads are ``bursty``, ``drift`` and
``judge-heavy``, 18 steps of each. The first three steps, a cold start for policies that learn, are
left out; what they would add is printed beside.

Excess: seconds of generation and judging over those of the oracle, which is the best fixed split of
that very step, searched with the true lengths and without cost of changing. All policies have the
same groups and the same rule of oversampling. Mean and 95th percentile are over all steps of all
workloads and seeds, intervals are bootstrap draws of whole seeds. Settings were tuned on seeds
below 100. 64 and 4,096 devices: fewer seeds.

Model ``own``: the cluster behaves as the queueing model says that ``replay`` carries.

Model ``second`` (claims that end in ``wrong_model``): it behaves as
``gcore_placement.queueing.stepping`` says, with the service times, stalls among them, of
recorded steps of vLLM (vllm_steps.json), with sequences that are thrown out of a full cache and
prompts that it forgets. Each term of either
role's profile, and the size of its cache, is 30% more or 30% less than policies are told; which, a
coin says for every seed and workload. ``replay`` is never told better, and learns a factor for each
role from what it measures; ``replay_as_told`` does not (``correction: 0``). ``replay_fitted`` is
shown the profiles that a run would have fitted to the steps before, as in a run. No coresident
engines.

Paper's rule (``utilisation``, arXiv 2507.22789): as published it begins at one half and moves one
replica a step. ``same_start`` begins with the share of ``replay``, with every number of replicas a
step in STEP_SIZES and either signal. ``paper_rule_mean_excess_512_same_start`` is the best of these
on the very seeds that are reported, which is more than its user could know.

``decision_share_of_step``: processor seconds of deciding over the simulated seconds of a step,
training and all.
``issued_over_known_keep_rate``: groups that the rule of oversampling issues on drift over those
that it issues when it knows the chance of every step, same margin; a stalled step takes 15%
longer than that one.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
from gcore_placement.balance.balancers import Cost
from gcore_placement.balance.config import CostConfig
from gcore_placement.config import ReplayConfig, SplitConfig, UtilisationConfig
from gcore_placement.fixed import Colocated, Coresident, FixedSplit
from gcore_placement.queueing.step import Engines, play
from gcore_placement.queueing.stepping import slowness
from gcore_placement.replay import Replay
from gcore_placement.sim.cluster import ORACLE, Cluster, Row, Truth, simulate
from gcore_placement.sim.workloads import PUBLISHED, Published
from gcore_placement.utilisation import Utilisation
from report import Claim, add_options, interval, publish

from gcore_core.contract.engine_profiles import EngineFit, Profile
from gcore_core.contract.placement import Decision, Partition, PlacementPolicy, Window
from gcore_core.controllers.keep_rate import KeepRate, by_quarter
from gcore_core.controllers.placement.fitting import TERMS, fit_engine

WORKLOADS = ("bursty", "drift", "judge-heavy")
STEPS = 18
COLD = 3
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
SIGNALS: tuple[Literal["busy", "filled"], ...] = ("busy", "filled")
#: The judges' share with which the paper's rule begins as it was published.
PUBLISHED_SHARE = 0.5
#: Replicas that the paper's rule moves after a step, where it begins as ``replay`` does.
STEP_SIZES = (1, 2, 4, 8, 16)
#: By how much each number of a profile is off in the second model.
OFF = 0.3
#: Number of seeds of the sizes whose claims have no bar.
FEWER = {64: 3, 4096: 1}
#: Most seeds of the second model, whose rollouts take twice as long to simulate.
SECOND = 4
RECORDED = Path(__file__).with_name("vllm_steps.json")

Model = Literal["own", "second"]


@dataclass(frozen=True)
class Job:
    """One simulated run of all policies.

    model: how the cluster behaves; see the module.
    """

    model: Model
    devices: int
    workload: str
    seed: int


class Fitted:
    """Shows a policy profiles that are fitted to what it has seen, as the lead of a run does.

    It remembers, as the lead does; a policy itself must not.
    """

    def __init__(self, policy: PlacementPolicy) -> None:
        self._policy = policy
        self._fits: dict[str, EngineFit] = {}

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        """Returns the policy's decision with the fitted profiles."""
        for role, requests in window.requests.items():
            self._fits[role] = fit_engine(requests, Profile(), self._fits.get(role))
        profiles = {role: fit.profile for role, fit in self._fits.items()}
        return self._policy.revise(
            partition, replace(window, profiles={**window.profiles, **profiles})
        )


def policies(model: Model = "own") -> dict[str, PlacementPolicy]:
    """Returns new policies by the names that the claims have."""
    own = {"coresident": Coresident()} if model == "own" else {}
    fitted = {} if model == "own" else {"replay_fitted": Fitted(Replay(ReplayConfig()))}
    return {
        "replay": Replay(ReplayConfig()),
        "replay_as_told": Replay(ReplayConfig(correction=0.0)),
        **fitted,
        **{f"split_{share:g}": FixedSplit(SplitConfig(share=share)) for share in SHARES},
        **{
            f"utilisation_{signal}": Utilisation(
                UtilisationConfig(signal=signal, share=PUBLISHED_SHARE)
            )
            for signal in SIGNALS
        },
        **{
            same_start(signal, cells): Utilisation(UtilisationConfig(signal=signal, cells=cells))
            for signal, cells in product(SIGNALS, STEP_SIZES)
        },
        "colocated": Colocated(),
        **own,
    }


def same_start(signal: str, cells: int) -> str:
    """Returns the name of the paper's rule where it begins as ``replay`` does."""
    return f"utilisation_{signal}_same_start_{cells}"


@cache
def recorded() -> tuple[np.ndarray, ...]:
    """Returns by how much recorded steps of vLLM missed a profile; see ``stepping.slowness``."""
    recordings = json.loads(RECORDED.read_text())["recordings"]
    return tuple(slowness(recordings, max(recording["most"] for recording in recordings)))


def truth(workload: str, seed: int) -> Truth:
    """Returns how the engines of a job behave in the second model."""
    random = np.random.default_rng([seed, zlib.crc32(workload.encode())])

    def off(told: Profile) -> Profile:
        factors = dict(
            zip((*TERMS, "cache_tokens"), random.choice([1 - OFF, 1 + OFF], 5), strict=True)
        )
        terms = {name: float(getattr(told, name) * factors[name]) for name in TERMS}
        tokens = round(told.cache_tokens * factors["cache_tokens"])
        return replace(told, cache_tokens=tokens, **terms)

    return Truth(profiles=(off(Profile()), off(Profile())), factors=recorded())


def cluster_of(devices: int) -> Cluster:
    """Returns a cluster that keeps a group a device in each step, at most 1,024.

    A batch does not grow with the cluster for ever.
    """
    return Cluster(devices=devices, needed=min(devices, 1024))


def rows_of(job: Job) -> list[Row]:
    """Returns the rows of all policies for one job."""
    cluster = cluster_of(16)
    list(simulate(cluster, Published(name=job.workload, steps=2), policies(), 2, 0))  # compiles
    cluster = cluster_of(job.devices)
    if job.model == "second":
        cluster = replace(cluster, truth=truth(job.workload, job.seed))
    balancer = Cost(CostConfig(hidden_size=5120))
    published = Published(name=job.workload, steps=STEPS)
    return list(simulate(cluster, published, policies(job.model), STEPS, job.seed, balancer))


def seeds_of(model: Model, devices: int) -> int:
    """Returns the most seeds that a model and a size are played with."""
    return min(FEWER.get(devices, 1 << 30), SECOND if model == "second" else 1 << 30)


class Runs:
    """The rows of all jobs of one model and size, seed by seed.

    suffix: what the names of their claims end in.
    """

    def __init__(self, model: Model, devices: int, rows_by_job: Mapping[Job, list[Row]]) -> None:
        self.suffix = f"{devices}" if model == "own" else f"{devices}_wrong_model"
        self._jobs = {
            job: rows
            for job, rows in rows_by_job.items()
            if (job.model, job.devices) == (model, devices)
        }
        self.seeds = sorted({job.seed for job in self._jobs})

    def rows(self, policy: str, seed: int | None = None, workload: str = "") -> list[Row]:
        """Returns a policy's rows; of every seed where it is None, of every workload where ""."""
        return [
            row
            for job, rows in self._jobs.items()
            for row in rows
            if row.policy == policy and seed in (None, job.seed) and workload in ("", job.workload)
        ]

    def excess(self, policy: str, workload: str = "", cold: int = COLD) -> list[np.ndarray]:
        """Returns the excess of a policy in every step from ``cold`` on, an array for each seed."""
        return [
            np.array([row.excess for row in self.rows(policy, s, workload) if row.step >= cold])
            for s in self.seeds
        ]

    def best_splits(self) -> list[np.ndarray]:
        """Returns, seed by seed, the excess of each run's best split, chosen in hindsight."""
        return [
            np.concatenate(
                [
                    min(
                        (
                            np.array(
                                [
                                    row.excess
                                    for row in self.rows(f"split_{share:g}", seed, workload)
                                    if row.step >= COLD
                                ]
                            )
                            for share in SHARES
                        ),
                        key=lambda values: float(values.mean()),
                    )
                    for workload in WORKLOADS
                ]
            )
            for seed in self.seeds
        ]


def mean(values_by_seed: Sequence[np.ndarray]) -> float:
    """Returns the mean over all seeds."""
    return float(np.concatenate(values_by_seed).mean())


def high(values_by_seed: Sequence[np.ndarray]) -> float:
    """Returns the 95th percentile over all seeds."""
    return float(np.quantile(np.concatenate(values_by_seed), 0.95))


def excess_claims(
    prefix: str,
    suffix: str,
    values: Sequence[np.ndarray],
    bars: tuple[float | None, float | None] = (None, None),
) -> list[Claim]:
    """Returns the mean and the 95th percentile of an excess, with intervals over seeds."""
    unit = "of the oracle"
    return [
        Claim(f"{prefix}_{word}_excess_{suffix}", of(values), unit, bar, "<=", interval(values, of))
        for word, of, bar in (("mean", mean, bars[0]), ("p95", high, bars[1]))
    ]


def claims_of(model: Model, devices: int, rows_by_job: Mapping[Job, list[Row]]) -> list[Claim]:
    """Returns the claims of every policy and, for 512 devices, of every workload."""
    runs = Runs(model, devices, rows_by_job)
    claims = []
    names = ["replay", *(name for name in policies(model) if name != "replay")]
    bars = {("own", 512): (0.03, 0.08), ("second", 512): (0.06, None)}.get(
        (model, devices), (None, None)
    )
    for name in names:
        values = runs.excess(name)
        claims += excess_claims(
            name, runs.suffix, values, bars if name == "replay" else (None, None)
        )
    best = runs.best_splits()
    claims.append(
        Claim(
            f"best_split_of_each_run_mean_excess_{runs.suffix}",
            mean(best),
            "of the oracle",
            interval=interval(best, mean),
        )
    )
    claims += paper_claims(runs)
    if devices == 512:
        for workload, name in product(WORKLOADS, names):
            claims += excess_claims(f"{workload}_{name}", runs.suffix, runs.excess(name, workload))
        claims += replay_claims(runs)
    if model == "own":
        bounds = [row.seconds / row.bound_s for row in runs.rows(ORACLE)]
        claims.append(Claim(f"oracle_over_lower_bound_{devices}", float(np.mean(bounds)), "times"))
    if (model, devices) == ("own", 512):
        for name in ("replay", ORACLE, "utilisation_busy", "colocated", "coresident"):
            idle = [sum(row.idle.values()) for row in runs.rows(name)]
            claims.append(Claim(f"{name}_idle_512", float(np.mean(idle)), "of replica-seconds"))
        rows = [row for row in runs.rows("replay") if row.step >= 1]
        step_s = sum(row.seconds + row.train_s for row in rows)
        share = sum(row.decision_s for row in rows) / step_s
        claims.append(Claim("decision_share_of_step", share, "processor s / step s", 0.005, "<="))
    return claims


def paper_claims(runs: Runs) -> list[Claim]:
    """Returns the paper's rule with the start of ``replay``, its best signal and step size."""
    excess_of = {
        (signal, cells): runs.excess(same_start(signal, cells))
        for signal, cells in product(SIGNALS, STEP_SIZES)
    }
    signal, cells = min(excess_of, key=lambda settings: mean(excess_of[settings]))
    values = excess_of[signal, cells]
    end = f"{runs.suffix}_same_start"
    return [
        *excess_claims("paper_rule", end, values),
        Claim(f"paper_rule_replicas_a_step_{end}", cells, "replicas, the best of the sweep"),
        Claim(f"paper_rule_by_places_taken_{end}", float(signal == "filled"), "1: places; 0: busy"),
    ]


def replay_claims(runs: Runs) -> list[Claim]:
    """Returns what the cold start adds to ``replay``, and how far its predictions are off."""
    with_start = runs.excess("replay", cold=0)
    errors = [
        np.array(
            [
                abs(row.predicted_s / row.seconds - 1)
                for row in runs.rows("replay", seed)
                if row.step >= 1 and row.predicted_s is not None
            ]
        )
        for seed in runs.seeds
    ]
    end = runs.suffix.removeprefix("512")
    return [
        Claim(
            f"replay_mean_excess_with_start_{runs.suffix}",
            mean(with_start),
            "of the oracle",
            interval=interval(with_start, mean),
        ),
        Claim(
            f"replay_prediction_error{end}",
            mean(errors),
            "of the step after",
            interval=interval(errors, mean),
        ),
    ]


def sampling(seeds: Sequence[int]) -> list[Claim]:
    """Measures the rule of oversampling on drift, at a quarter of 512 devices for the judge."""
    cluster = cluster_of(512)
    engines = Engines("split", 96, 32)
    issued = 0
    known_issued = 0
    seconds = []
    stalled = []
    for seed in seeds:
        rate = KeepRate()
        for step in range(STEPS):
            groups = Published(name="drift", steps=STEPS).groups(step, cluster.needed * 5, seed)
            played = play(groups, engines, cluster.profiles, cluster.needed, rate)
            in_order = groups.kept[played.order]
            rate = rate.after(by_quarter(in_order), by_quarter(np.ones(len(in_order))))
            chance = PUBLISHED["drift"](step, STEPS).keep
            known_rate = KeepRate(rates=(chance,) * 4, is_known=True)
            best = play(groups, engines, cluster.profiles, cluster.needed, known_rate)
            if step >= 1:  # in the first one nobody knows anything
                issued = issued + played.issued
                known_issued = known_issued + best.issued
                seconds.append(played.seconds / best.seconds)
                stalled.append(played.seconds > 1.15 * best.seconds)
    return [
        Claim("issued_over_known_keep_rate", issued / known_issued, "groups / groups", 1.15, "<="),
        Claim("sampling_seconds_over_known_keep_rate", float(np.mean(seconds)), "s / s"),
        Claim("sampling_stalled_steps", float(np.mean(stalled)), "of steps"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="100:106", metavar="A:B", help="from A to below B")
    parser.add_argument("--devices", default="512,64,4096", help="of the policies' own model")
    parser.add_argument(
        "--second", default="512", metavar="DEVICES", help="of the second model; empty: none"
    )
    parser.add_argument("--processes", type=int, default=2)
    add_options(parser)
    args = parser.parse_args()
    first, last = map(int, args.seeds.split(":"))
    sizes: list[tuple[Model, int]] = [
        *(("own", int(word)) for word in args.devices.split(",") if word),
        *(("second", int(word)) for word in args.second.split(",") if word),
    ]
    jobs = [
        Job(model, devices, workload, seed)
        for model, devices in sizes
        for seed in range(first, min(last, first + seeds_of(model, devices)))
        for workload in WORKLOADS
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        rows_by_job = dict(zip(jobs, pool.map(rows_of, jobs), strict=True))
    claims = [claim for size in sizes for claim in claims_of(*size, rows_by_job)]
    claims += sampling(range(first, last))
    return publish(
        "placement_sim",
        claims,
        args,
        ["gcore-core", "gcore-placement", "numba", "numpy"],
    )


if __name__ == "__main__":
    sys.exit(main())
