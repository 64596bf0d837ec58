"""Holds what ``import gcore`` offers: ``train``, ``job``, ``run``, ``load``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore.finished import Run
from gcore.follow import follow
from gcore.jobs import Job, make_job
from gcore.overrides import Overrides, words
from gcore_core.contract.errors import GcoreError
from gcore_core.kits.commands import load_plan


def train(
    *,
    model: Any,
    reward: Any,
    data: Any,
    algorithm: str | Mapping[str, Any] = "grpo",
    evaluation: Any = None,
    overrides: Overrides = None,
    **keywords: Any,
) -> Run:
    """Trains a model by reinforcement learning and returns the finished run.

        run = gcore.train(model="Qwen/Qwen2.5-0.5B-Instruct", reward=my_function, data=rows)

    It runs in processes of its own, in ``runs/<name>/<NNN>`` below the current directory.

    model: a name of the hub, a folder, a function that makes one, or ``model:`` of a job. None
        leaves it as the job to begin with has it.
    reward: a function; the name of a provider; a list of these, whose sum is the reward; or a
        mapping of names to these. See ``gcore.rewards`` for what a function is given.
    data: rows with a prompt: a list of dicts, a path of JSON lines, a ``datasets.Dataset``, a
        pandas DataFrame, or ``data:`` of a job.
    algorithm: the job to begin with, such as "grpo", "dr-grpo", "rloo", "dapo"; or one of your own,
        as the mapping that its YAML would hold.
    evaluation: rows that are never trained on, as in ``data``.
    overrides, keywords: any key of the job: ``{"run.steps": 20}`` or ``run__steps=20``.

    Raises ConfigError, DataError and PluginError before anything starts, the run's own error, and
    KeyboardInterrupt after Ctrl-C, when the run has saved its state.
    """
    return job(
        model=model,
        reward=reward,
        data=data,
        algorithm=algorithm,
        evaluation=evaluation,
        overrides=overrides,
        **keywords,
    ).train()


def job(
    *,
    model: Any,
    reward: Any,
    data: Any,
    algorithm: str | Mapping[str, Any] = "grpo",
    evaluation: Any = None,
    overrides: Overrides = None,
    **keywords: Any,
) -> Job:
    """Returns the job that ``train`` would run: ``print(job)`` shows its YAML.

    Arguments and errors before the start are those of ``train``.
    """
    try:
        return make_job(model, reward, data, algorithm, evaluation, overrides, keywords)
    except GcoreError as error:  # what is wrong stands in it, not in how it was found
        raise error.with_traceback(None) from error.__cause__


def run(file: str | Path, overrides: Overrides = None, **keywords: Any) -> Run:
    """Runs a job's YAML, as ``g-core run`` does, and returns the finished run.

    overrides, keywords: as in ``train``.
    """
    given = words(overrides, keywords)
    path = Path(file).expanduser()
    load_plan(path, given)  # here, so that what is wrong is told before a process starts
    return follow(path, given)


def load(directory: str | Path) -> Run:
    """Returns a run by its directory, such as "runs/grpo/latest".

    Raises ConfigError when it holds no run.
    """
    return Run(Path(directory))
