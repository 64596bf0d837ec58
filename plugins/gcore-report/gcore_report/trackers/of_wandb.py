"""Keeps a run in Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from gcore_core.contract.observer import ObserverContext
from gcore_core.contract.records import RunFacts
from gcore_report.trackers.config import WandbConfig
from gcore_report.trackers.kept import DIRECTORY
from gcore_report.trackers.tracking import COLUMNS, Tracker

#: The metric over which all others are drawn.
STEP = "step"
#: W&B has a process of its own, the service. This variable tells child processes to share it.
_SHARED_SERVICE = "WANDB_SERVICE"


class WandbTracker(Tracker):
    """Is a run of W&B.

    W&B's own step must rise with every row, and drops what does not, but a run may make a step
    again. So its step counts rows, and the run's step is the metric ``step``.
    """

    def __init__(self, config: WandbConfig, context: ObserverContext) -> None:
        super().__init__(config, context)
        self._config = config
        self._run: Any = None

    def _open(self, run: RunFacts, run_id: str) -> None:
        place = self._directory / DIRECTORY
        place.mkdir(exist_ok=True)
        # The run starts a service of its own. A shared one, such as a notebook's, may end earlier.
        # It may also still hold the run open for a process that was killed, and then refuses it.
        os.environ.pop(_SHARED_SERVICE, None)
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity or None,
            name=self.run_name,
            tags=self._config.tags or None,
            group=self._config.group or None,
            id=run_id,
            resume="allow",
            mode=self._config.mode,
            dir=str(place),
            config=run.config,
            allow_val_change=True,
            settings=_settings(),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def _put_row(self, step: int, row: int, values: Mapping[str, float], time_s: float) -> None:
        self._run.log({**values, STEP: step}, step=row, commit=True)

    def _put_samples(self, step: int, row: int, table: Sequence[Sequence[Any]]) -> None:
        shown = wandb.Table(columns=list(COLUMNS), data=[list(cells) for cells in table])
        self._run.log({"samples": shown, STEP: step}, step=row, commit=True)

    def _put_directory(self, kind: str, step: int, path: Path) -> None:
        artifact = wandb.Artifact(f"{self._run.id}-{kind}", type=kind, metadata={STEP: step})
        artifact.add_dir(str(path))
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])

    def _put_files(self, paths: Sequence[Path]) -> None:
        artifact = wandb.Artifact(f"{self._run.id}-files", type="run-files")
        for path in paths:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def _close(self, error: str, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=1 if error else 0)


def _settings() -> Any:
    """Returns settings by which W&B looks at nothing but what it is told.

    Its own process would otherwise send the command line, the machine's load and what is printed.
    """
    return wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        save_code=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
