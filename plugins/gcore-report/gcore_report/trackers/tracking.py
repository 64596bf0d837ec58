"""Has what all trackers have in common: which rows, tables and artifacts a tracker is told, and how
a resumed run goes on with the same one.

A row is what ``metrics.jsonl`` says of one step, as numbers: its metrics under their names, an
evaluation under ``evaluation/``, and ``version``. A step that a run makes again has a second row,
which counts in place of the first. Rows that a tracker has missed, because it was killed or was not
chosen then, are read from ``metrics.jsonl`` when the run is resumed.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gcore_core.contract import run_files
from gcore_core.contract.observer import ObserverContext
from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure
from gcore_report.trackers import kept
from gcore_report.trackers.config import TrackerConfig

log = logging.getLogger(__name__)
#: Files of a run that a tracker keeps as they are when the run ends.
FILES = (
    run_files.CONFIG,
    run_files.METRICS,
    run_files.METRICS_UNDONE,
    run_files.LOCK,
    run_files.SUMMARY,
)
COLUMNS = ("step", "mode", "prompt", "text", "rewards", "status")


class Tracker:
    """Is an observer that keeps what it is told with a tracker, by the methods that begin with
    ``_put`` and by ``_open`` and ``_close``.
    """

    def __init__(self, config: TrackerConfig, context: ObserverContext) -> None:
        self._settings = config
        self._name = context.name
        self._directory = Path(context.directory)
        self._kept: kept.Kept | None = None
        self._claim: BinaryIO | None = None  # held as long as the tracker's run is open
        self._sampled_step = -1
        self._last: dict[str, float] = {}

    @property
    def run_name(self) -> str:
        """Returns the name of the tracker's run."""
        return self._settings.name or "-".join(self._directory.parts[-2:])

    # -- what a tracker does -----------------------------------------------------------------------

    def _named(self) -> str:
        """Returns the id of a new run; it is kept before the run is opened."""
        return uuid.uuid4().hex[:16]

    def _open(self, run: RunFacts, run_id: str) -> None:
        """Opens the tracker's run of that id, new or not, and gives it the configuration."""
        raise NotImplementedError

    def _put_row(self, step: int, row: int, values: Mapping[str, float], time_s: float) -> None:
        """Keeps the numbers of one step.

        row: counts up with each call over all processes of a run, also where steps repeat.
        time_s: seconds since 1970.
        """
        raise NotImplementedError

    def _put_samples(self, step: int, row: int, table: Sequence[Sequence[Any]]) -> None:
        """Keeps a table of samples, with the columns ``COLUMNS``."""
        raise NotImplementedError

    def _put_directory(self, kind: str, step: int, path: Path) -> None:
        """Keeps a copy of a directory as an artifact.

        kind: "checkpoint" or "weights".
        """
        raise NotImplementedError

    def _put_files(self, paths: Sequence[Path]) -> None:
        """Keeps copies of some files of the run."""
        raise NotImplementedError

    def _close(self, error: str, summary: Mapping[str, Any]) -> None:
        """Ends the tracker's run; all that it was told is then where it belongs.

        error: why the run ended; empty when it ended well.
        summary: what is known at the end.
        """
        raise NotImplementedError

    # -- what it is told ---------------------------------------------------------------------------

    def run_start(self, run: RunFacts) -> None:
        if self._kept is None:
            self._claim = kept.claim(self._directory, self._name)
            self._kept = kept.read(self._directory, self._name)
            if self._kept is None:
                self._kept = kept.Kept(id=self._named())
                kept.write(self._directory, self._name, self._kept)
            self._open(run, self._kept.id)
        for row in self._missed(self._kept.step, run.resumed_from):
            self._put_step(row["step"], values_of(row), row["time_unix_s"])
        self._kept.step = min(self._kept.step, run.resumed_from) if run.resumed_from else -1
        # Now, since this process may end before its next row, and the run go on without it.
        kept.write(self._directory, self._name, self._kept)

    def _missed(self, told: int, resumed_from: int) -> Iterator[dict[str, Any]]:
        """Yields the rows of steps that stand and that the tracker was not told."""
        if resumed_from <= told:
            return
        for row in run_files.read_metrics(self._directory):
            if told < row["step"] <= resumed_from:
                yield row

    def step_end(self, report: StepReport) -> None:
        values = {"version": report.version, "metrics": report.metrics}
        self._put_step(
            report.step, values_of({**values, "evaluation": report.evaluation}), time.time()
        )

    def _put_step(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        assert self._kept is not None, "run_start comes first"
        self._last = {**self._last, **values}
        self._put_row(step, self._kept.rows, values, time_s)
        self._kept.rows += 1
        self._sample(step)
        self._kept.step = step
        kept.write(self._directory, self._name, self._kept)

    def _sample(self, step: int) -> None:
        """Keeps the samples of a step, where it has some and the last ones are old enough."""
        assert self._kept is not None
        every = self._settings.samples_every
        if not every or (0 <= self._sampled_step <= step < self._sampled_step + every):
            return
        table = [table_row(step, row) for row in run_files.read_samples(self._directory, step)]
        if table:
            self._put_samples(step, self._kept.rows, table)
            self._kept.rows += 1
            self._sampled_step = step

    def weights_published(self, version: int) -> None:
        """A tracker has the version in the row of the step."""

    def checkpoint_saved(self, step: int, path: str) -> None:
        if not self._settings.checkpoints:
            return
        if not Path(path).is_dir():
            log.warning("the checkpoint of step %d was removed before it was kept", step)
            return
        try:
            self._put_directory("checkpoint", step, Path(path))
        except FileNotFoundError as error:
            log.warning("the checkpoint of step %d was removed meanwhile: %s", step, error)

    def worker_failed(self, failure: WorkerFailure) -> None:
        log.info("%s.%d: %s", failure.role, failure.rank, failure.reason)

    def run_end(self, error: str) -> None:
        if self._kept is None:
            return
        weights = self._directory / run_files.WEIGHTS
        if self._settings.checkpoints and not error and weights.is_dir():
            self._put_directory("weights", self._kept.step, weights)
        files = [self._directory / name for name in FILES]
        self._put_files([path for path in files if path.is_file()])
        self._close(error, self._summary(error))
        if self._claim is not None:
            self._claim.close()

    def _summary(self, error: str) -> dict[str, Any]:
        """Returns how the run ended: its last metrics, and the hash of its weights if known."""
        assert self._kept is not None
        ended: dict[str, Any] = {"run/steps": self._kept.step, "run/error": error}
        rows = run_files.read_metrics(self._directory)
        if rows and (sha256 := rows[-1].get("weights_sha256")):
            ended["run/weights_sha256"] = sha256
        return {**self._last, **ended}


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row of metrics by the names that trackers have."""
    evaluation = {f"evaluation/{name}": value for name, value in row["evaluation"].items()}
    return {**row["metrics"], **evaluation, "version": float(row["version"])}


def table_row(step: int, sample: Mapping[str, Any]) -> list[Any]:
    """Returns a sample as the cells of ``COLUMNS``; what is no text becomes JSON."""
    cells = [sample.get(name, "") for name in COLUMNS[1:]]
    return [step, *(cell if isinstance(cell, str) else json.dumps(cell) for cell in cells)]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted key -> value of a tree of plain values."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{name}.")
        else:
            values[name] = value
    return values
