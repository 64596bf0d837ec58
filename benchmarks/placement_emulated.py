"""Measures placement policies on 16 emulated devices, in runs of the real processes' code.

Supervisor, controllers, shells, drain, sleep and wake are the real ones.

    python benchmarks/placement_emulated.py [--json] [--check] [--steps 60] [--processes 2]
    [--real 12] [--keep DIR]

Both roles have an engine on each of the 16 devices (the plugin ``sim``: continuous batching that
only spends time). Every record is judged by one question. In the course of the run answers grow
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
out best. Intervals draw steps, the same ones of every policy.
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
from gcore_placement.queueing.step import Groups
from gcore_placement.replay import Replay
from gcore_placement.sim.cluster import ORACLE, Cluster, simulate
from gcore_placement.sim.config import Drift, PromptsConfig
from gcore_placement.sim.prompts import AnswerLengths, SimPrompts
from gcore_placement.utilisation import Utilisation
from report import Claim, add_options, publish, repeated

from gcore_core.contract import run_files
from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.order import row_of, sample_seed

DEVICES = 16
GROUPS = 32
SAMPLES = 8
SHARDS = 2
SEED = 7
SWAP_S = 1.8
#: Records that one emulated record stands for, and tokens that one emulated token does.
RECORDS = 4
TOKENS = 10
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
    """Returns settings of ``sim/prompts`` whose drift ends about when the steps do."""
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
    """Returns the job, which is the same for every policy but for ``placement``.

    scale: factor of all emulated times.
    """
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
    """Returns the policies' settings by name.

    splits: numbers of judging cells of the fixed splits.
    """
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
    """The lengths of the run itself, by ordinal.

    A step begins where the one before ended, whichever policy placed it.

    steps: steps of the whole run.
    """

    steps: int

    def groups(self, step: int, count: int, seed: int) -> Groups:
        """Returns the groups from a step's first ordinal on; see ``Workload.groups``."""
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
        """Returns the first ordinal of a step."""
        ordinal = 0
        groups_kept = 0
        while groups_kept < step * GROUPS:
            groups_kept += _lengths(self.steps, ordinal)[2]
            ordinal += 1
        return ordinal


@lru_cache(maxsize=4)
def _dataset(steps: int) -> SimPrompts:
    """Returns the dataset of a run of so many steps."""
    settings = prompts(steps)
    return SimPrompts(PromptsConfig(**{**settings, "drift": Drift(**settings["drift"])}))


@lru_cache(maxsize=1 << 20)
def _lengths(steps: int, ordinal: int) -> tuple[list[int], list[int], bool]:
    """Returns (tokens of each answer, tokens of each verdict, whether the group teaches).

    They are drawn as the engines draw them.
    """
    epoch, row = row_of(ordinal, ROWS, SEED)
    row_fields = _dataset(steps)[row].fields
    answers = AnswerLengths(
        row_fields["answer_median"], row_fields["answer_sigma"], row_fields["answer_limit"]
    )
    verdicts = AnswerLengths(
        row_fields["verdict_median"], row_fields["verdict_sigma"], row_fields["verdict_limit"]
    )
    answer_tokens = [answers.draw(sample_seed(SEED, ordinal, epoch, s)) for s in range(SAMPLES)]
    verdict_tokens = [
        verdicts.draw(sample_seed(sample_seed(0, ordinal, 0, s), 0, 0, 0)) for s in range(SAMPLES)
    ]
    return (
        [min(n, answers.limit) for n in answer_tokens],
        [min(n, verdicts.limit) for n in verdict_tokens],
        row_fields["teaches"],
    )


def predicted(steps: int) -> dict[str, tuple[float, float]]:
    """Simulates every policy and the oracle; returns policy -> (mean seconds of a rollout, idle
    share).
    """
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
    results = {}
    for name in (*policies, ORACLE):
        policy_rows = [row for row in rows if row.policy == name]
        results[name] = (
            float(np.mean([row.seconds for row in policy_rows])),
            float(
                np.average(
                    [sum(row.idle.values()) for row in policy_rows],
                    weights=[row.seconds for row in policy_rows],
                )
            ),
        )
    return results


