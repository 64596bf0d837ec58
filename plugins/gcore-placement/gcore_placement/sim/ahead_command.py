"""Runs ``g-core simulate --async``: what generation that runs ahead would make of a run's job.

It tries splits of the devices between trainer, generators and judges, and prints the best one.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.errors import ConfigError
from gcore_core.kits.commands import print_table
from gcore_placement.sim.ahead import AheadJob, Layout, simulate_ahead, summarize
from gcore_placement.sim.ahead_trace import MeasuredRun, measured_run

#: Number of parties -> how many parts the devices are cut into for the splits that are tried at
#: first; then come those between the best one and its neighbours.
_FIRST = {2: 16, 3: 6}
_FIRST_OF_MORE = 4

_EXAMPLE = """\
example:
  g-core simulate --async --trace runs/judged/001 --devices 64 --size 4 --ahead 1 --age 4

Lengths of answers and verdicts, the speed of engines, and the seconds of training, push and rewards
are those of the run. Training is taken to be proportional to the tokens of a rank.
"""


@dataclass(frozen=True)
class Candidate:
    """One way to run the job, with what the simulation says of it.

    name: shown to the user.
    layout: how the units of devices are used.
    figures: see ``summarize``.
    judges: role of a judge -> its devices.
    """

    name: str
    layout: Layout
    figures: dict[str, Any]
    judges: dict[str, int]

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
        _best("shared, in turns", _synchronous(job), units, args, measured, shares=True),
        _best("split, synchronous", _synchronous(job), units, args, measured),
        _best(f"split, ahead {job.ahead}, age {job.age}", job, units, args, measured),
    ]
    if args.json:
        found = [
            {
                "name": one.name,
                "trainer": one.layout.ranks * args.size,
                "generators": one.layout.replicas * args.size,
                "judges": one.judges,
                "steps_a_minute": one.steps_a_minute,
                **one.figures,
            }
            for one in candidates
        ]
        print(json.dumps({"job": asdict(job), "candidates": found}, indent=2))
    else:
        _print(candidates, job, args.size)
    return 0


def best_split(
    units: int, least: Sequence[int], cost: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """Returns how many of the units each party has where ``cost`` is least.

    It tries a coarse grid, then moves units between any two parties, as long as that helps; then
    fewer units, down to one. Where the cost has valleys narrower than the grid, or is level around
    a split, it may find one that is not the best.

    least: the fewest units of each party; together at most ``units``.
    cost: takes the units of each party.
    """
    costs: dict[tuple[int, ...], float] = {}

    def best() -> tuple[int, ...]:
        return min(costs, key=lambda counts: (costs[counts], counts))

    def try_split(counts: tuple[int, ...]) -> None:
        if counts not in costs:
            costs[counts] = cost(counts)

    stride = max(1, (units - sum(least)) // _FIRST.get(len(least), _FIRST_OF_MORE))
    for counts in _grid(units, least, stride):
        try_split(counts)
    while True:
        found = best()
        for giver, taker in itertools.permutations(range(len(least)), 2):
            moved = list(found)
            amount = min(stride, moved[giver] - least[giver])
            moved[giver] -= amount
            moved[taker] += amount
            try_split(tuple(moved))
        if best() == found:
            if stride == 1:
                return found
            stride = max(1, stride // 2)


def _grid(units: int, least: Sequence[int], stride: int) -> Iterator[tuple[int, ...]]:
    """Yields splits in which each party but the last has a multiple of ``stride`` above its least.

    The last one has the rest, at least its own.
    """
    ranges = [range(count, units + 1, stride) for count in least[:-1]]
    for first in itertools.product(*ranges):
        rest = units - sum(first)
        if rest >= least[-1]:
            yield (*first, rest)


def _best(
    name: str,
    job: AheadJob,
    units: int,
    args: argparse.Namespace,
    measured: MeasuredRun,
    *,
    shares: bool = False,
) -> Candidate:
    """Returns the best split of the units between generators, judges and trainer, in this order.

    shares: whether the trainer has all units, in turns with the others, which split them.
    """
    of_judges = _least_units(args, measured)

    def at(counts: tuple[int, ...]) -> Candidate:
        # Generators come first, then each judge. The trainer is last, unless it has all units.
        generators, *rest = counts
        ranks = units if shares else rest.pop()
        devices = {role: count * args.size for role, count in zip(of_judges, rest, strict=True)}
        replicas = {role: count // measured.judges[role].size for role, count in devices.items()}
        layout = Layout(generators, ranks, shared=shares, judges=replicas)
        return _simulated(name, job, layout, args, measured, devices)

    least = [1, *of_judges.values(), *([] if shares else [1])]
    return at(best_split(units, least, lambda counts: float(at(counts).figures["seconds"])))


def _least_units(args: argparse.Namespace, measured: MeasuredRun) -> dict[str, int]:
    """Returns role of a judge -> the units that one of its replicas needs."""
    return {role: -(-judge.size // args.size) for role, judge in sorted(measured.judges.items())}


def _simulated(
    name: str,
    job: AheadJob,
    layout: Layout,
    args: argparse.Namespace,
    measured: MeasuredRun,
    judges: dict[str, int],
) -> Candidate:
    """Simulates one layout; steps in which the window fills or runs empty do not count.

    judges: role of a judge -> its devices.
    """
    layout = replace(layout, switch_s=args.switch_s if layout.shared else 0.0, shards=args.shards)
    skip = job.ahead + 1 if job.ahead else 0
    rest = job.age if job.ahead else 0
    steps = simulate_ahead(job, layout, measured, args.steps + skip + rest)
    return Candidate(name, layout, summarize(steps[: len(steps) - rest], skip), judges)


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
        profile=_changed(measured.profile, args.profile),
        trainer=measured.trainer,
        push_s=measured.push_s,
        reward_s=measured.reward_s,
        judges={role: judge.profile for role, judge in measured.judges.items()},
        asks_groups=measured.asks_groups,
    )


def _units(args: argparse.Namespace, measured: MeasuredRun) -> int:
    """Returns how many replicas or ranks fit on the devices. Raises ConfigError for too few."""
    if args.size < 1 or args.steps < 1 or args.shards < 1:
        raise ConfigError("must be at least 1.", where="--size, --steps, --shards")
    devices = args.devices or measured.devices
    units = int(devices // args.size)
    # One unit trains, one generates, and each judge needs those of a replica.
    judges = _least_units(args, measured)
    least = 2 + sum(judges.values())
    if units < least:
        of_judges = "".join(f", {count} for {role!r}" for role, count in judges.items())
        raise ConfigError(
            f"{devices} devices hold {units} of the units of {args.size}, {least} are needed: one "
            f"trains, one generates{of_judges}.",
            where="--devices",
            todo="give more devices, or a smaller --size",
        )
    return units


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
    roles = sorted(job.judges)
    head = ["", "trainer", "generators", *roles, "steps/min", "step s"]
    head += ["trainer waits", "generators wait", *(["judges wait"] if roles else [])]
    rows = []
    for one in candidates:
        figures = one.figures
        waits = (figures["waited_s"] + figures["drained_s"]) / figures["seconds"]
        rows.append(
            [
                one.name,
                str(one.layout.ranks * size),
                str(one.layout.replicas * size),
                *(str(one.judges[role]) for role in roles),
                f"{one.steps_a_minute:.3g}",
                f"{figures['seconds']:.3g}",
                f"{waits:.0%}",
                f"{figures['idle_share']:.0%}",
                *([f"{figures['judges_idle_share']:.0%}"] if roles else []),
                f"{figures['age_mean']:.2f}",
                str(figures["age_largest"]),
            ]
        )
    print(f"{job.prompts} groups a step, devices in units of {size}")
    print_table([*head, "mean age", "largest"], rows)
    shared, _, ahead = candidates
    gain = ahead.steps_a_minute / shared.steps_a_minute
    print(f"\nbest split: {_split(ahead, size)}; {gain:.2f} times as fast as all devices in turns.")


def _split(one: Candidate, size: int) -> str:
    """Returns a split in words."""
    judges = "".join(f", {devices} serve {role}" for role, devices in sorted(one.judges.items()))
    return f"{one.layout.ranks * size} devices train, {one.layout.replicas * size} generate{judges}"


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
    parser.add_argument("--midway", choices=("wait", "recompute"), help="(of the run, or wait)")
    parser.add_argument("--steps", type=int, default=12, help="that count (12)")
    parser.add_argument("--shards", type=int, default=1, help="controllers (1)")
    parser.add_argument(
        "--switch-s",
        type=float,
        default=0.0,
        help="seconds to change the use of shared devices and back (0)",
    )
    parser.add_argument(
        "--profile",
        default="{}",
        metavar="JSON",
        help="terms of the generators' engine, instead of the fit; judges keep theirs",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
