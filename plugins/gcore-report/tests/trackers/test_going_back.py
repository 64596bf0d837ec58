"""Which rows a tracker is told when a run goes back, without any tracker's package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore_report.trackers.config import TrackerConfig
from gcore_report.trackers.tracking import Tracker

from gcore_core.contract import run_files
from gcore_core.contract.observer import ObserverContext
from gcore_core.contract.records import RunFacts


class Told(Tracker):
    """Keeps the rows that it is told: (step, reward)."""

    rows: list[tuple[int, float]]

    def _open(self, run: RunFacts, run_id: str) -> None:
        self.rows = []

    def _put_row(self, step: int, row: int, values: Mapping[str, float], time_s: float) -> None:
        self.rows.append((step, values["reward"]))


def started(directory: Path, resumed_from: int) -> Told:
    tracker = Told(TrackerConfig(), ObserverContext(name="told", directory=str(directory)))
    config: dict[str, Any] = {}
    tracker.run_start(
        RunFacts(
            name="r", directory=str(directory), steps=9, config=config, resumed_from=resumed_from
        )
    )
    return tracker


def write_metrics(directory: Path, rewards: Mapping[int, float]) -> None:
    rows = [
        {"step": step, "version": step, "time_unix_s": 1.0, "metrics": {"reward": reward}}
        for step, reward in rewards.items()
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / run_files.METRICS).write_text(text)


def test_steps_that_were_made_again_without_the_tracker_are_told_later(tmp_path: Path) -> None:
    """It ended right after the run had gone back, so it has not heard them a second time."""
    write_metrics(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3})
    first = started(tmp_path, 3)
    assert first.rows == [(1, 0.1), (2, 0.2), (3, 0.3)]
    close(first)
    close(started(tmp_path, 1))
    write_metrics(tmp_path, {1: 0.1, 2: 0.7, 3: 0.8, 4: 0.9})
    assert started(tmp_path, 4).rows == [(2, 0.7), (3, 0.8), (4, 0.9)]


def close(tracker: Told) -> None:
    """Ends its process, as far as the tracker's run is concerned."""
    assert tracker._claim is not None
    tracker._claim.close()
