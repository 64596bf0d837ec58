"""Measures asynchronous programs on 64 emulated devices, where answers have a heavy tail.

    python benchmarks/asynchronous_emulated.py [--seeds 0 1 2] [--json] [--check]

A device is one of four that make an emulated engine or a rank of the trainer (the plugin ``sim``),
so the 64 are 16 units. Everything else is real: processes, controllers, sockets, store and pushes,
at ``SCALE`` of the emulated time. Answers have a median of 1,500 tokens, a sigma of 1.4 and at most
65,536; half of the variance is the prompt's. A step trains on 64 groups of 8. An engine takes 12 ms
and 0.03 ms a sequence for a token; training takes 120 s on all units, and a push 5 s. Co-location
changes roles for nothing.

The simulator of ``g-core simulate --async`` tries all splits and paces of each program, and the
best ones run, over several seeds, in turns.

emulated_speedup_heavy_tail            seconds a step of synchronous co-location over those of
                                       (ahead, age) = (1, 4), each at its best split
speedup_over_windowed_fifo_at_equal_age
                                       seconds a step of the rival (windowed_fifo.py) over ours. No
                                       record is older than 4 versions; ``ahead``, window, refill
                                       and split are each side's best.
simulator_error_max                    largest |simulated / ran - 1| of a program's seconds a step,
                                       over all seeds together
controller_us_per_record_over_sync     processor time of all controllers for a record, (1, 4) over
                                       synchronous
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import windowed_fifo
from gcore_placement.sim.ahead import (
    AheadJob,
    AheadStep,
    GroupLengths,
    Layout,
    TrainerPace,
    simulate_ahead,
)
from gcore_placement.sim.config import Drift, EngineProfile, PromptsConfig
from gcore_placement.sim.prompts import AnswerLengths, SimPrompts
from report import Claim, add_options, publish, repeated

from gcore_core.contract.order import row_of, sample_seed
from gcore_core.contract.run_files import read_metrics
from gcore_core.controllers.generation import Ahead

UNITS = 16
PROMPTS = 64
SAMPLES = 8
AGE = 4
SHARDS = 2
ROWS = 16_384
PROMPT_TOKENS = 100
SCALE = 0.015
PUSH_S = 5.0
TRAIN_ALL_S = 120.0
RECORD_S = TRAIN_ALL_S * UNITS / (PROMPTS * SAMPLES)
PROFILE = EngineProfile(cached_s=0.0, cache_tokens=10**9)
#: Engines of the splits that are tried.
SPLITS = range(3, 9)


@dataclass(frozen=True)
class Span:
    """Says which steps of a run count.

    steps: of the run.
    first: steps that are left out at its beginning, while the queue fills.
    last: steps that are left out at its end: nothing new is begun, and they wait for the slowest.
    """

    steps: int
    first: int
    last: int

    def mean(self, seconds: Sequence[float]) -> float:
        """Returns the mean over the steps that count."""
        return statistics.mean(seconds[self.first : self.steps - self.last])


SYNC = Span(8, 1, 0)
AHEAD = Span(18, 6, AGE)


@dataclass(frozen=True)
class Program:
    """One way to run the job.

    name: of the way.
    replicas: engines; the other units train, or all do where it is synchronous.
    ahead: steps that generation may run ahead; 0: synchronous and co-located.
    window, refill: of the rival; 0: it is ours.
    """

    name: str
    replicas: int
    ahead: int
    window: int = 0
    refill: windowed_fifo.Refill = "taken"

    @property
    def layout(self) -> Layout:
        """The units of trainer and engines."""
        if not self.ahead:
            return Layout(UNITS, UNITS, shared=True, shards=SHARDS)
        return Layout(self.replicas, UNITS - self.replicas, shards=SHARDS)

    def controller(self) -> dict[str, Any]:
        """Returns the section ``controller`` of its job."""
        common = {"prompts": PROMPTS, "minibatches": 1}
        if not self.ahead:
            return {"use": "core/sync", "shards": SHARDS, "config": common}
        pace = {"ahead": self.ahead, "age": AGE, "midway": "recompute"}
        if not self.window:
            return {"use": "async", "shards": SHARDS, "config": common | pace}
        rule = {"window": self.window, "refill": self.refill}
        return {"use": "windowed_fifo", "shards": SHARDS, "config": common | pace | rule}

    def simulated(self, seed: int, span: Span) -> list[AheadStep]:
        """Returns what the simulator says of its steps that count."""
        job = AheadJob(
            prompts=PROMPTS,
            ahead=self.ahead,
            age=AGE if self.ahead else 0,
            waits=not self.ahead,
            profile=PROFILE,
            trainer=TrainerPace(record_s=RECORD_S),
            push_s=PUSH_S,
        )
        rule: Any = Ahead
        if self.window:
            fifo = windowed_fifo.WindowedFifo
            rule = partial(fifo, window=self.window, refill=self.refill)
        steps = simulate_ahead(job, self.layout, Lengths(seed), span.steps, rule)
        return steps[span.first : span.steps - span.last]

    def simulated_s(self, seed: int, span: Span) -> float:
        """Returns the mean seconds of these steps."""
        return statistics.mean(step.seconds for step in self.simulated(seed, span))


# -- the workload ----------------------------------------------------------------------------------


def prompts(seed: int) -> dict[str, Any]:
    """Returns settings of ``sim/prompts``; nothing drifts."""
    drift = {
        "ordinals": 1,
        "answer": [1500.0, 1500.0],
        "answer_sigma": 1.4,
        "answer_limit": 65_536,
        "keep": [1.0, 1.0],
        "seed": seed,
    }
    return {"rows": ROWS, "prompt_tokens": [PROMPT_TOKENS], "drift": drift, "seed": seed}


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run's own answers, as its engines draw them."""

    seed: int

    def group(self, ordinal: int) -> GroupLengths:
        """Returns a group's lengths; see ``AnswerSource``."""
        return _lengths(self.seed, ordinal)


