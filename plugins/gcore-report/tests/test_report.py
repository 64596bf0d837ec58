from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import gcore_report
import numpy as np
import pytest
from gcore_report.curves import draw
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from gcore_core.config.catalog import Installed
from gcore_core.config.plugins import Plugins
from gcore_core.contract import run_files
from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.run import directory as d


def _reports(first: int, last: int) -> Iterator[StepReport]:
    for step in range(first, last + 1):
        evaluation = (
            {"greedy/exact": step / 10, "sampled/exact": step / 20} if step % 2 == 0 else {}
        )
        metrics = {
            "reward/exact": step / 10,
            "length": 5.0,
            "kl": 0.01,
            "entropy": 0.5,
            "logprob_gap_max": 1e-6,
        }
        times = {"seconds/rollout": 0.5, "seconds/train": 0.25, "seconds/step": 0.8}
        yield StepReport(
            step=step,
            version=step,
            metrics={**metrics, **times} if step else {},
            evaluation=evaluation,
        )


def _go(run: RunFacts, first: int, last: int) -> None:
    """Calls the hooks as a run does, but writes no metrics file, so that no time is spent on
    pictures.
    """
    gcore_report.gcore_run_start(run=run)
    for report in _reports(first, last):
        gcore_report.gcore_step_end(run=run, report=report)
    gcore_report.gcore_run_end(run=run, error="")


def _run(path: Path, resumed_from: int = 0) -> RunFacts:
    (path / run_files.SAMPLES).mkdir(parents=True, exist_ok=True)
    return RunFacts(
        name="digits", directory=str(path), steps=4, config={}, resumed_from=resumed_from
    )


def _events(run_dir: Path) -> list[Event]:
    """As TensorBoard itself reads them; it checks the CRC of every record."""
    files = sorted((run_dir / run_files.TENSORBOARD).iterdir())
    return [event for file in files for event in LegacyEventFileLoader(str(file)).Load()]


