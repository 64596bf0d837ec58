"""Measures placement policies on 16 emulated devices, in runs of the real processes' code.

Supervisor, controllers, shells, drain, sleep and wake are the real ones.

    python benchmarks/placement_emulated.py [--json] [--check] [--steps 200] [--processes 2] [--real
    24] [--keep DIR]

Both roles have an engine on each of the 16 devices (``gcore-sim``: continuous batching that only
spends time). Every record is judged by one question. In the course of the run answers grow
fourfold, verdicts shrink to a third, and the chance that a group teaches falls from 0.7 to 0.4; a
step takes the 32 lowest groups that do, so every policy consumes the same groups. Changing roles
takes ``SWAP_S`` seconds, 3% of a step of ``replay``. So that a long run is cheap, an engine is the
one of placement_sim.py on a smaller scale: a record stands for four of the 64 that a replica has
there, and a token for ten. It costs in a round what those cost together.

All policies run on virtual time: one process, real messages, nobody waits for the emulated seconds.
``replay`` and ``colocated`` run for ``--real`` more steps in processes of their own (``sim/crowd``,
sockets, a twentieth of the time), to see that it makes no difference. Fixed splits: the simulator
tries all 15 and the best three are run.

``replay_throughput_over_colocated``: trained records per second of whole steps, generation to push.
``replay_time_over_best_fixed``: seconds of whole steps over those of the fixed split that turned
out best.
``simulator_error_max``: largest |predicted / ran - 1| of a policy's mean rollout, predicted from
the lengths alone.
``monitoring_share``: seconds in which the lead sends and receives measurements and decides, over
the emulated seconds of a step. Processor seconds do not shrink with emulated time: they count as
they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gcore_placement import costs
from gcore_placement.config import ReplayConfig, SplitConfig, UtilisationConfig
from gcore_placement.fixed import Colocated, FixedSplit
from gcore_placement.replay import Replay
from gcore_placement.utilisation import Utilisation
from gcore_queueing.step import Groups
from gcore_sim.cluster import ORACLE, Cluster, simulate
from gcore_sim.config import Drift, PromptsConfig
from gcore_sim.prompts import AnswerLengths, SimPrompts
from report import Claim, add_options, publish

from gcore_core.contract import run_files
from gcore_core.contract.measurements import Profile
from gcore_core.contract.order import row_of, sample_seed

DEVICES, GROUPS, SAMPLES, SHARDS, SEED = 16, 32, 8, 2, 7
SWAP_S = 1.8
RECORDS, TOKENS = 4, 10  # that one stands for
PROFILE = Profile(
    base_s=Profile.base_s,
    running_s=Profile.running_s * RECORDS,
    cached_s=Profile.cached_s * RECORDS * TOKENS,
    prefill_s=Profile.prefill_s * RECORDS,
    max_running=Profile.max_running // RECORDS,
    cache_tokens=Profile.cache_tokens // (RECORDS * TOKENS),
)
INSTRUCTIONS = 100
ROWS = 16_384
REAL_SCALE = 0.05


def prompts(steps: int) -> dict[str, Any]:
    """Settings of ``sim/prompts``. The drift is over when about 200 of 200 steps are."""
    return {
        "rows": ROWS,
        "prompt_tokens": [50],
        "drift": {
            "ordinals": steps * 60,
            "answer": [80.0, 320.0],
            "answer_sigma": 0.8,
            "answer_limit": 1600,
            "verdict": [180.0, 60.0],
            "verdict_sigma": 1.0,
            "verdict_limit": 1200,
            "keep": [0.7, 0.4],
            "seed": SEED,
        },
    }


def job(placement: Mapping[str, Any], steps: int, scale: float) -> dict[str, Any]:
    """The same for every policy but ``placement``."""
    profile = {name: getattr(PROFILE, name) for name in PROFILE.__dataclass_fields__}
    generator = {
        "profile": profile,
        "prefix_cache": False,
        "weights_gb": 1.0,
        "push_s_per_gb": 0.5,
        "sleep_s": SWAP_S / 2,
        "wake_s": SWAP_S / 2,
        "time_scale": scale,
    }
    role = {"use": "sim", "slots": DEVICES, "config": generator}
    return {
        "run": {"name": "placement", "steps": steps, "seed": SEED},
        "launcher": {"use": "sim/crowd", "config": {"processes": 2}},
        "cluster": {"devices": DEVICES},
        "controller": {"shards": SHARDS, "config": {"prompts": GROUPS, "minibatches": 1}},
        "data": {"use": "sim/prompts", "config": prompts(steps)},
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": SAMPLES}},
        "objective": {"use": "sim"},
        "filter": {"use": "core/varied"},
        "roles": {
            "policy": {
                "use": "sim",
                "slots": DEVICES,
                "config": {"token_s": 1.0e-3, "time_scale": scale},
            },
            "rollout": role,
            "judge": role,
        },
        "rewards": {
            "judged": {"use": "sim/asks", "role": "judge", "config": {"instructions": INSTRUCTIONS}}
        },
        "placement": dict(placement),
    }


def placements(splits: Sequence[int]) -> dict[str, dict[str, Any]]:
    return {
        "replay": {"use": "placement/replay"},
        "colocated": {"use": "placement/colocated"},
        "utilisation": {"use": "placement/utilisation"},
        **{
            f"split_{cells}": {"use": "placement/split", "config": {"cells": cells}}
            for cells in splits
        },
    }


@dataclass(frozen=True)
class Ordinals:
    """The lengths of the run itself, by ordinal: a step begins where the one before ended, whoever
    placed it.
    """

    steps: int

    def groups(self, step: int, count: int, seed: int) -> Groups:
        begin = self._begin(step)
        rows = [_lengths(self.steps, ordinal) for ordinal in range(begin, begin + count)]
        policy, judge = (np.array([row[i] for row in rows], float) for i in (0, 1))
        prompt = np.full(policy.shape, 50.0)
        return Groups(
            policy=policy,
            judge=judge,
            policy_prompt=prompt,
            judge_prompt=INSTRUCTIONS + prompt + policy,
            kept=np.array([row[2] for row in rows]),
        )

    def _begin(self, step: int) -> int:
        ordinal, kept = 0, 0
        while kept < step * GROUPS:
            kept += _lengths(self.steps, ordinal)[2]
            ordinal += 1
        return ordinal


@lru_cache(maxsize=4)
def _dataset(steps: int) -> SimPrompts:
    settings = prompts(steps)
    return SimPrompts(PromptsConfig(**{**settings, "drift": Drift(**settings["drift"])}))


@lru_cache(maxsize=1 << 20)
def _lengths(steps: int, ordinal: int) -> tuple[list[int], list[int], bool]:
    """(tokens of each answer, of each verdict, whether the group teaches), as the engines draw
    them.
    """
    turn, row = row_of(ordinal, ROWS, SEED)
    told = _dataset(steps)[row].fields
    answers = AnswerLengths(told["answer_median"], told["answer_sigma"], told["answer_limit"])
    verdicts = AnswerLengths(told["verdict_median"], told["verdict_sigma"], told["verdict_limit"])
    drawn = [answers.draw(sample_seed(SEED, ordinal, turn, s)) for s in range(SAMPLES)]
    asked = [
        verdicts.draw(sample_seed(sample_seed(0, ordinal, 0, s), 0, 0, 0)) for s in range(SAMPLES)
    ]
    return (
        [min(n, answers.limit) for n in drawn],
        [min(n, verdicts.limit) for n in asked],
        told["teaches"],
    )


def predicted(steps: int) -> dict[str, tuple[float, float]]:
    """Policy -> (mean seconds of a rollout, idle share), and of the oracle, simulated."""
    policies = {
        "replay": Replay(ReplayConfig()),
        "colocated": Colocated(),
        "utilisation": Utilisation(UtilisationConfig()),
        **{f"split_{n}": FixedSplit(SplitConfig(cells=n)) for n in range(1, DEVICES)},
    }
    cluster = Cluster(
        devices=DEVICES,
        size=1,
        needed=GROUPS,
        switch_s=SWAP_S,
        shards=SHARDS,
        profiles=(PROFILE, PROFILE),
    )
    rows = list(simulate(cluster, Ordinals(steps), policies, steps, SEED))
    found = {}
    for name in (*policies, ORACLE):
        own = [row for row in rows if row.policy == name]
        found[name] = (
            float(np.mean([row.seconds for row in own])),
            float(
                np.average(
                    [sum(row.idle.values()) for row in own], weights=[row.seconds for row in own]
                )
            ),
        )
    return found


@dataclass(frozen=True)
class Ran:
    """A run's sums, in emulated seconds."""

    steps: int
    trained: float
    step_s: float  # mean
    rollout_s: float  # mean
    idle: float
    moved: int
    monitoring_s: float  # mean, processor
    consumed: int
    causes: Mapping[str, float]
    off: float  # mean |predicted / measured - 1| of the policy's own predictions


