"""Results of benchmarks: what is a claim, and what an interval holds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)  # it imports what lies beside it
    import report

    yield report
    for name in ("report", "figures"):
        del sys.modules[name]


def test_an_interval_holds_the_statistic_and_narrows_with_more_rounds(report: ModuleType) -> None:
    rounds = [(10.0 + i % 5, 5.0 + i % 3) for i in range(60)]
    few = report.interval(rounds[:6], report.median_ratio)
    many = report.interval(rounds, report.median_ratio)
    assert many[0] <= report.median_ratio(rounds) <= many[1]
    assert many[1] - many[0] < few[1] - few[0]
    assert report.interval(rounds[:2], report.median_ratio) is None


def test_a_number_is_a_claim_if_it_has_a_bar_or_a_place_in_a_page_and_else_a_detail(
    report: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report, "quoted", lambda: {"sample.often_quoted"})
    measured = [
        report.Claim("neither", 3.0, "s"),
        report.Claim("held", 1.0, "s", bar=2.0, op="<="),
        report.Claim("often quoted", 1.0, "s", interval=(0.5, 2)),
    ]
    args = argparse.Namespace(json=False, check=True, out=tmp_path / "result.json")
    assert report.publish("sample", measured, args, []) == 0
    result = json.loads(args.out.read_text())
    assert result["commit"] == report.commit()
    assert set(result) == {
        *("benchmark", "commit", "date", "machine", "versions"),
        *("claims", "details"),
    }
    assert [claim["name"] for claim in result["claims"]] == ["held", "often quoted"]
    assert result["claims"][1]["interval"] == [0.5, 2]
    assert result["details"] == [
        {"name": "neither", "value": 3.0, "unit": "s", "bar": None, "op": ">="}
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["held", "often", "neither"]
