"""Reads a run's directory for Python: metrics, samples, the trained policy, pictures."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from gcore.overrides import Overrides, words
from gcore.views import Views
from gcore_core.contract import run_files
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.installing import install_command
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.providers import TrainerProvider
from gcore_core.kits.commands import load_plan
from gcore_core.kits.runs import read_config

EVALUATION = "evaluation/"


class Run:
    """Is a run by its directory: one that has ended, was stopped, or goes on elsewhere.

    dir: its directory.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError for a directory that holds no run."""
        self.dir = directory.expanduser().resolve()
        if not (self.dir / run_files.CONFIG).is_file():
            raise ConfigError(
                "this directory holds no run.",
                where=str(directory),
                why=f"it has no {run_files.CONFIG}",
                todo='give the directory of a run, such as "runs/grpo/latest"',
            )

    def __repr__(self) -> str:
        return f"<run {self.dir}, {self.steps} steps>"

    @property
    def yaml(self) -> str:
        """Returns the configuration as it was resolved, with every default."""
        return (self.dir / run_files.CONFIG).read_text(encoding="utf-8")

    @property
    def config(self) -> dict[str, Any]:
        """Returns the resolved configuration as plain values."""
        return read_config(self.dir)

    @property
    def steps(self) -> int:
        """Returns how many steps are finished."""
        rows = self.rows
        return int(rows[-1]["step"]) if rows else 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics, one a step, as ``read_metrics`` gives them."""
        return run_files.read_metrics(self.dir)

    @property
    def metrics(self) -> Any:
        """Returns a pandas DataFrame with a row for each step, and ``step`` as its index.

        Columns are the metrics' names; those of evaluations begin with ``evaluation/`` and are NaN
        in steps that were not evaluated. Raises ConfigError where pandas is missing.
        """
        pandas = _library("pandas", "run.metrics", "run.rows has the same as a list")
        rows = [
            {
                "step": row["step"],
                **row["metrics"],
                **{f"{EVALUATION}{name}": value for name, value in row["evaluation"].items()},
            }
            for row in self.rows
        ]
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()

    @property
    def summary(self) -> str:
        """Returns the text of ``summary.md``; "" where the run has not ended."""
        file = self.dir / run_files.SUMMARY
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    @property
    def weights(self) -> Path:
        """Returns the directory of the final weights. Raises DataError where there are none."""
        directory = self.dir / run_files.WEIGHTS
        if not directory.is_dir():
            raise DataError(
                "this run has no final weights.",
                where=str(self.dir),
                why=f"it has finished {self.steps} steps and was not ended well",
                todo="go on with it: run.resume(); or g-core export RUN --to DIR --step N",
            )
        return directory

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """Returns evaluated answers: prompt, text, rewards, mode, status and step of each.

        step: an evaluated step; by default all of them, in order. Raises DataError where there are
        none: answers that were only trained on are not kept.
        """
        folder = self.dir / run_files.SAMPLES
        names = sorted(file.stem.removeprefix("step_") for file in folder.glob("step_*.jsonl"))
        steps = [int(name) for name in names]
        rows = [
            {"step": number, **row}
            for number in steps
            if step in (None, number)
            for row in run_files.read_samples(self.dir, number)
        ]
        if not rows and steps:
            raise DataError(
                f"this run has no evaluated answers of step {step}.",
                where=str(self.dir),
                todo=f"ask for one of steps {', '.join(map(str, steps))}",
            )
        if not rows:
            raise DataError(
                "this run has no evaluated answers.",
                where=str(self.dir),
                why="answers are kept of evaluations alone",
                todo='set evaluation="heldout.jsonl", or evaluation.data of a job',
            )
        return rows

    def policy(self) -> Any:
        """Returns the trained policy, as the library of its trainer opens it.

        Of a language model that is transformers' model. Raises ConfigError where the trainer does
        not say how, DataError where there are no weights.
        """
        weights = self.weights
        where = f"roles.{POLICY}"
        chosen = load_plan(self.dir / run_files.CONFIG).provided[where]
        opens = chosen.spec.opens if isinstance(chosen.spec, TrainerProvider) else ""
        if not opens:
            raise ConfigError(
                f"the trainer {chosen.reference} does not say how its weights are opened.",
                where=f"{where}.use",
                todo=f"open them yourself: {weights}",
            )
        return import_attribute(opens)(weights)

    def plot(self, view: str = "") -> Any:
        """Returns a picture of the run, which a notebook shows.

        view: such as "report/curves"; by default the first one of the run's plugins.
        Raises ConfigError when the run's plugins offer none.
        """
        views = Views(self.dir)
        return views.named(view or next(iter(views.factories), "report/curves"))

    def resume(self, overrides: Overrides = None, **keywords: Any) -> Run:
        """Goes on with the run from its newest checkpoint, until it ends; returns it."""
        from gcore.follow import follow

        return follow(self.dir / run_files.CONFIG, words(overrides, keywords), self.dir)


def _library(name: str, where: str, otherwise: str) -> Any:
    """Imports a library. Raises ConfigError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"it needs {name}, which is not installed.",
            where=where,
            why=otherwise,
            todo=install_command(name),
        ) from error
