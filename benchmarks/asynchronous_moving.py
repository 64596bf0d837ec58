"""Measures generators and judges that change devices at pushes, on emulated devices.

The job is that of placement_emulated.py with generation one step ahead, records at most one version
old and pushes that wait (``midway: wait``): 16 devices for generators and judges, and 4 more for
the trainer. Every record is judged by one question. Changing roles takes 1.8 s. All runs are the
real program, on virtual time.

workload  in the course of the run
drift     answers grow fourfold, verdicts shrink to a third, fewer groups teach
steady    all three stay at the geometric mean of both ends

Preparation and training take some four seconds of a step, so pushes wait for samples most of the
time: it is the rollout that differs.

moving_<workload>_over_best_fixed
        seconds of whole steps with ``placement/replay`` over those of the fixed split that turned
        out best. The first step is left out: ``replay`` knows nothing before it
moving_<workload>_over_even
        the same over a fixed split into halves, that of somebody who knows nothing
moving_<workload>_over_turns
        the same over ``core/sync`` on all 20 devices, where ``replay`` may also have the two take
        turns, and which trains on all devices; over all steps, since generation that runs ahead
        has more to do in the first one and less in the last
moving_<workload>_best_fixed
        devices of the judge in the best of the fixed splits
moving_<workload>_cells
        devices that changed roles, a step

It rests on engines that behave as a formula says, of which ``replay`` knows the form and fits the
terms. Each workload is one run of each policy, which trains on 32 groups in each step; lengths
are drawn by one seed. Intervals draw steps, the same ones of both. Where answers differ in length
more than here, pushes that wait for samples cost more, and splits matter less.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import placement_emulated
from report import Claim, interval

from gcore_core.contract import run_files
from gcore_core.contract.run_files import read_metrics

SHARED = placement_emulated.DEVICES
TRAINER = 4
EVEN = SHARED // 2
REPLAY = {"use": "placement/replay"}
#: Workload -> what replay's seconds may be at most, over those of the best fixed split.
BARS = {"drift": 1.0, "steady": 1.05}
WORKLOADS = tuple(BARS)
#: Seconds of training of one token on one rank.
TOKEN_S = 1.2e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--moving-steps", type=int, default=24, help="of a run")
    parser.add_argument("--moving-workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--moving-splits",
        type=int,
        nargs="+",
        default=[2, 4, 5, 6, 7, 8, 9, 10, 12],
        help="devices of the judge in fixed splits, besides halves",
    )


@dataclass(frozen=True)
class Ran:
    """Holds what a run took.

    steps_s: emulated seconds of each step.
    moved: devices that changed roles.
    """

    steps_s: np.ndarray
    moved: int


def job(workload: str, placement: Mapping[str, Any], steps: int, asynchronous: bool) -> Any:
    """Returns a job. asynchronous: else it is ``core/sync``, on as many devices."""
    made = placement_emulated.job(placement, steps, 1.0)
    devices = SHARED + TRAINER
    controller = made["controller"]
    roles = made["roles"]
    made["cluster"]["devices"] = devices
    made["objective"] = {"use": "algorithms/ppo_clip", "config": {"old_logprobs": "rollout"}}
    roles["policy"]["config"]["token_s"] = TOKEN_S
    roles["policy"]["slots"] = TRAINER if asynchronous else devices
    if asynchronous:
        controller["use"] = "async"
        controller["config"] |= {"ahead": 1, "age": 1, "midway": "wait"}
    else:
        for role in ("rollout", "judge"):
            roles[role] = {**roles[role], "slots": devices}
    if workload == "steady":
        drift = made["data"]["config"]["drift"]
        for name in ("answer", "verdict", "keep"):
            drift[name] = [float(np.prod(drift[name]) ** 0.5)] * 2
    return made


def run(
    room: Path, name: str, workload: str, placement: Mapping[str, Any], n_steps: int, ahead: bool
) -> Ran:
    """Runs a job on virtual time. Raises RuntimeError with its output where it fails.

    room: where its files go, under ``name``.
    ahead: whether generation runs ahead.
    """
    directory = room / f"{workload}_{name}"
    placement_emulated.run_job(directory, job(workload, placement, n_steps, ahead), ("sim", "run"))
    rows = [row["metrics"] for row in read_metrics(directory / "run")]
    steps = [row for row in rows if "seconds/step" in row]
    trained = [row["groups/trained"] for row in steps]
    if trained != [placement_emulated.GROUPS] * n_steps:
        raise RuntimeError(f"{directory}: steps trained on {trained} groups")
    _, outcomes = run_files.read_placement(directory / "run")
    steps_s = np.array([row["seconds/step"] for row in steps])
    return Ran(steps_s, sum(one.moved for one in outcomes.values()))


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    splits = sorted({*args.moving_splits, EVEN})
    claims = []
    with (
        tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as room,
        ThreadPoolExecutor(2) as pool,
    ):
        for workload in args.moving_workloads:
            jobs: dict[str, tuple[Mapping[str, Any], bool]] = {
                "replay": (REPLAY, True),
                "turns": (REPLAY, False),
                **{
                    f"split_{cells}": ({"use": "placement/split", "config": {"cells": cells}}, True)
                    for cells in splits
                },
            }
            started = {
                name: pool.submit(
                    run, Path(room), name, workload, placement, args.moving_steps, ahead
                )
                for name, (placement, ahead) in jobs.items()
            }
            ran = {name: future.result() for name, future in started.items()}
            claims += claims_of(workload, ran)
            told = {name: round(float(one.steps_s[1:].mean()), 1) for name, one in ran.items()}
            print(f"{workload}: seconds a step {told}", file=sys.stderr, flush=True)
    return claims


def claims_of(workload: str, ran: Mapping[str, Ran]) -> list[Claim]:
    """Returns the claims of a workload. ran: name of a placement -> its run."""
    replay = ran["replay"]
    fixed = [name for name in ran if name.startswith("split_")]
    best = min(fixed, key=lambda name: float(ran[name].steps_s[1:].sum()))

    def over(name: str, other: str, first: int = 1, bar: float | None = None) -> Claim:
        """Returns the seconds of ``replay`` over those of another run, from a step on."""
        pairs = list(np.stack([replay.steps_s[first:], ran[other].steps_s[first:]], axis=1))
        within = interval(pairs, _ratio)
        return Claim(f"moving_{workload}_over_{name}", _ratio(pairs), "times", bar, "<=", within)

    return [
        over("best_fixed", best, bar=BARS[workload]),
        over("even", f"split_{EVEN}"),
        over("turns", "turns", first=0),
        Claim(
            f"moving_{workload}_best_fixed", int(best.split("_")[1]), f"of {SHARED} devices judge"
        ),
        Claim(f"moving_{workload}_cells", replay.moved / len(replay.steps_s), "devices a step"),
    ]


def _ratio(pairs: Sequence[np.ndarray]) -> float:
    """Returns the sum of the first numbers over that of the second ones."""
    first, second = np.sum(pairs, axis=0)
    return float(first / second)
