"""Asks a model a task of Inspect, and keeps what came of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_core.contract.errors import ConfigError, DataError
from gcore_report.eval.models import Model

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog

RESULTS = "evals.jsonl"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How models are asked.

    limit: samples of a task, the first ones; None: all.
    max_tokens: of an answer.
    temperature: 0: the likeliest token is taken.
    seed: of drawn answers.
    batch: answers at a time.
    device: as torch names it; "": the first GPU, or the CPU.
    """

    limit: int | None = None
    max_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    batch: int = 32
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number of one task.

    task: its name.
    metric: <scorer>/<metric>, such as "match/accuracy".
    value: the number.
    samples: how many were scored.
    model: ``Model.name``.
    """

    task: str
    metric: str
    value: float
    samples: int
    model: str


def ask(task: str, model: Model, settings: Settings, to: Path) -> list[Score]:
    """Returns a task's scores, and adds them to ``to``/evals.jsonl. Inspect's log lies beside it.

    Raises ConfigError where there is no such task, DataError where the task fails.
    """
    from inspect_ai import eval as run_task
    from inspect_ai._util.error import PrerequisiteError
    from inspect_ai.model import GenerateConfig, get_model

    from gcore_report.eval.answering import PROVIDER  # registers it

    file = Path(task.partition("@")[0])
    if file.suffix == ".py" and not file.is_file():
        raise ConfigError(f"{file}: no such file.", where="--task", todo="name a file of tasks")
    to.mkdir(parents=True, exist_ok=True)
    config = GenerateConfig(
        max_tokens=settings.max_tokens,
        max_connections=settings.batch,
        seed=settings.seed,
        temperature=settings.temperature or None,
    )
    answers = get_model(
        f"{PROVIDER}/{model.name}",
        config=config,
        memoize=False,
        path=model.path,
        chats=_has_chat_template(model.path),
        device=settings.device,
        batch=settings.batch,
    )
    try:
        with _root_level_kept():
            logs = run_task(
                task,
                model=answers,
                limit=settings.limit,
                log_dir=str(to),
                display="none",
                log_level="error",
                # Of the command's and of a task's own settings the command's count.
                max_tokens=settings.max_tokens,
                max_connections=settings.batch,
                seed=settings.seed,
                temperature=settings.temperature,
            )
    except PrerequisiteError as error:
        raise ConfigError(
            f"{task}: {str(error).rstrip('.')}.",
            where="--task",
            todo="name FILE.py@FUNCTION, or install what registers the task",
        ) from error
    except Exception as error:  # isolation point: code of a task
        raise DataError(
            f"{task}: the task failed: {type(error).__name__}: {error}.",
            where=f"g-core eval of {model.name}",
            todo="run it by itself: inspect eval TASK --model mockllm/model",
        ) from error
    if not logs:
        raise ConfigError(
            f"{task}: there is no such task.",
            where="--task",
            why="neither a file nor an installed package has it",
            todo="name FILE.py@FUNCTION, or install what registers the task",
        )
    scores = [score for log in logs for score in _scores(log, model)]
    _keep(to / RESULTS, scores, model, settings)
    return scores


def _has_chat_template(path: str) -> bool:
    """Whether a tokenizer in a directory says how a chat is written; of the hub's it is assumed.

    Base models, which have no template, are shown the text of the question alone.
    """
    folder = Path(path)
    if not folder.is_dir() or (folder / "chat_template.jinja").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template"))


@contextmanager
def _root_level_kept() -> Iterator[None]:
    """Gives the root logger its level back, which Inspect sets for the whole process."""
    root = logging.getLogger()
    level = root.level
    try:
        yield
    finally:
        root.setLevel(level)


def _scores(log: EvalLog, model: Model) -> list[Score]:
    if log.status != "success" or log.results is None:
        reason = log.error.message if log.error else f"it ended with {log.status!r}"
        raise DataError(
            f"{log.eval.task}: the task failed: {reason}.",
            where=f"g-core eval of {model.name}",
            todo=f"its log says more: inspect view {log.location}",
        )
    return [
        Score(
            task=log.eval.task,
            metric=f"{score.name}/{metric.name}",
            value=float(metric.value),
            samples=log.results.completed_samples,
            model=model.name,
        )
        for score in log.results.scores
        for metric in score.metrics.values()
    ]


def _keep(file: Path, scores: list[Score], model: Model, settings: Settings) -> None:
    """Adds a line for each score: the score, the settings, the weights' path and the time."""
    with file.open("a", encoding="utf-8") as lines:
        for score in scores:
            line = {
                **dataclasses.asdict(score),
                **dataclasses.asdict(settings),
                "path": model.path,
                "time_unix_s": time.time(),
            }
            lines.write(json.dumps(line) + "\n")
