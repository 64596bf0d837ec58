"""Measures how fast a student learns from a teacher, against reinforcement learning without one.

The task is the quickstart's. For each seed a model is taught; GRPO trains it by the recipe, and
what it leaves is the teacher. The same taught model then learns from that teacher alone, on its own
samples (teacher/jsd over the teacher's likeliest tokens), without a reward. The reward ``exact``
only scores held-out problems. Both are evaluated every two steps on the same problems.

distilled_accuracy_min   greedy held-out accuracy after the student's last step, worst seed
distillation_steps_over_grpo   steps until the greedy accuracy is 0.9, over GRPO's, both summed
    over the seeds
distillation_sampled_steps_over_grpo   the same of answers sampled at the training temperature
distillation_teacher_accuracy_min   greedy accuracy of the teacher, worst seed

The student's learning rate is its own, four times GRPO's: at that rate GRPO unlearns everything, as
the recipe says, and a teacher's numbers have less noise than rewards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart_runs import RECIPE, finished_rows, overrides_of, require_success, start
from report import Claim, repeated

GOAL = 0.9
EVERY = 2  # steps between two evaluations
#: Of both runs: everything in one process, which gives the same weights.
PLAIN = (
    "plugins=[]",
    "launcher.use=core/inline",
    "controller.shards=1",
    f"evaluation.every={EVERY}",
    "evaluation.show=0",
)
STUDENT = (
    "advantage.use=teacher/no-reward",
    "objective.use=teacher/jsd",
    "objective.config.beta=0.0",
    "objective.config.normalise=sequence",
    "roles.policy.config.learning_rate=1e-3",
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Held-out accuracy of one run by step, of greedy and of sampled answers."""

    greedy: dict[int, float]
    sampled: dict[int, float]

    @property
    def last(self) -> float:
        """The greedy accuracy after the last step."""
        return self.greedy[max(self.greedy)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distilled")
    group.add_argument("--distilled-grpo-steps", type=int, default=120)
    group.add_argument("--distilled-steps", type=int, default=40)
    group.add_argument("--distilled-top-k", type=int, default=8)
    group.add_argument(
        "--distilled-teaching-steps", type=int, help="of the starting model; else the recipe's"
    )


def measure(args: argparse.Namespace) -> Sequence[Claim]:
    with tempfile.TemporaryDirectory(prefix="roles-distilled-") as name:
        pairs = [_pair(args, seed, Path(name)) for seed in args.seeds]
    return [
        Claim("distilled_accuracy_min", min(s.last for _, s in pairs), "share", bar=GOAL),
        _steps_claim("distillation_steps_over_grpo", pairs, "greedy", bar=0.5),
        _steps_claim("distillation_sampled_steps_over_grpo", pairs, "sampled", bar=None),
        Claim("distillation_teacher_accuracy_min", min(t.last for t, _ in pairs), "share"),
    ]


def _pair(args: argparse.Namespace, seed: int, folder: Path) -> tuple[Curve, Curve]:
    """Returns the curves of the teacher and of its student, of one seed."""
    teacher = folder / f"grpo-{seed}"
    student = folder / f"student-{seed}"
    common = [*PLAIN]
    if args.distilled_teaching_steps is not None:
        common.append(f"roles.policy.model.make.config.steps={args.distilled_teaching_steps}")
    grpo = _run(seed, teacher, args.distilled_grpo_steps, common, folder)
    role = f"{{use: teacher, model: {{path: {teacher / 'weights'}}}, "
    role += f"config: {{top_k: {args.distilled_top_k}}}}}"
    overrides = [*common, *STUDENT, f"roles.teacher={role}"]
    return grpo, _run(seed, student, args.distilled_steps, overrides, folder)


def _run(seed: int, directory: Path, steps: int, overrides: Sequence[str], folder: Path) -> Curve:
    """Runs the recipe in a process of its own; returns its curve."""
    words = ["run", str(RECIPE), *overrides_of(seed, directory), f"run.steps={steps}", *overrides]
    log = folder / f"{directory.name}.log"
    require_success(start(words, folder, log), words, log)
    curve = _curve(finished_rows(directory, steps))
    accuracies = ", ".join(f"{step}: {value:.2f}" for step, value in curve.greedy.items())
    print(f"{directory.name}, greedy accuracy by step: {accuracies}", file=sys.stderr)
    return curve


def _curve(rows: Sequence[dict[str, Any]]) -> Curve:
    evaluated = {row["step"]: row["evaluation"] for row in rows if row.get("evaluation")}
    return Curve(
        greedy={step: held_out["greedy/exact"] for step, held_out in evaluated.items()},
        sampled={step: held_out["sampled/exact"] for step, held_out in evaluated.items()},
    )


def steps_to(accuracy: dict[int, float], goal: float) -> int:
    """Returns the first evaluated step with the goal, at least 1; one more than the last if none.

    accuracy: by step.
    """
    reached = [step for step, value in sorted(accuracy.items()) if value >= goal]
    return max(1, reached[0]) if reached else max(accuracy) + 1


def _steps_claim(
    name: str, pairs: Sequence[tuple[Curve, Curve]], kind: str, bar: float | None
) -> Claim:
    rounds = [
        (steps_to(getattr(student, kind), GOAL), steps_to(getattr(teacher, kind), GOAL))
        for teacher, student in pairs
    ]

    def ratio(chosen: Sequence[tuple[int, int]]) -> float:
        return sum(student for student, _ in chosen) / sum(teacher for _, teacher in chosen)

    return repeated(name, rounds, ratio, "x", bar, "<=")