@dataclass(frozen=True)
class RunSums:
    """A run's sums, in emulated seconds.

    steps: steps of the run.
    trained: records that were trained on.
    steps_s: seconds of each step.
    rollout_s: mean seconds of a rollout.
    idle: idle share of the rollouts.
    moved: cells that changed roles.
    monitoring_s: mean processor seconds a step of measuring and deciding.
    consumed: number of ordinals that the run has used up.
    causes: cause -> share of the devices' time.
    off: mean |predicted / measured - 1| of the policy's own predictions.
    """

    steps: int
    trained: float
    steps_s: tuple[float, ...]
    rollout_s: float
    idle: float
    moved: int
    monitoring_s: float
    consumed: int
    causes: Mapping[str, float]
    off: float

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        return float(np.mean(self.steps_s))


def run(
    directory: Path, placement: Mapping[str, Any], steps: int, verb: Sequence[str], scale: float
) -> RunSums:
    """Runs the job with a placement policy and returns its sums.

    Raises RuntimeError with its output when it fails.

    verb: the command of g-core, as words.
    scale: factor of all emulated times.
    """
    run_job(directory, job(placement, steps, scale), verb)
    return read(directory / "run", steps, scale)


def run_job(directory: Path, made: Mapping[str, Any], verb: Sequence[str]) -> None:
    """Runs a job, in the directory ``run`` of a new one.

    Raises RuntimeError with its output when it fails.

    made: the job.
    verb: the command of g-core, as words.
    """
    directory.mkdir(parents=True)
    (directory / "job.yaml").write_text(json.dumps(made))
    command = [
        sys.executable,
        "-m",
        "gcore_core",
        *verb,
        str(directory / "job.yaml"),
        f"run.dir={directory / 'run'}",
    ]
    process = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{process.stdout[-2000:]}{process.stderr[-4000:]}")


