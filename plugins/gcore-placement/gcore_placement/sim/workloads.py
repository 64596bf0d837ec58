"""Defines what a simulated cluster samples: published parameter sets, or lengths of a recorded run.

All lengths are in tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from gcore_core.contract.errors import DataError
from gcore_core.contract.run_files import RecordTrace, read_trace
from gcore_placement.queueing.step import Groups

#: Tokens of a prompt.
PROMPT = 512.0
#: Tokens of a judge's instructions; published sets count the prompt among them.
INSTRUCTIONS = 1024.0
_CORRELATION = 0.5  # of the log-lengths of one prompt's answers


_KEPT = {"trained", "surplus"}  # verdicts of groups that teach


class Workload(Protocol):
    """Makes the groups of simulated steps."""

    def groups(self, step: int, count: int, seed: int) -> Groups:
        """Returns ``count`` groups of a step, in the order of their ordinals.

        The same arguments give the same groups.
        """


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A log-normal distribution of lengths in tokens; what is longer than the limit is cut off.

    median: the median length.
    sigma: the standard deviation of the length's logarithm.
    limit: the longest length.
    """

    median: float
    sigma: float
    limit: float

    def draw(self, normal: np.ndarray) -> np.ndarray:
        """Turns standard-normal draws into lengths of the same shape: whole numbers as floats."""
        return np.ceil(np.minimum(self.median * np.exp(self.sigma * normal), self.limit))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The distributions of one step.

    policy: lengths of answers.
    judge: lengths of verdicts.
    keep: share of groups that teach, so that the filter keeps them.
    harder: how many log-odds less likely a group is kept for each unit of its prompt's
        standard-normal draw of length; 0: whether it is kept does not depend on its lengths.
    """

    policy: Lengths = field(default_factory=lambda: Lengths(median=2500, sigma=1.0, limit=16384))
    judge: Lengths = field(default_factory=lambda: Lengths(median=600, sigma=0.5, limit=4096))
    keep: float = 0.5
    harder: float = 0.0


def _steady(step: int, steps: int) -> Shape:
    """Keeps the default distributions in every step."""
    return Shape()


def _judge_heavy(step: int, steps: int) -> Shape:
    """Has short answers and long verdicts in every step."""
    policy = Lengths(median=1200, sigma=1.0, limit=16384)
    return Shape(policy=policy, judge=Lengths(median=1800, sigma=0.5, limit=8192))


def _bursty(step: int, steps: int) -> Shape:
    """Changes the mixture of prompts every four steps."""
    policy, judge, keep = [(2500, 600, 0.5), (900, 1600, 0.7), (6000, 400, 0.35)][step // 4 % 3]
    return Shape(
        policy=Lengths(median=policy, sigma=1.0, limit=32768),
        judge=Lengths(median=judge, sigma=0.5, limit=4096),
        keep=keep,
    )


def _drift(step: int, steps: int) -> Shape:
    """Answers grow tenfold in a run, verdicts threefold, and fewer groups teach."""
    x = step / max(1, steps - 1)
    return Shape(
        policy=Lengths(median=800 * 10**x, sigma=1.0, limit=16384 if x < 0.5 else 32768),
        judge=Lengths(median=400 * 3**x, sigma=0.5, limit=4096),
        keep=0.7 - 0.4 * x,
    )


def _hard_drift(step: int, steps: int) -> Shape:
    """Is ``_drift``, but keeps fewer of the groups with long answers."""
    shape = _drift(step, steps)
    return Shape(policy=shape.policy, judge=shape.judge, keep=shape.keep, harder=1.0)


PUBLISHED = {
    "steady": _steady,
    "bursty": _bursty,
    "drift": _drift,
    "judge-heavy": _judge_heavy,
    "hard-drift": _hard_drift,
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """The groups of a published parameter set.

    name: a key of PUBLISHED.
    steps: steps of the whole run, over which the set changes.
    samples: answers of a group.
    """

    name: str
    steps: int
    samples: int = 16

    def groups(self, step: int, count: int, seed: int) -> Groups:
        """Returns groups drawn from the set's distributions in this step; see
        ``Workload.groups``.
        """
        shape = PUBLISHED[self.name](step, self.steps)
        random = np.random.default_rng([seed, step])
        # A log-length is a sum of the prompt's draw and the answer's own, so two answers to one
        # prompt correlate by _CORRELATION and each still has variance 1.
        prompt_draws = random.standard_normal((count, 1))
        answer_draws = random.standard_normal((count, self.samples))
        policy = shape.policy.draw(
            math.sqrt(_CORRELATION) * prompt_draws + math.sqrt(1 - _CORRELATION) * answer_draws
        )
        judge = shape.judge.draw(random.standard_normal((count, self.samples)))
        odds = math.log(shape.keep / (1 - shape.keep)) - shape.harder * prompt_draws[:, 0]
        return Groups(
            policy=policy,
            judge=judge,
            policy_prompt=np.full(policy.shape, PROMPT),
            judge_prompt=INSTRUCTIONS + policy,
            kept=random.random(count) < 1 / (1 + np.exp(-odds)),
        )


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The groups of a run, step by step, and from the first step again when it is over.

    When a step needs more groups than it had, the rest are drawn from its own with replacement.

    recorded: the groups of each step. NaN in `judge`: scored, but the trace has no verdict.
    needed: groups that a step trained, on average.
    judge: lengths of the verdicts that the trace does not have.
    judges: roles that judged in the run; their verdicts on a record are one here.
    """

    recorded: Sequence[Groups]
    needed: int
    judge: Lengths
    judges: frozenset[str] = frozenset()

    def groups(self, step: int, count: int, seed: int) -> Groups:
        """Returns the groups of a recorded step; see ``Workload.groups``."""
        groups = self.recorded[step % len(self.recorded)]
        random = np.random.default_rng([seed, step])
        which = np.arange(len(groups))
        if count > len(groups):
            which = np.concatenate([which, random.integers(0, len(groups), count - len(groups))])
        step_groups = groups.take(which[:count])
        verdicts = self.judge.draw(random.standard_normal(step_groups.policy.shape))
        unknown = np.isnan(step_groups.judge)
        return replace(
            step_groups,
            judge=np.where(unknown, verdicts, step_groups.judge),
            judge_prompt=np.where(
                unknown,
                INSTRUCTIONS + step_groups.policy_prompt + step_groups.policy,
                step_groups.judge_prompt,
            ),
        )