def run(
    directory: Path, placement: Mapping[str, Any], steps: int, verb: Sequence[str], scale: float
) -> Ran:
    directory.mkdir(parents=True)
    (directory / "job.yaml").write_text(json.dumps(job(placement, steps, scale)))
    words = [
        sys.executable,
        "-m",
        "gcore_core",
        *verb,
        str(directory / "job.yaml"),
        f"run.dir={directory / 'run'}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, cwd=directory)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return read(directory / "run", steps, scale)


def read(directory: Path, steps: int, scale: float) -> Ran:
    reports = [
        json.loads(line)["metrics"]
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
    own = [metrics for metrics in reports if "seconds/step" in metrics]
    _, outcomes = run_files.read_placement(directory)
    if len(own) != steps or len(outcomes) != steps:
        raise RuntimeError(
            f"{directory}: {len(own)} steps and {len(outcomes)} outcomes instead of {steps}"
        )
    told = list(outcomes.values())
    causes: dict[str, float] = {}
    for outcome in told:
        for spent in costs.spent(outcome).values():
            for cause, seconds in spent.items():
                causes[cause] = causes.get(cause, 0.0) + seconds
    total = sum(causes.values())
    rollout_s = np.array([outcome.measured_s for outcome in told])
    off = [
        m["placement/predicted_over_measured"]
        for m in own
        if "placement/predicted_over_measured" in m
    ]
    return Ran(
        steps=steps,
        trained=sum(metrics["groups/trained"] for metrics in own) * SAMPLES,
        step_s=float(np.mean([metrics["seconds/step"] for metrics in own])) / scale,
        rollout_s=float(rollout_s.mean()) / scale,
        idle=float(
            np.average([sum(costs.idle(outcome).values()) for outcome in told], weights=rollout_s)
        ),
        moved=sum(outcome.moved for outcome in told),
        monitoring_s=float(np.mean([outcome.monitoring_s for outcome in told])),
        consumed=json.loads((directory / "position.json").read_text())["next_ordinal"],
        causes={cause: seconds / total for cause, seconds in causes.items()},
        off=float(np.mean(np.abs(np.array(off) - 1))) if off else 0.0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--real", type=int, default=24, help="steps of the two runs in real processes; 0: none"
    )
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", type=Path, help="leave the runs here")
    args = parser.parse_args()
    told = predicted(args.steps)
    fixed = sorted(
        (name for name in told if name.startswith("split_")), key=lambda name: told[name][0]
    )[:3]
    chosen = placements([int(name.removeprefix("split_")) for name in fixed])
    with tempfile.TemporaryDirectory() as temporary:
        at = (args.keep or Path(temporary)).absolute()
        with ThreadPoolExecutor(args.processes) as pool:
            runs = {
                name: pool.submit(run, at / name, placement, args.steps, ["sim", "run"], 1.0)
                for name, placement in chosen.items()
            }
            ran = {name: future.result() for name, future in runs.items()}
        real, virtual = {}, {}
        for name in ("replay", "colocated") if args.real else ():
            real[name] = run(at / f"real_{name}", chosen[name], args.real, ["run"], REAL_SCALE)
            virtual[name] = run(at / f"short_{name}", chosen[name], args.real, ["sim", "run"], 1.0)
    claims = claims_of(ran, told, fixed)
    for name, own in real.items():
        claims.append(Claim(f"real_{name}_step_s", own.step_s, "emulated s"))
        claims.append(
            Claim(f"real_over_virtual_{name}", own.step_s / virtual[name].step_s, "times")
        )
    if real:
        ratio = real["colocated"].step_s / real["replay"].step_s
        claims.append(Claim("real_replay_throughput_over_colocated", ratio, "times"))
    return publish(
        "placement_emulated",
        claims,
        args,
        ["gcore-core", "gcore-placement", "gcore-queueing", "gcore-sim", "numba", "numpy"],
    )


def claims_of(
    ran: Mapping[str, Ran], told: Mapping[str, tuple[float, float]], fixed: Sequence[str]
) -> list[Claim]:
    if len({(own.consumed, own.trained) for own in ran.values()}) != 1:
        raise RuntimeError(
            f"policies consumed different groups: { {n: o.consumed for n, o in ran.items()} }"
        )
    if not ran["replay"].moved or any(ran[name].moved for name in fixed):
        raise RuntimeError("replay must move devices, and a fixed split none")
    speed = {name: own.trained / (own.step_s * own.steps) for name, own in ran.items()}
    best = min(ran[name].step_s for name in fixed)
    errors = {name: told[name][0] / own.rollout_s - 1 for name, own in ran.items()}
    replay = ran["replay"]
    claims = [
        Claim(
            "replay_throughput_over_colocated", speed["replay"] / speed["colocated"], "times", 1.15
        ),
        Claim("replay_time_over_best_fixed", replay.step_s / best, "times", 1.10, "<="),
        Claim("simulator_error_max", max(map(abs, errors.values())), "of the rollout", 0.10, "<="),
        Claim("monitoring_share", replay.monitoring_s / replay.step_s, "of a step", 0.005, "<="),
        Claim("swap_share_of_step", SWAP_S / replay.step_s, "of a step"),
        Claim(
            "replay_rollout_over_colocated", ran["colocated"].rollout_s / replay.rollout_s, "times"
        ),
        Claim("replay_own_prediction_error", replay.off, "of the rollout"),
        Claim("records_trained", replay.trained, "of every policy"),
        Claim("groups_consumed", replay.consumed, "by every policy"),
    ]
    for name, own in ran.items():
        claims += [
            Claim(f"{name}_step_s", own.step_s, "emulated s"),
            Claim(f"{name}_rollout_s", own.rollout_s, "emulated s"),
            Claim(f"{name}_rollout_predicted_s", told[name][0], "emulated s"),
            Claim(f"{name}_idle", own.idle, "of the rollout"),
            Claim(f"{name}_idle_predicted", told[name][1], "of the rollout"),
            Claim(f"{name}_moved_cells", own.moved / own.steps, "a step"),
            Claim(f"{name}_monitoring_s", own.monitoring_s, "processor s a step"),
        ]
        claims += [
            Claim(f"{name}: {cause}", share, "of device time")
            for cause, share in sorted(own.causes.items())
        ]
    claims.append(Claim("oracle_rollout_predicted_s", told[ORACLE][0], "emulated s"))
    return claims


if __name__ == "__main__":
    sys.exit(main())