def _scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in _events(run_dir):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_the_core_accepts_the_plugin_that_the_entry_point_names(tmp_path: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    name = "report"
    module = project["entry-points"]["gcore"][name]
    plugins, failures = Plugins(), []
    plugins.load(
        Installed(
            name=name, distribution=project["name"], version=project["version"], module=module
        )
    )
    observers = plugins.observers(lambda *failure: failures.append(failure))
    observers.run_start(_run(tmp_path))
    observers.step_end(_run(tmp_path), StepReport(step=1, version=1, metrics={"kl": 0.5}))
    observers.run_end(_run(tmp_path), "")
    assert failures == [] and _scalars(tmp_path) == {"kl": [(1, 0.5)]}


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    heavy = "('matplotlib', 'tensorboard', 'numpy', 'torch')"
    program = (
        f"import sys, gcore_report; print([m for m in sys.modules if m.split('.')[0] in {heavy}])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


def test_writing_scalars_brings_no_torch_into_the_supervisor(tmp_path: Path) -> None:
    program = (
        "import sys; from gcore_report.scalars import add, start; "
        "from gcore_core.contract.records import RunFacts, StepReport\n"
        f"run = RunFacts(name='x', directory={str(tmp_path)!r}, steps=1, config={{}})\n"
        "start(run); add(run, StepReport(step=1, version=1, metrics={'kl': 0.5})); print('torch' "
        "in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "False"


def test_every_metric_of_every_step_is_a_scalar(tmp_path: Path) -> None:
    _go(_run(tmp_path), 0, 4)
    scalars = _scalars(tmp_path)
    single = 1e-6  # TensorBoard keeps float32
    assert dict(scalars.pop("evaluation/greedy/exact")) == pytest.approx(
        {0: 0.0, 2: 0.2, 4: 0.4}, rel=single
    )
    assert dict(scalars.pop("evaluation/sampled/exact")) == pytest.approx(
        {0: 0.0, 2: 0.1, 4: 0.2}, rel=single
    )
    for name, series in scalars.items():
        reported = {report.step: report.metrics[name] for report in _reports(1, 4)}
        assert dict(series) == pytest.approx(reported, rel=single) and len(series) == 4
    assert set(scalars) == {name for report in _reports(1, 4) for name in report.metrics}


def test_a_resumed_run_makes_tensorboard_drop_the_repeated_steps(tmp_path: Path) -> None:
    _go(_run(tmp_path), 1, 4)
    _go(_run(tmp_path, resumed_from=2), 3, 4)
    starts = [event.step for event in _events(tmp_path) if event.HasField("session_log")]
    assert starts == [3] and [step for step, _ in _scalars(tmp_path)["kl"]] == [1, 2, 3, 4, 3, 4]


def test_tensorboard_shows_each_step_once_whatever_a_run_went_back_to(tmp_path: Path) -> None:
    """Back to step 0 in the same process, on from 3, and from 2 when that checkpoint is damaged."""
    for resumed_from, first, last in ((0, 0, 2), (0, 1, 4), (3, 4, 6), (2, 3, 4), (2, 3, 5)):
        _go(_run(tmp_path, resumed_from=resumed_from), first, last)
    accumulator = EventAccumulator(str(tmp_path / run_files.TENSORBOARD))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("kl")] == [1, 2, 3, 4, 5]
    assert [event.step for event in accumulator.Scalars("evaluation/greedy/exact")] == [0, 2, 4]


def test_scalars_can_be_read_before_the_run_ends(tmp_path: Path) -> None:
    gcore_report.gcore_run_start(run=_run(tmp_path))
    gcore_report.gcore_step_end(
        run=_run(tmp_path), report=StepReport(step=1, version=1, metrics={"kl": 0.5})
    )
    assert _scalars(tmp_path) == {"kl": [(1, 0.5)]}


def test_curves_are_drawn_at_an_evaluation_when_the_last_picture_is_old_and_at_the_end(
    tmp_path: Path,
) -> None:
    run, metrics = _run(tmp_path), d.MetricsFile(tmp_path)
    samples, picture = tmp_path / run_files.SAMPLES, tmp_path / run_files.CURVES
    gcore_report.gcore_run_start(run=run)
    drawn = []
    for report, old in zip(_reports(0, 5), [False, True, True, True, False, True], strict=True):
        before = time.time() - (gcore_report.REDRAW_S + 1 if old else 0)
        os.utime(picture if picture.exists() else samples, (before, before))
        metrics.append(report)
        gcore_report.gcore_step_end(run=run, report=report)
        drawn.append(
            picture.exists() and picture.stat().st_mtime != pytest.approx(before, abs=1e-3)
        )
    assert drawn == [False, False, True, False, False, False], (
        "evaluations are at 0, 2 and 4; that at 2 is due"
    )
    picture.unlink()
    gcore_report.gcore_run_end(run=run, error="")
    metrics.close()
    height, width, _ = imread(picture).shape
    assert (width, height) == (1875, 1020)


def test_a_run_that_failed_before_it_started_ends_without_a_picture_or_an_error(
    tmp_path: Path,
) -> None:
    gcore_report.gcore_run_end(run=_run(tmp_path), error="no such model")
    assert not (tmp_path / run_files.CURVES).exists()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"kl": math.nan, "seconds/train": math.nan},
        {"logprob_gap_max": 0.0, "seconds/train": 0.0},
        {"entropy": 0.5},
    ],
    ids=["nothing", "nan", "zero", "without kl"],
)
def test_metrics_that_are_missing_nan_or_zero_still_make_a_picture(
    tmp_path: Path, metrics: dict[str, float]
) -> None:
    file = d.MetricsFile(tmp_path)
    for step in (1, 2, 3):
        file.append(StepReport(step=step, version=step, metrics=metrics))
    file.close()
    assert draw(tmp_path) == tmp_path / run_files.CURVES
    assert np.ptp(imread(tmp_path / run_files.CURVES)) > 0.5  # something is on it
