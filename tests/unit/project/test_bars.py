"""benchmarks/bars.py: which benchmarks hold bars, what they take, and when one fails."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MODULES = ("bars", "release", "report", "figures")


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)  # each imports others that lie beside it
    yield importlib.import_module("bars")
    for name in MODULES:
        sys.modules.pop(name, None)


def result_of(**values: float) -> dict[str, Any]:
    """A result whose claims are to be at most 1."""
    claims = [
        {"name": name, "value": value, "unit": "s", "bar": 1.0, "op": "<="}
        for name, value in values.items()
    ]
    return {"benchmark": "sample", "claims": claims, "details": []}


def test_at_most_14_scripts_hold_bars_and_take_45_minutes(bars: ModuleType) -> None:
    assert len({bar.name for bar in bars.BARS}) == len(bars.BARS) <= 14
    assert sum(bar.minutes for bar in bars.BARS) <= bars.BUDGET_MIN == 45


def test_a_script_that_measures_holds_a_bar_or_gives_a_figure(bars: ModuleType) -> None:
    """``decode_real`` is a part of real_model, ``environments_read_again`` of environments."""
    measuring = {
        path.stem for path in BENCHMARKS.glob("*.py") if "add_options(parser)" in path.read_text()
    }
    commands = " ".join(
        word.format(python="", name=name, out="")
        for name, words in importlib.import_module("release").MEASURED.items()
        for word in words
    )
    gives = set(re.findall(r"benchmarks/(\w+)\.py", commands))
    assert {bar.name for bar in bars.BARS} <= measuring
    parts = {"decode_real", "environments_read_again"}
    assert measuring - {bar.name for bar in bars.BARS} - gives == parts


def test_the_page_of_benchmarks_has_a_row_for_each_of_them(bars: ModuleType) -> None:
    page = (BENCHMARKS / "README.md").read_text()
    assert set(re.findall(r"\]\(\./(\w+)\.py\)", page)) <= {
        path.stem for path in BENCHMARKS.glob("*.py")
    }
    for bar in bars.BARS:
        assert f"| [{bar.name}.py](./{bar.name}.py) |" in page


def test_a_bar_that_is_missed_fails_unless_it_is_known(
    bars: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "KNOWN", frozenset({"sample.slow", "sample.quick"}))
    monkeypatch.setattr(bars, "TOO_SMALL", frozenset({"sample.few"}))
    bar = bars.Bar(name="sample", minutes=2)
    outcome = bars.judge(result_of(slow=2, quick=0.5, few=2))
    assert outcome.passes
    assert outcome.line(bar) == (
        "sample: passed, 0.0 of 2 min; sample.slow is missed, as is known; "
        "sample.quick is held, and is in KNOWN"
    )
    outcome = bars.judge(result_of(new=2))
    assert not outcome.passes
    assert outcome.line(bar) == "sample: FAILED, 0.0 of 2 min; sample.new is MISSED"


def test_each_bar_that_is_known_to_be_missed_is_one_of_a_script(bars: ModuleType) -> None:
    names = {bar.name for bar in bars.BARS}
    assert {name.partition(".")[0] for name in bars.KNOWN | bars.TOO_SMALL} <= names


@pytest.mark.parametrize(
    ("program", "failure"),
    [("raise SystemExit(3)", "exit code 3"), ("import time; time.sleep(60)", "twice its minutes")],
)
def test_a_benchmark_that_fails_or_takes_twice_its_minutes_is_told_and_the_next_one_runs(
    program: str,
    failure: str,
    bars: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = json.dumps(result_of(fine=1))
    write = f"import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text({text!r})"
    programs = {"bad": program, "good": write}
    monkeypatch.setattr(
        bars.Bar,
        "command",
        lambda bar, out: [sys.executable, "-c", programs[bar.name], str(out)],
    )
    small = (bars.Bar(name="bad", minutes=0.01), bars.Bar(name="good", minutes=1))
    monkeypatch.setattr(bars, "BARS", small)
    monkeypatch.setattr(sys, "argv", ["bars.py", "--json", "--keep", str(tmp_path)])
    assert bars.main() == 1
    told = json.loads(capsys.readouterr().out)
    assert told["bars"]["bad"]["failure"].endswith(failure)
    assert not told["bars"]["bad"]["passes"]
    assert told["bars"]["good"]["held"] == ["sample.fine"]
    assert told["claims_without_bar_or_place"] == 0