@cache
def _dataset(seed: int) -> SimPrompts:
    settings = prompts(seed)
    return SimPrompts(PromptsConfig(**{**settings, "drift": Drift(**settings["drift"])}))


@cache
def _lengths(seed: int, ordinal: int) -> GroupLengths:
    epoch, row = row_of(ordinal, ROWS, seed)
    fields = _dataset(seed)[row].fields
    lengths = AnswerLengths(fields["answer_median"], fields["answer_sigma"], fields["answer_limit"])
    drawn = [lengths.draw(sample_seed(seed, ordinal, epoch, i)) for i in range(SAMPLES)]
    return GroupLengths(PROMPT_TOKENS, [min(tokens, lengths.limit) for tokens in drawn])


# -- which ones run --------------------------------------------------------------------------------


def rivals() -> Iterator[Program]:
    """Yields the rival's ways that keep the bound of the age."""
    for ahead in range(1, AGE + 1):
        for width in range(ahead + 1):
            window = min(width * PROMPTS + 1, (ahead + 1) * PROMPTS)
            for refill in ("taken", "pushed"):
                if windowed_fifo.oldest(ahead, window, refill, PROMPTS) <= AGE:
                    for replicas in SPLITS:
                        yield Program("fifo", replicas, ahead, window, refill)


def fastest(programs: Sequence[Program], seed: int, span: Span) -> Program:
    """Returns the program that the simulator says is the fastest."""
    return min(programs, key=lambda one: one.simulated_s(seed, span))


def chosen(seed: int, span: Span) -> list[Program]:
    """Returns the ways that run: synchronous, (1, 4), ours at its best pace, and the rival's."""
    ours = [Program("ours", n, ahead) for ahead in range(1, AGE + 1) for n in SPLITS]
    first = fastest([one for one in ours if one.ahead == 1], seed, span)
    return [
        Program("sync", UNITS, 0),
        Program("ahead_1", first.replicas, 1),
        fastest(ours, seed, span),
        fastest(list(rivals()), seed, span),
    ]


