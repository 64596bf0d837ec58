"""Keeps a run in trackio."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore_core.contract.observer import ObserverContext
from gcore_core.contract.records import RunFacts
from gcore_report.trackers.config import TrackioConfig
from gcore_report.trackers.tracking import COLUMNS, Tracker


class TrackioTracker(Tracker):
    """Is a run of trackio, which finds a run by project and name."""

    def __init__(self, config: TrackioConfig, context: ObserverContext) -> None:
        super().__init__(config, context)
        self._config = config
        if config.store:
            store = Path(config.store).expanduser().absolute()
            store.mkdir(parents=True, exist_ok=True)
            os.environ["TRACKIO_DIR"] = str(store)  # it is read when trackio is imported
        import trackio

        self._trackio = trackio
        self._run: Any = None

    def _named(self) -> str:
        """Returns a name, by which trackio finds a run; no other run of the project has it."""
        return f"{self.run_name}-{super()._named()[:8]}"

    def _open(self, run: RunFacts, run_id: str) -> None:
        self._run = self._trackio.init(
            project=self._config.project,
            name=run_id,
            group=self._config.group or None,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def _put_row(self, step: int, row: int, values: Mapping[str, float], time_s: float) -> None:
        self._run.log(dict(values), step=step)

    def _put_samples(self, step: int, row: int, table: Sequence[Sequence[Any]]) -> None:
        data = [list(cells) for cells in table]
        self._run.log({"samples": self._trackio.Table(columns=list(COLUMNS), data=data)}, step=step)

    def _put_directory(self, kind: str, step: int, path: Path) -> None:
        self._run.log_artifact(
            path, name=f"{self._run.name}-{kind}", type=kind, aliases=[f"step-{step}"]
        )

    def _put_files(self, paths: Sequence[Path]) -> None:
        artifact = self._trackio.Artifact(f"{self._run.name}-files", type="run-files")
        for path in paths:
            artifact.add_file(path)
        self._run.log_artifact(artifact)

    def _close(self, error: str, summary: Mapping[str, Any]) -> None:
        ended = {name: value for name, value in summary.items() if name.startswith("run/")}
        self._run.config.update(ended)
        self._trackio.finish()
