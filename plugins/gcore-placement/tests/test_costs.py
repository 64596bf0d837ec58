"""``g-core placement costs`` and the section that it adds to a run's summary."""

from __future__ import annotations

import json
from pathlib import Path

import gcore_placement
import pytest
from gcore_placement import costs

from gcore_core import cli
from gcore_core.contract import run_files
from gcore_core.contract.errors import DataError
from gcore_core.contract.records import RunFacts
from gcore_core.runtime.journal import Journal


def append(directory: Path, row: run_files.Decided | run_files.Measured) -> None:
    Journal(directory / run_files.PLACEMENT).append([row])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps on two devices; of the first, 30 of 40 device-seconds were work."""
    for step, predicted_s, fell_back in ((1, 8.0, False), (2, 10.0, True)):
        made = run_files.Decided(
            step=step,
            mode="split",
            cells={"rollout": [[0]], "judge": [[1]]},
            chosen="split 1",
            predicted_s={"split 1": predicted_s, "split 2": 20.0},
            seen={"fell_back": fell_back},
        )
        append(tmp_path, made)
        append(
            tmp_path,
            run_files.Measured(
                step=step,
                measured_s=10.0,
                moved=step - 1,
                switch_s=0.5 * (step - 1),
                training_s=10.0 - 0.5 * (step - 1),
                ran={0: {"rollout": 10.0}, 1: {"judge": 5.0}},
                waited={0: 0.0, 1: 5.0},
                monitoring_s=0.01,
            ),
        )
    return tmp_path


def test_time_shares_add_up_to_one_for_each_device_and_for_all(run: Path) -> None:
    told = costs.costs_of(*run_files.read_placement(run))
    for shares in (told.shares, *told.devices.values()):
        assert sum(shares.values()) == pytest.approx(1)
    assert told.shares == pytest.approx(
        {
            "training": 0.4875,
            "changing roles": 0.0125,
            "pushing": 0.0,
            "rollout runs": 0.25,
            "judge runs": 0.125,
            "judge waits": 0.125,
            "rollout waits": 0.0,
        }
    )
    assert told.devices[1]["judge waits"] == pytest.approx(0.25)


def test_idle_time_moves_monitoring_and_prediction_errors_are_reported(run: Path) -> None:
    told = costs.costs_of(*run_files.read_placement(run))
    assert told.idle == pytest.approx({"judge waits": 0.25, "rollout waits": 0.0})
    assert (told.steps, told.moved, told.switch_s, told.fallbacks) == (2, 1, 0.5, 1)
    assert told.monitoring == pytest.approx(0.02 / 40)
    assert told.off_median == pytest.approx(0.1) and told.off_p95 == pytest.approx(0.19)


def test_a_step_with_a_rescue_does_not_count_in_prediction_errors(run: Path) -> None:
    rescue = run_files.Decided(
        step=1, mode="split", cells={}, reason="no replica of judge answers", rescued="judge"
    )
    append(run, rescue)
    assert costs.costs_of(*run_files.read_placement(run)).off_median == pytest.approx(0.0)


def test_the_command_prints_a_table_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["placement", "costs", str(run)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "judge waits",
        "12.5%",
        "off by 10.0% (median)",
        "0.05% of the time",
        "1 cells changed roles",
    ):
        assert words in shown, words
    assert cli.main(["placement", "costs", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2


def test_a_run_without_a_finished_step_is_refused(tmp_path: Path) -> None:
    append(tmp_path, run_files.Decided(step=0, mode="split", cells={}))
    with pytest.raises(DataError, match="no step with a placement decision has ended yet"):
        costs.costs_of(*run_files.read_placement(tmp_path))


def test_the_summary_section_is_written_only_if_devices_moved(run: Path, tmp_path: Path) -> None:
    facts = RunFacts(name="judge", directory=str(run), steps=2, config={})
    gcore_placement.gcore_run_end(facts, "")
    assert (run / costs.SECTION).read_text().startswith("## Where the devices' time went")
    other = tmp_path / "other"
    other.mkdir()
    gcore_placement.gcore_run_end(RunFacts(name="x", directory=str(other), steps=2, config={}), "")
    assert not list(other.iterdir())