def recorded(directory: Path, judge: Lengths) -> Recorded:
    """Reads the groups in a run's trace.

    Raises DataError where the run has no trained group.

    directory: the run's directory.
    judge: lengths of the verdicts that the trace does not have.
    """
    steps: dict[int, dict[int, list[RecordTrace]]] = defaultdict(lambda: defaultdict(list))
    for line in read_trace(directory):
        if isinstance(line, RecordTrace) and line.verdict in _KEPT | {"filtered"}:
            steps[line.step][line.ordinal].append(line)
    trained = [
        sum(group[0].verdict == "trained" for group in groups.values()) for groups in steps.values()
    ]
    if not any(trained):
        raise DataError(
            "no group of the run was trained.",
            where=str(directory),
            why="a simulation needs the lengths of at least one step",
            todo="give the directory of a run that has finished a step",
        )
    step_tables = [
        _table([step_groups[ordinal] for ordinal in sorted(step_groups)])
        for _, step_groups in sorted(steps.items())
    ]
    records = (record for groups in steps.values() for group in groups.values() for record in group)
    return Recorded(
        recorded=step_tables,
        needed=max(1, round(float(np.mean(trained)))),
        judge=judge,
        judges=frozenset(answer.role for record in records for answer in record.asked),
    )


def _table(groups: Sequence[Sequence[RecordTrace]]) -> Groups:
    """Returns a step's records as columns, each float64[groups, longest group].

    Verdicts of several judges on a record are added up, NaN where they are not known. Shorter
    groups are filled up with zeros.
    """
    shape = len(groups), max(map(len, groups))
    policy, prompt, judge, judge_prompt = (np.zeros(shape) for _ in range(4))
    for row, group in enumerate(groups):
        for column, record in enumerate(group):
            policy[row, column] = record.n_actions
            prompt[row, column] = record.n_prompt
            judge[row, column] = sum(answer.n_actions for answer in record.asked)
            judge_prompt[row, column] = sum(answer.n_prompt for answer in record.asked)
            if record.scored_s and not record.asked:
                judge[row, column] = np.nan
    kept = np.array([group[0].verdict in _KEPT for group in groups])
    return Groups(
        policy=policy, judge=judge, policy_prompt=prompt, judge_prompt=judge_prompt, kept=kept
    )