def read(directory: Path, steps: int, scale: float) -> RunSums:
    """Reads a run's sums. Raises RuntimeError when steps are missing."""
    reports = [
        json.loads(line)["metrics"]
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
    steps_metrics = [metrics for metrics in reports if "seconds/step" in metrics]
    _, outcomes = run_files.read_placement(directory)
    if len(steps_metrics) != steps or len(outcomes) != steps:
        raise RuntimeError(
            f"{directory}: {len(steps_metrics)} steps and {len(outcomes)} outcomes "
            f"instead of {steps}"
        )
    measured = list(outcomes.values())
    causes: dict[str, float] = {}
    for outcome in measured:
        for spent in costs.spent(outcome).values():
            for cause, seconds in spent.items():
                causes[cause] = causes.get(cause, 0.0) + seconds
    total = sum(causes.values())
    rollout_s = np.array([outcome.measured_s for outcome in measured])
    off = [
        m["placement/predicted_over_measured"]
        for m in steps_metrics
        if "placement/predicted_over_measured" in m
    ]
    return RunSums(
        steps=steps,
        trained=sum(metrics["groups/trained"] for metrics in steps_metrics) * SAMPLES,
        steps_s=tuple(metrics["seconds/step"] / scale for metrics in steps_metrics),
        rollout_s=float(rollout_s.mean()) / scale,
        idle=float(
            np.average(
                [sum(costs.idle(outcome).values()) for outcome in measured], weights=rollout_s
            )
        ),
        moved=sum(outcome.moved for outcome in measured),
        monitoring_s=float(np.mean([outcome.monitoring_s for outcome in measured])),
        consumed=json.loads((directory / "position.json").read_text())["next_ordinal"],
        causes={cause: seconds / total for cause, seconds in causes.items()},
        off=float(np.mean(np.abs(np.array(off) - 1))) if off else 0.0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--real", type=int, default=12, help="steps of the two runs in real processes; 0: none"
    )
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", type=Path, help="leave the runs here")
    args = parser.parse_args()
    predictions = predicted(args.steps)
    fixed = sorted(
        (name for name in predictions if name.startswith("split_")),
        key=lambda name: predictions[name][0],
    )[:3]
    placement_of = placements([int(name.removeprefix("split_")) for name in fixed])
    with tempfile.TemporaryDirectory() as temporary:
        at = (args.keep or Path(temporary)).absolute()
        with ThreadPoolExecutor(args.processes) as pool:
            runs = {
                name: pool.submit(run, at / name, placement, args.steps, ["sim", "run"], 1.0)
                for name, placement in placement_of.items()
            }
            short_runs = {
                name: pool.submit(
                    run, at / f"short_{name}", placement_of[name], args.real, ["sim", "run"], 1.0
                )
                for name in (("replay", "colocated") if args.real else ())
            }
            sums = {name: future.result() for name, future in runs.items()}
            virtual = {name: future.result() for name, future in short_runs.items()}
        real = {
            name: run(at / f"real_{name}", placement_of[name], args.real, ["run"], REAL_SCALE)
            for name in virtual
        }
    claims = claims_of(sums, predictions, fixed)
    for name, run_sums in real.items():
        claims.append(Claim(f"real_{name}_step_s", run_sums.step_s, "emulated s"))
        claims.append(
            Claim(f"real_over_virtual_{name}", run_sums.step_s / virtual[name].step_s, "times")
        )
    if real:
        ratio = real["colocated"].step_s / real["replay"].step_s
        claims.append(Claim("real_replay_throughput_over_colocated", ratio, "times"))
    return publish(
        "placement_emulated",
        claims,
        args,
        ["gcore-core", "gcore-placement", "numba", "numpy"],
    )


def over_least(steps_s: Sequence[tuple[float, ...]]) -> float:
    """Returns the seconds of the first policy over those of the fastest of the others.

    steps_s: the seconds of each step, under every policy.
    """
    first, *others = (sum(seconds) for seconds in zip(*steps_s, strict=True))
    return first / min(others)


def claims_of(
    sums: Mapping[str, RunSums],
    predictions: Mapping[str, tuple[float, float]],
    fixed: Sequence[str],
) -> list[Claim]:
    """Returns the claims of all runs.

    Raises RuntimeError when policies consumed different groups, or moved devices where they must
    not.

    sums: policy -> sums of its run.
    predictions: policy -> (mean seconds of a rollout, idle share), simulated.
    fixed: the names of the fixed splits that ran.
    """
    if len({(run_sums.consumed, run_sums.trained) for run_sums in sums.values()}) != 1:
        raise RuntimeError(
            f"policies consumed different groups: { {n: o.consumed for n, o in sums.items()} }"
        )
    if not sums["replay"].moved or any(sums[name].moved for name in fixed):
        raise RuntimeError("replay must move devices, and a fixed split none")
    errors = {
        name: predictions[name][0] / run_sums.rollout_s - 1 for name, run_sums in sums.items()
    }
    replay = sums["replay"]
    paired_s = list(zip(*(sums[name].steps_s for name in ("replay", *fixed)), strict=True))
    claims = [
        # Every policy has trained on the same records.
        repeated(
            "replay_throughput_over_colocated",
            list(zip(sums["colocated"].steps_s, replay.steps_s, strict=True)),
            over_least,
            "times",
            1.15,
        ),
        repeated("replay_time_over_best_fixed", paired_s, over_least, "times", 1.10, "<="),
        Claim("simulator_error_max", max(map(abs, errors.values())), "of the rollout", 0.10, "<="),
        Claim("monitoring_share", replay.monitoring_s / replay.step_s, "of a step", 0.005, "<="),
        Claim("swap_share_of_step", SWAP_S / replay.step_s, "of a step"),
        Claim(
            "replay_rollout_over_colocated", sums["colocated"].rollout_s / replay.rollout_s, "times"
        ),
        Claim("replay_own_prediction_error", replay.off, "of the rollout"),
        Claim("records_trained", replay.trained, "of every policy"),
        Claim("groups_consumed", replay.consumed, "by every policy"),
    ]
    for name, run_sums in sums.items():
        claims += [
            Claim(f"{name}_step_s", run_sums.step_s, "emulated s"),
            Claim(f"{name}_rollout_s", run_sums.rollout_s, "emulated s"),
            Claim(f"{name}_rollout_predicted_s", predictions[name][0], "emulated s"),
            Claim(f"{name}_idle", run_sums.idle, "of the rollout"),
            Claim(f"{name}_idle_predicted", predictions[name][1], "of the rollout"),
            Claim(f"{name}_moved_cells", run_sums.moved / run_sums.steps, "a step"),
            Claim(f"{name}_monitoring_s", run_sums.monitoring_s, "processor s a step"),
        ]
        claims += [
            Claim(f"{name}: {cause}", share, "of device time")
            for cause, share in sorted(run_sums.causes.items())
        ]
    claims.append(Claim("oracle_rollout_predicted_s", predictions[ORACLE][0], "emulated s"))
    return claims


if __name__ == "__main__":
    sys.exit(main())