# -- the runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What a run took.

    step_s: mean seconds of a step, of the emulated cluster.
    us: processor microseconds of all controllers for a record.
    age: the mean age of a record.
    oldest: the largest.
    """

    step_s: float
    us: float
    age: float
    oldest: float


def job(program: Program, seed: int, steps: int, scale: float) -> dict[str, Any]:
    """Returns the job of a run. scale: factor of all emulated times."""
    layout = program.layout
    profile = {name: getattr(PROFILE, name) for name in PROFILE.__dataclass_fields__}
    trainer = {"record_s": RECORD_S, "token_s": 0.0, "token2_s": 0.0}
    trainer |= {"prepare_share": 0.0, "update_s": 0.0, "time_scale": scale}
    judge = {"replicas": 10**9, "time_scale": 0.0}  # free on virtual time, too
    engine = {"profile": profile, "weights_gb": 1.0, "push_s_per_gb": PUSH_S}
    engine |= {"sleep_s": 0.0, "wake_s": 0.0, "time_scale": scale}
    return {
        "run": {"name": "emulated", "steps": steps, "seed": seed},
        "launcher": {"use": "sim/crowd", "config": {"processes": 2}},
        "cluster": {"devices": layout.units},
        "controller": program.controller(),
        "data": {"use": "sim/prompts", "config": prompts(seed)},
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": SAMPLES}},
        "objective": {"use": "algorithms/ppo_clip", "config": {"old_logprobs": "rollout"}},
        "roles": {
            "policy": {"use": "sim", "slots": layout.ranks, "config": trainer},
            "rollout": {"use": "sim", "slots": layout.replicas, "config": engine},
        },
        "rewards": {"judged": {"use": "sim/judge", "config": judge}},
        "local": [windowed_fifo.__file__] if program.window else [],
    }


def run(program: Program, seed: int, span: Span, args: argparse.Namespace) -> Ran:
    """Runs a program in real processes. Raises RuntimeError with its output when it fails."""
    virtual = args.virtual
    scale = 1.0 if virtual else args.scale
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        file = Path(folder) / "job.yaml"
        file.write_text(json.dumps(job(program, seed, span.steps, scale)))
        verb = ["sim", "run"] if virtual else ["run"]
        command = [sys.executable, "-m", "gcore_core", *verb, str(file), f"run.dir={folder}/run"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, capture_output=True, text=True, env=environment)
        if process.returncode:
            raise RuntimeError(f"{process.stdout[-2000:]}{process.stderr[-4000:]}")
        rows = [row["metrics"] for row in read_metrics(Path(folder) / "run")]
    if len(rows) != span.steps + 1:
        raise RuntimeError(f"{program}: {len(rows) - 1} steps instead of {span.steps}")
    end = span.steps - span.last
    records = (end - span.first) * PROMPTS * SAMPLES
    return Ran(
        step_s=span.mean([row["seconds/step"] for row in rows[1:]]) / scale,
        us=(_controllers_s(rows[end]) - _controllers_s(rows[span.first])) / records * 1e6,
        age=span.mean([row.get("age/mean", 0.0) for row in rows[1:]]),
        oldest=max(row.get("age/largest", 0.0) for row in rows[1:]),
    )


def _controllers_s(row: dict[str, float]) -> float:
    """Returns the processor seconds of all controllers so far."""
    return sum(value for name, value in row.items() if name.startswith("cpu_seconds/controller."))


# -- the part --------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns what the runs say."""
    short = args.steps
    ahead = Span(short, 1, 1) if short else AHEAD
    programs = chosen(args.seeds[0], ahead)
    rounds: list[list[Ran]] = []
    simulated: list[list[float]] = []
    for seed in args.seeds:
        ran = []
        expected = []
        for program in programs:
            span = ahead if program.ahead or short else SYNC
            ran.append(run(program, seed, span, args))
            expected.append(program.simulated_s(seed, span))
            load = os.getloadavg()[0]
            told = f"{ran[-1].step_s:.1f} s a step, simulated {expected[-1]:.1f}"
            told += f", {ran[-1].us:.0f} us a record, oldest {ran[-1].oldest:.0f}"
            print(f"seed {seed}: {program}: {told}, load {load:.1f}", file=sys.stderr, flush=True)
        rounds.append(ran)
        simulated.append(expected)
    return [*_claims(rounds, simulated), *_facts(programs, rounds, simulated)]


