"""Opens a job's datasets, and compares what the job says of its rows with the rows that there are.

What cannot be opened or read is a problem of the job, whichever plugin the dataset is of. Plugins
get the datasets for checks of their own; a row that several of them read is read once. What is
compared is which reward is for which rows, and whether prompts that are evaluated are trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from gcore_core.config.plan import Plan
from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import GcoreError, PluginError, did_you_mean
from gcore_core.contract.factories import build
from gcore_core.contract.job_settings import EvaluationSettings, JobSettings, RewardSettings
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import is_meant, listed, same_value, spread
from gcore_core.contract.traits import traits_of

#: Where a job names datasets, and what their rows are called.
DATASETS = {"data": "train", "evaluation.data": "evaluation"}
_ROWS_READ = 2_000  # of each dataset, spread evenly, to see whether they can be read
_ROWS_COMPARED = 10_000  # with what the job says, spread evenly
_VALUES_SHOWN = 5

Fields = Mapping[str, Any]


def open_data(
    plan: Plan, opened: Mapping[str, Dataset], closing: ExitStack
) -> tuple[dict[str, Dataset], list[str]]:
    """Returns config path -> dataset, of those that can be read, and the problems of the others.

    One whose settings say that opening it downloads is left out. Up to 2,000 rows of each are read,
    spread evenly.

    opened: datasets that are opened already.
    closing: closes those that are opened here.
    """
    datasets: dict[str, Dataset] = {}
    problems = []
    for path in DATASETS:
        if path not in plan.provided:
            continue
        if path not in opened and traits_of(plan.objects[path]).downloads:
            continue
        row = None
        try:
            dataset = opened.get(path)
            if dataset is None:
                dataset = build(plan.factory(path))
                if hasattr(dataset, "close"):
                    closing.callback(dataset.close)
            rows = _ReadOnce(dataset)
            for row in spread(len(rows), _ROWS_READ):
                rows[row]
            datasets[path] = rows
        except Exception as error:  # isolation point: a plugin's code
            problems.append(_problem(plan, path, row, error))
    return datasets, problems


def _problem(plan: Plan, path: str, row: int | None, error: Exception) -> str:
    """Returns what is wrong with a dataset, as a sentence that begins with the config path."""
    item = plan.provided[path]
    name = f" [plugin {item.plugin}]"
    if isinstance(error, PluginError):
        return f"{path}.use: {error.sentence()}.{name}"
    if isinstance(error, GcoreError):
        key = "path" if "path" in plan.at(f"{path}.config") else ""
        where = ".".join(filter(None, [path, "config", key]))
        # Advice of errors names the keys of ``data``, wherever the dataset stands.
        return f"{where}: {error.sentence().replace('data.config.', f'{path}.config.')}.{name}"
    what = "opening it" if row is None else f"reading row {row}"
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{path}.use: {item.reference}: {what} raised {cause}{name}"


class _ReadOnce:
    """A dataset whose rows are kept once they were read."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._rows: dict[int, Prompt] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Prompt:
        if row not in self._rows:
            self._rows[row] = self._dataset[row]
        return self._rows[row]


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
    is_whole = len(training) <= _ROWS_COMPARED
    if held_out is not None:
        evaluated = _prompts(held_out, min(settings.evaluation.prompts, len(held_out)))
        notes += _trained_on(trained, evaluated, is_whole)
        known += _prompts(held_out, len(held_out))
        is_whole &= len(held_out) <= _ROWS_COMPARED
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
    for row in spread(rows, _ROWS_COMPARED):
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


def _without_reward(
    rewards: Mapping[str, RewardSettings],
    rows: Sequence[Fields],
) -> Iterator[str]:
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


def _unevaluated(
    evaluation: EvaluationSettings,
    origins: Mapping[str, str],
) -> Iterator[str]:
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
