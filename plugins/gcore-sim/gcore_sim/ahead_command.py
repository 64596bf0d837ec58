"""Runs ``g-core simulate --async``: what generation that runs ahead would make of a run's job.

It tries every split of the devices between trainer and generators, and prints the best one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.errors import ConfigError
from gcore_core.kits.commands import print_table
from gcore_sim.ahead import AheadJob, Layout, simulate_ahead, summarize
from gcore_sim.ahead_trace import MeasuredRun, measured_run
from gcore_sim.lending import GiveBack

#: Splits that are tried at first; then those between the best one and its neighbours.
_FIRST = 16

_EXAMPLE = """\
example:
  g-core simulate --async --trace runs/judged/001 --devices 64 --size 4 --ahead 1 --age 4

Lengths of answers, the engine's speed, and the seconds of training, push and rewards are those of
the run. Training is taken to be proportional to the tokens of a rank.
"""


@dataclass(frozen=True)
class Candidate:
    """One way to run the job, with what the simulation says of it.

    name: shown to the user.
    layout: how the units of devices are used.
    figures: see ``summarize``.
    """

    name: str
    layout: Layout
    figures: dict[str, Any]

    @property
    def steps_a_minute(self) -> float:
        """The steps of a minute."""
        return 60 / float(self.figures["seconds"])


def run(words: list[str]) -> int:
    """Runs the command with these arguments; returns the exit code.

    Raises ConfigError for arguments that do not fit, DataError for a run without a step.
    """
    args = _parser().parse_args(words)
    measured = measured_run(args.trace)
    args.size = measured.size if args.size is None else args.size
    units = _units(args, measured)
    job = _job(args, measured)
    candidates = [
        _simulated(
            "shared, in turns", _synchronous(job), Layout(units, units, True), args, measured
        ),
        _best("split, synchronous", _synchronous(job), units, args, measured),
        _best(f"split, ahead {job.ahead}, age {job.age}", job, units, args, measured),
    ]
    if args.lend:
        lends = replace(job, give_back=args.lend)
        candidates.append(_best(f"lent, {args.lend}", lends, units, args, measured, lends=True))
    if args.json:
        found = [
            {
                "name": one.name,
                "trainer": one.layout.ranks * args.size,
                "generators": one.layout.replicas * args.size,
                "steps_a_minute": one.steps_a_minute,
                **one.figures,
            }
            for one in candidates
        ]
        print(json.dumps({"job": asdict(job), "candidates": found}, indent=2))
    else:
        _print(candidates, job, args.size)
    return 0


def best_split(units: int, cost: Callable[[int], float]) -> int:
    """Returns the number of generators, from 1 to ``units - 1``, at which ``cost`` is least.

    It tries a coarse grid, then closes in on the best point from both sides. Where the cost has
    several valleys narrower than the grid it may find one that is not the deepest.
    """
    costs: dict[int, float] = {}

    def tried(count: int) -> float:
        count = min(max(count, 1), units - 1)
        if count not in costs:
            costs[count] = cost(count)
        return costs[count]

    stride = max(1, (units - 1) // _FIRST)
    for count in range(1, units, stride):
        tried(count)
    while True:
        best = min(costs, key=lambda count: (costs[count], count))
        tried(best - stride)
        tried(best + stride)
        if min(costs, key=lambda count: (costs[count], count)) == best:
            if stride == 1:
                return best
            stride = max(1, stride // 2)


def _best(
    name: str,
    job: AheadJob,
    units: int,
    args: argparse.Namespace,
    measured: MeasuredRun,
    lends: bool = False,
) -> Candidate:
    """Returns the best split of the units between trainer and generators.

    lends: whether the trainer lends its units while it waits.
    """

    def at(count: int) -> Candidate:
        ranks = units - count
        layout = Layout(count, ranks, lent=ranks if lends else 0)
        return _simulated(name, job, layout, args, measured)

    return at(best_split(units, lambda count: float(at(count).figures["seconds"])))


def _simulated(
    name: str, job: AheadJob, layout: Layout, args: argparse.Namespace, measured: MeasuredRun
) -> Candidate:
    """Simulates one layout; steps in which the window fills or runs empty do not count."""
    changes = layout.shared or layout.lent
    layout = replace(layout, switch_s=args.switch_s if changes else 0.0, shards=args.shards)
    skip = job.ahead + 1 if job.ahead else 0
    rest = job.age if job.ahead else 0
    steps = simulate_ahead(job, layout, measured, args.steps + skip + rest)
    return Candidate(name, layout, summarize(steps[: len(steps) - rest], skip))


def _synchronous(job: AheadJob) -> AheadJob:
    return replace(job, ahead=0, age=0, waits=True)


def _job(args: argparse.Namespace, measured: MeasuredRun) -> AheadJob:
    """Returns the job of the run, with what the command line changes."""
    settings = {name: measured.controller.get(name) for name in ("ahead", "age", "midway")}
    ahead = args.ahead if args.ahead is not None else int(settings["ahead"] or 1)
    age = args.age if args.age is not None else max(int(settings["age"] or 4), ahead)
    if ahead < 1 or age < ahead:
        raise ConfigError(
            f"ahead {ahead} and age {age} do not fit together.",
            where="--ahead, --age",
            why="generation runs at least one step ahead, and age is at least ahead",
        )
    midway = args.midway or settings["midway"] or "wait"
    return AheadJob(
        prompts=measured.prompts,
        ahead=ahead,
        age=age,
        waits=midway == "wait",
        keeps=midway == "keep",
        profile=_changed(measured.profile, args.profile),
        trainer=measured.trainer,
        push_s=measured.push_s,
        reward_s=measured.reward_s,
    )


def _units(args: argparse.Namespace, measured: MeasuredRun) -> int:
    """Returns how many replicas or ranks fit on the devices."""
    if args.size < 1 or args.steps < 1 or args.shards < 1:
        raise ConfigError("must be at least 1.", where="--size, --steps, --shards")
    devices = args.devices or measured.devices
    if devices // args.size < 2:
        raise ConfigError(
            f"{devices} devices make {devices // args.size} replicas of {args.size}, two units are "
            "needed: one trains, one generates.",
            where="--devices",
            todo="give more devices, or a smaller --size",
        )
    return int(devices // args.size)


def _changed(profile: Profile, text: str) -> Profile:
    """Returns the profile with the terms that a JSON object gives. Raises ConfigError."""
    try:
        return replace(profile, **json.loads(text))
    except (TypeError, ValueError) as error:
        terms = ", ".join(field.name for field in fields(Profile))
        raise ConfigError(
            f"{text!r} is no profile: {error}", where="--profile", why=f"terms: {terms}"
        ) from None


def _print(candidates: Sequence[Candidate], job: AheadJob, size: int) -> None:
    """Prints a table of the candidates, then the best split."""
    head = ["", "trainer", "generators", "steps/min", "step s", "trainer waits", "generators wait"]
    rows = []
    for one in candidates:
        figures = one.figures
        waits = (figures["waited_s"] + figures["drained_s"]) / figures["seconds"]
        rows.append(
            [
                one.name,
                str(one.layout.ranks * size),
                str(one.layout.replicas * size),
                f"{one.steps_a_minute:.3g}",
                f"{figures['seconds']:.3g}",
                f"{waits:.0%}",
                f"{figures['idle_share']:.0%}",
                f"{figures['age_mean']:.2f}",
                str(figures["age_largest"]),
            ]
        )
    print(f"{job.prompts} groups a step, devices in units of {size}")
    print_table([*head, "mean age", "largest"], rows)
    shared, _, ahead, *lent = candidates
    gain = ahead.steps_a_minute / shared.steps_a_minute
    print(
        f"\nbest split: {ahead.layout.ranks * size} devices train, "
        f"{ahead.layout.replicas * size} generate; "
        f"{gain:.2f} times as fast as all devices in turns."
    )
    for one in lent:
        share = one.figures["lent_s"] / one.figures["seconds"]
        print(
            f"lending: {one.layout.ranks * size} train, {one.layout.replicas * size} "
            f"generate, lent {share:.0%} of the time; "
            f"{one.steps_a_minute / ahead.steps_a_minute:.2f} times as fast as without."
        )


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="g-core simulate --async",
        description="Simulates training with generation that runs ahead, on the trace of a run.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--trace", type=Path, metavar="RUN", required=True, help="the directory of a run"
    )
    parser.add_argument("--devices", type=int, help="in all (those of the run)")
    parser.add_argument(
        "--size", type=int, help="devices of a replica and of a rank (of a replica of the run)"
    )
    parser.add_argument("--ahead", type=int, help="steps of lead (of the run, or 1)")
    parser.add_argument("--age", type=int, help="bound of the age (of the run, or 4)")
    parser.add_argument(
        "--midway", choices=("wait", "recompute", "keep"), help="(of the run, or wait)"
    )
    parser.add_argument("--steps", type=int, default=12, help="that count (12)")
    parser.add_argument("--shards", type=int, default=1, help="controllers (1)")
    parser.add_argument(
        "--switch-s",
        type=float,
        default=0.0,
        help="seconds to change the use of shared or lent devices and back (0)",
    )
    parser.add_argument(
        "--lend",
        choices=get_args(GiveBack),
        help="also try to lend the trainer's devices to generators while it waits, which no run "
        "does yet; what becomes of samples that are not ended then",
    )
    parser.add_argument(
        "--profile", default="{}", metavar="JSON", help="terms of the engine, instead of the fit"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
