"""``g-core placement explain``, and the journal that it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gcore_placement.config import ReplayConfig
from gcore_placement.replay import Replay

from gcore_core import cli
from gcore_core.contract import run_files
from gcore_core.contract.errors import DataError
from gcore_core.contract.placement import Cell, Decision, Device, Need, Partition, Window
from gcore_core.controllers.placement.lead import decided_line
from gcore_core.runtime.journal import Journal


def append(directory: Path, row: run_files.Decided | run_files.Measured) -> None:
    Journal(directory / run_files.PLACEMENT).append([row])


def decision() -> Decision:
    devices = [Device(index=index, kind="cpu") for index in range(4)]
    cells = {
        "rollout": tuple(Cell((device,)) for device in devices[:3]),
        "judge": (Cell((devices[3],)),),
    }
    return Decision(
        partition=Partition(cells),
        chosen="split 1",
        predicted_s={"split 1": 8.0, "split 2": 10.0},
        reason="least regret",
        seen={"judge_tokens": 120.5},
        state={"weight": 1.0},
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    append(tmp_path, decided_line(11, decision(), took_s=0.01))
    append(
        tmp_path,
        run_files.Measured(
            step=11,
            measured_s=9.0,
            moved=2,
            ran={0: {"rollout": 9.0}, 3: {"judge": 4.5}},
            waited={0: 0.0, 3: 4.5},
        ),
    )
    append(tmp_path, decided_line(12, decision()))
    return tmp_path


def test_explain_shows_what_was_observed_expected_chosen_and_measured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["placement", "explain", str(run), "--step", "11"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "least regret",
        "judge_tokens",
        "120.5",
        "devices 0-2",
        "<- chosen",
        "+25.0%",
        "9.0 s",
        "-11.1%",
    ):
        assert words in shown, words
    assert "25.0%  judge waits" in shown


def test_explain_shows_a_rescue_its_reason_and_the_decision_it_replaced(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = {"rollout": (), "judge": (Cell((Device(index=2, kind="cpu"),)),)}
    made = Decision(
        partition=Partition(cells),
        reason="no replica of judge answers",
        seen={"lost": {"judge": [3]}},
    )
    append(run, decided_line(12, made, rescued="judge"))
    assert cli.main(["placement", "explain", str(run), "--step", "12"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "least regret",
        "devices 0-2",
        "rescue of judge",
        "no replica of judge",
        "'judge': [3]",
        "devices 2",
    ):
        assert words in shown, words
    decisions, _ = run_files.read_placement(run)
    assert decisions[12].chosen == "split 1" and decisions[11].rescues == []


def test_explain_without_a_step_lists_all_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["placement", "explain", str(run)]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["11", "split"],
        ["12", "split"],
    ]


def test_json_output_has_decision_and_outcome(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["placement", "explain", str(run), "--step", "12", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["decision"]["cells"]["judge"] == [[3]] and told["outcome"] is None


@pytest.mark.parametrize("step", [[], ["--step", "12"]])
def test_a_rollout_that_took_no_time_is_explained(run: Path, step: list[str]) -> None:
    """All groups of its step were there before."""
    append(run, run_files.Measured(step=12, measured_s=0.0))
    assert cli.main(["placement", "explain", str(run), *step]) == 0


def test_an_unknown_step_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["placement", "explain", str(run), "--step", "3"]) == 4
    assert "there is no decision for step 3" in capsys.readouterr().err


def test_a_missing_journal_is_refused_and_a_truncated_last_line_is_accepted(
    run: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="the run has no record of placement decisions"):
        run_files.read_placement(tmp_path / "other")
    with (run / run_files.PLACEMENT).open("ab") as file:
        file.write(b'{"what":"deci')
    decisions, outcomes = run_files.read_placement(run)
    assert sorted(decisions) == [11, 12] and sorted(outcomes) == [11]
    with (run / run_files.PLACEMENT).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(DataError, match="placement.jsonl:4: a line cannot be read"):
        run_files.read_placement(run)


def test_reasons_of_replay_survive_the_journal(tmp_path: Path) -> None:
    window = Window(
        devices=tuple(Device(index=index, kind="cpu") for index in range(4)),
        slots={"rollout": 4, "judge": 4},
        needs={
            "rollout": Need(kind="generator", follows="policy"),
            "judge": Need(kind="generator"),
        },
    )
    made = Replay(ReplayConfig()).revise(None, window)
    append(tmp_path, decided_line(0, made))
    decisions, _ = run_files.read_placement(tmp_path)
    assert decisions[0].state == made.state and decisions[0].cells == {
        "rollout": [[0], [1], [2]],
        "judge": [[3]],
    }
