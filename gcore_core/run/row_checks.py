"""Compares what a job says of its rows with the rows that there are.

Which reward is for which rows, and whether prompts that are evaluated are trained on, too. Up to
10,000 rows of a dataset are looked at, spread evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import GcoreError, did_you_mean
from gcore_core.contract.job_settings import EvaluationSettings, JobSettings, RewardSettings
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import is_meant, listed, same_value, spread

_ROWS_READ = 10_000
_VALUES_SHOWN = 5

Fields = Mapping[str, Any]


def row_problems(
    settings: JobSettings, datasets: Mapping[str, Dataset], origins: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Returns what is wrong with what a job says of its rows, and what is to be known of it.

    datasets: config path -> a dataset of the job. Of one that is not here nothing is said.
    origins: has each dotted key that the job sets.
    """
    problems = list(_unevaluated(settings.evaluation, origins))
    notes: list[str] = []
    training, held_out = datasets.get("data"), datasets.get("evaluation.data")
    if training is None or (held_out is None and settings.evaluation.data is not None):
        return problems, notes
    trained = _prompts(training, len(training))
    known = list(trained)
    is_whole = len(training) <= _ROWS_READ
    if held_out is not None:
        evaluated = _prompts(held_out, min(settings.evaluation.prompts, len(held_out)))
        notes += _trained_on(trained, evaluated, is_whole)
        known += _prompts(held_out, len(held_out))
        is_whole &= len(held_out) <= _ROWS_READ
    fields = [prompt.fields for prompt in known]
    for name, reward in settings.rewards.items():
        if text := _meant_for_none(f"rewards.{name}.when", reward.when, fields):
            # A rare value may be in rows that were not looked at.
            (problems if is_whole or "has a field" in text else notes).append(text)
    if not problems:
        notes += _without_reward(settings.rewards, [prompt.fields for prompt in trained])
    return problems, notes


def _prompts(dataset: Dataset, rows: int) -> list[Prompt]:
    """Returns the first ``rows`` rows, or 10,000 of them; others tell what cannot be read."""
    prompts = []
    for row in spread(rows, _ROWS_READ):
        try:
            prompts.append(dataset[row])
        except GcoreError:
            continue
    return [prompt for prompt in prompts if isinstance(prompt, Prompt)]


def _meant_for_none(where: str, when: Fields, rows: Sequence[Fields]) -> str:
    """Returns which condition of a reward no row meets; "" where it is for some."""
    if not rows or any(is_meant(row, when) for row in rows):
        return ""
    looked = f"none of the {len(rows):,} rows looked at"
    names = list(dict.fromkeys(name for row in rows for name in row))
    for field, wanted in when.items():
        if field not in names:
            guess = did_you_mean(field, names)
            have = ", ".join(names) or "none"
            return f"{where}: {looked} has a field {field!r}{guess}; they have: {have}."
        values = list(dict.fromkeys(repr(row[field]) for row in rows if field in row))
        if not any(same_value(row.get(field), value) for row in rows for value in listed(wanted)):
            shown = [*values[:_VALUES_SHOWN], *(["..."] if len(values) > _VALUES_SHOWN else [])]
            return f"{where}.{field}: {looked} has {wanted!r}; they have: {', '.join(shown)}."
    return f"{where}: {looked} has these values of {', '.join(when)} at once."


def _without_reward(rewards: Mapping[str, RewardSettings], rows: Sequence[Fields]) -> Iterator[str]:
    """Yields a note where no reward is for some of the rows that are trained on."""
    alone = sum(not any(is_meant(row, one.when) for one in rewards.values()) for row in rows)
    if rewards and alone:
        yield (
            f"data: no reward is for {alone:,} of the {len(rows):,} rows looked at; "
            "rewards.<name>.when says for which rows one is"
        )


def _trained_on(
    trained: Sequence[Prompt], evaluated: Sequence[Prompt], is_whole: bool
) -> Iterator[str]:
    """Yields a note where prompts that are evaluated are trained on, too."""
    seen = set(map(_digest, trained))
    both = sum(_digest(prompt) in seen for prompt in evaluated)
    if both:
        least = "" if is_whole else "at least "
        yield (
            f"evaluation.data: {least}{both:,} of {len(evaluated):,} held-out prompts are trained "
            "on, too"
        )


def _digest(prompt: Prompt) -> int:
    return hash(repr((prompt.text, prompt.messages, prompt.images)))


def _unevaluated(evaluation: EvaluationSettings, origins: Mapping[str, str]) -> Iterator[str]:
    """Yields a problem where a job says how to evaluate, and not on what.

    A job that says that there are no data means it: its other settings may be of a file.
    """
    wanted = ["every"] if evaluation.every else []
    if "evaluation.data" not in origins:
        wanted += [
            key
            for key in ("prompts", "show")
            if getattr(evaluation, key) and f"evaluation.{key}" in origins
        ]
    if wanted and evaluation.data is None:
        yield (
            f"evaluation.{wanted[0]}: nothing is evaluated, since evaluation.data is not set; set "
            "it to prompts that are not trained on."
        )
