"""Finds the weights that a word of the command line stands for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gcore_core.contract import run_files
from gcore_core.contract.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to ask.

    name: what a reader knows it by, as it was given; a run's checkpoint with its step.
    path: its directory in Hugging Face layout, or its name on the hub.
    run: the directory of the run that trained it; None: no run of ours did.
    """

    name: str
    path: str
    run: Path | None = None


def find_model(word: str, step: int | None, scratch: Path) -> Model:
    """Returns the model that a word names.

    word: a run's directory, a directory in Hugging Face layout, or a name on the hub.
    step: of a run: the checkpoint whose weights are meant; None: the final weights.
    scratch: a directory that does not exist, where a checkpoint's weights go.
    Raises ConfigError where there is no such directory, or a run has no final weights.
    """
    path = Path(word)
    if (path / run_files.CONFIG).is_file():
        return _of_run(word, step, scratch)
    if (path / "config.json").is_file():
        return Model(name=word, path=str(path.resolve()))
    if path.exists() or word.startswith((".", "/", "~")) or word.count("/") > 1:
        raise ConfigError(
            f"{word}: neither a run nor a model.",
            where="g-core eval",
            why=f"it has neither {run_files.CONFIG}, as a run, nor config.json, as a model",
            todo="name a directory such as runs/<name>/<NNN>, or a name on the hub",
        )
    return Model(name=word, path=word)


def _of_run(word: str, step: int | None, scratch: Path) -> Model:
    run = Path(word).resolve()
    if step is not None:
        export = ["export", str(run), "--step", str(step), "--to", str(scratch)]
        done = subprocess.run(
            [sys.executable, "-m", "gcore_core", *export],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ConfigError(
                f"{word}: the weights of step {step} cannot be had.",
                where="g-core eval --step",
                why=done.stderr.strip(),
            )
        return Model(name=f"{word} step {step}", path=str(scratch), run=run)
    weights = run / run_files.WEIGHTS
    if not (weights / "config.json").is_file():
        raise ConfigError(
            f"{word}: this run has no final weights.",
            where="g-core eval",
            why="it has not ended, or was stopped",
            todo="take those of a checkpoint: --step N; g-core checkpoint list RUN lists them",
        )
    return Model(name=word, path=str(weights), run=run)
