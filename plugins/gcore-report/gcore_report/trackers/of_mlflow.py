"""Keeps a run in MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from gcore_core.contract.observer import ObserverContext
from gcore_core.contract.records import RunFacts
from gcore_report.trackers.config import MlflowConfig
from gcore_report.trackers.tracking import COLUMNS, Tracker, flat

#: MLflow refuses larger batches, longer values of parameters and other letters in names.
_MOST_METRICS = 1000
_MOST_PARAMS = 100
_DATABASE = "sqlite:///"
_LONGEST_PARAM = 6000
_FORBIDDEN = re.compile(r"[^/\w.\- :]")


class MlflowTracker(Tracker):
    """Is a run of MLflow, by its client: nothing of the process is watched."""

    def __init__(self, config: MlflowConfig, context: ObserverContext) -> None:
        super().__init__(config, context)
        self._config = config
        self._run_id = ""
        beside = self._directory.absolute().parent / "mlflow.db"
        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{beside}"
        self._client = MlflowClient(tracking_uri=uri)
        self._artifacts = artifacts_beside(uri)

    def _named(self) -> str:
        """Makes a run; MLflow gives it its id."""
        name = self._config.project
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(name, artifact_location=self._artifacts)
        )
        tags = {**self._config.tags, "g-core.directory": str(self._directory)}
        made = self._client.create_run(experiment_id, run_name=self.run_name, tags=tags)
        return str(made.info.run_id)

    def _open(self, run: RunFacts, run_id: str) -> None:
        """Opens the run; its parameters stay those of its first start, as MLflow changes none."""
        self._run_id = run_id
        before = self._client.get_run(run_id)
        self._client.update_run(run_id, status="RUNNING")
        if not before.data.params:
            self._put_params(run.config)
        self._client.log_dict(run_id, run.config, "config.json")

    def _put_params(self, config: Mapping[str, Any]) -> None:
        params = [
            Param(allowed(key), str(value)[:_LONGEST_PARAM]) for key, value in flat(config).items()
        ]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])

    def _put_row(self, step: int, row: int, values: Mapping[str, float], time_s: float) -> None:
        at_ms = int(time_s * 1000)
        metrics = [Metric(allowed(name), value, at_ms, step) for name, value in values.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    def _put_samples(self, step: int, row: int, table: Sequence[Sequence[Any]]) -> None:
        columns = {name: [cells[i] for cells in table] for i, name in enumerate(COLUMNS)}
        self._client.log_table(self._run_id, columns, f"samples/step_{step:06d}_{row}.json")

    def _put_directory(self, kind: str, step: int, path: Path) -> None:
        self._client.log_artifacts(self._run_id, str(path), f"{kind}/step-{step:06d}")

    def _put_files(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._client.log_artifact(self._run_id, str(path))

    def _close(self, error: str, summary: Mapping[str, Any]) -> None:
        for name in ("run/steps", "run/error", "run/weights_sha256"):
            if name in summary:
                self._client.set_tag(self._run_id, f"g-core.{name[4:]}", str(summary[name]))
        self._client.set_terminated(self._run_id, "FAILED" if error else "FINISHED")


def artifacts_beside(uri: str) -> str | None:
    """Returns where artifacts go that belong to a local database: beside it.

    None for any other store, which decides by itself. For a database, MLflow would take the
    directory in which the run was started, and look for them where its page was.
    """
    if not uri.startswith(_DATABASE):
        return None
    return (Path(uri.removeprefix(_DATABASE)).absolute().parent / "mlartifacts").as_uri()


def allowed(name: str) -> str:
    """Returns the name with ``_`` for each letter that MLflow does not take."""
    return _FORBIDDEN.sub("_", name)
