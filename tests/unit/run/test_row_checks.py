"""What a job says of its rows is compared with the rows before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gcore_core import cli

Job = Callable[..., Path]
ROWS = [{"prompt": f"{n}+1=", "source": "sums" if n else "other"} for n in range(8)]


def checked(
    job: Job,
    capsys: pytest.CaptureFixture[str],
    rows: Iterable[dict[str, Any]],
    *overrides: str,
    held_out: Iterable[dict[str, Any]] = (),
) -> str:
    """Returns what ``g-core check`` says of a job with these rows; "" in place of its table."""
    words = list(overrides)
    folder = job().parent
    for where, some in (("data", rows), ("evaluation.data", held_out)):
        if lines := [json.dumps(row) for row in some]:
            path = folder / f"{where}.jsonl"
            path.write_text("\n".join(lines))
            words += [f"{where}.use=core/jsonl", f"{where}.config.path={path}"]
    code = cli.main(["check", str(job()), *words])
    out, err = capsys.readouterr()
    assert code == (2 if err else 0)
    return err or "\n".join(line for line in out.splitlines() if line.startswith("note:"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("{sorce: sums}", "rewards.length.when: none of the 8 rows looked at has a field 'sorce'"),
        (
            "{source: sum}",
            "rewards.length.when.source: none of the 8 rows looked at has 'sum'; they have: "
            "'other', 'sums'",
        ),
        ("{source: [sum, others]}", "none of the 8 rows looked at has ['sum', 'others']"),
    ],
)
def test_a_reward_that_is_for_no_row_is_refused(
    job: Job, capsys: pytest.CaptureFixture[str], when: str, says: str
) -> None:
    shown = checked(job, capsys, ROWS, f"rewards.length.when={when}")
    assert says in shown


def test_conditions_that_no_row_meets_at_once_are_refused(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a", "x": 1, "y": 2}, {"prompt": "b", "x": 2, "y": 1}]
    shown = checked(job, capsys, rows, "rewards.length.when={x: 1, y: 1}")
    assert "none of the 2 rows looked at has these values of x, y at once" in shown


def test_rows_that_no_reward_is_for_are_counted(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = checked(job, capsys, ROWS, "rewards.length.when={source: [sums, more]}")
    assert "data: no reward is for 1 of the 8 rows looked at" in shown
    more = ["rewards.length.when={source: sums}", "rewards.other.use=fake/length"]
    assert "no reward" not in checked(job, capsys, ROWS, *more)


def test_a_rare_value_that_no_row_looked_at_has_is_told_and_not_refused(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_core.run.data_checks._ROWS_COMPARED", 4)
    rare = "rewards.length.when={source: rare}"
    shown = checked(job, capsys, ROWS, rare, "rewards.other.use=fake/length")
    assert "note: rewards.length.when.source: none of the 4 rows looked at has 'rare'" in shown


def test_a_reward_for_held_out_rows_alone_is_accepted(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rewards.length.when={source: held-out}", "rewards.other.use=fake/length"]
    held_out = [{"prompt": "new", "source": "held-out"}]
    assert "when" not in checked(job, capsys, ROWS, *words, held_out=held_out)


def test_held_out_prompts_that_are_trained_on_are_counted(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = [*ROWS[:2], {"prompt": "new"}]
    shown = checked(job, capsys, ROWS, held_out=held_out)
    assert "evaluation.data: 2 of 3 held-out prompts are trained on, too" in shown
    assert "held-out" not in checked(job, capsys, ROWS, held_out=held_out[2:])


def test_an_evaluation_without_prompts_is_refused(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "evaluation.every: nothing is evaluated, since evaluation.data" in checked(
        job, capsys, ROWS, "evaluation.every=5"
    )
    assert "evaluation" not in checked(job, capsys, ROWS, "evaluation.every=0")


@pytest.mark.parametrize("words", [["prompts=8"], ["prompts=256"], ["show=1"], ["show=3"]])
def test_settings_of_an_evaluation_without_prompts_are_refused(
    words: list[str], job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"evaluation.{word}" for word in words]
    key = words[0].partition("=")[0]
    shown = checked(job, capsys, ROWS, *overrides)
    assert f"evaluation.{key}: nothing is evaluated, since evaluation.data is not set" in shown
    held_out = [{"prompt": "new"}]
    assert "evaluation" not in checked(job, capsys, ROWS, *overrides, held_out=held_out)


@pytest.mark.parametrize("words", [["show=0"], ["prompts=8", "data=null"], ["show=3", "data=null"]])
def test_settings_of_an_evaluation_that_is_switched_off_are_accepted(
    words: list[str], job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = checked(job, capsys, ROWS, *(f"evaluation.{word}" for word in words))
    assert "evaluation" not in shown