def _claims(rounds: list[list[Ran]], simulated: list[list[float]]) -> list[Claim]:
    """Returns the claims that have bars."""

    def ratio(first: int, second: int, what: str) -> Any:
        return lambda some: statistics.median(
            getattr(ran[first], what) / getattr(ran[second], what) for ran in some
        )

    errors = [abs(error) for error in _errors(rounds, simulated)]
    costs = [] if any(one.us == 0 for ran in rounds for one in ran) else rounds
    return [
        repeated("emulated_speedup_heavy_tail", rounds, ratio(0, 1, "step_s"), "times", 3.0),
        repeated(
            "speedup_over_windowed_fifo_at_equal_age",
            rounds,
            ratio(3, 2, "step_s"),
            "times",
            1.0,
        ),
        Claim("simulator_error_max", max(errors), "of a step", 0.10, "<="),
        # On virtual time controllers have no process of their own.
        *(
            [
                repeated(
                    "controller_us_per_record_over_sync",
                    costs,
                    ratio(1, 0, "us"),
                    "times",
                    1.3,
                    "<=",
                )
            ]
            if costs
            else []
        ),
    ]


def _errors(rounds: list[list[Ran]], simulated: list[list[float]]) -> list[float]:
    """Returns simulated / ran - 1 of each program, over all seeds."""
    expected_s = [statistics.mean(column) for column in zip(*simulated, strict=True)]
    ran_s = [statistics.mean(ran.step_s for ran in column) for column in zip(*rounds, strict=True)]
    return [expected / ran - 1 for expected, ran in zip(expected_s, ran_s, strict=True)]


def _facts(
    programs: list[Program],
    rounds: list[list[Ran]],
    simulated: list[list[float]],
) -> list[Claim]:
    """Returns what each program was, and what it took, without bars."""
    claims = []
    names = ("sync", "ahead_1", "ours", "fifo")
    for at, (name, program) in enumerate(zip(names, programs, strict=True)):
        ran = [one[at] for one in rounds]
        claims += [
            repeated(
                f"{name}_step_s",
                ran,
                lambda some: statistics.mean(one.step_s for one in some),
                "emulated s",
            ),
            Claim(f"{name}_simulated_step_s", statistics.mean(s[at] for s in simulated), "s"),
            Claim(f"{name}_engines", program.layout.replicas, f"of {UNITS} units"),
            Claim(f"{name}_ahead", program.ahead, "steps"),
            Claim(f"{name}_age_largest", max(one.oldest for one in ran), "versions"),
            Claim(f"{name}_age_mean", statistics.median(r.age for r in ran), "versions"),
            Claim(f"{name}_controller_us_per_record", statistics.median(r.us for r in ran), "us"),
        ]
    oldest = max(one.oldest for ran in rounds for one in ran)
    if oldest > AGE or not math.isfinite(oldest):
        raise RuntimeError(f"a record is {oldest:g} versions old, more than {AGE}")
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="of a run; 0: its own")
    parser.add_argument("--scale", type=float, default=SCALE)
    parser.add_argument("--virtual", action="store_true", help="on virtual time")
    add_options(parser)
    args = parser.parse_args()
    packages = ("gcore-core", "gcore-async", "gcore-placement")
    return publish("asynchronous_emulated", measure(args), args, packages)


if __name__ == "__main__":
    sys.exit(main())
