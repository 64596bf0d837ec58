"""Figures of README and docs: each is of the release that its page names."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"


class Scripts(NamedTuple):
    figures: ModuleType
    release: ModuleType


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    monkeypatch.syspath_prepend(BENCHMARKS)  # each imports others that lie beside it
    yield Scripts(*(importlib.import_module(name) for name in Scripts._fields))
    for name in Scripts._fields:
        del sys.modules[name]


@pytest.fixture
def releases(scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the figures of release 0.1."""
    monkeypatch.setattr(scripts.figures, "RELEASES", tmp_path)
    values = {"a.ratio": 1.7459, "a.share": 0.0267, "a.mib": 1331.2, "a.count": 11661.0}
    scripts.figures.write_release("0.1", {name: {"value": v} for name, v in values.items()})
    return tmp_path


def test_each_figure_of_each_page_is_that_of_the_release_which_the_page_names(
    scripts: Scripts,
) -> None:
    assert scripts.figures.complaints() == []


def test_a_release_holds_only_figures_that_a_page_quotes(scripts: Scripts) -> None:
    assert scripts.figures.without_place() == []


def test_each_figure_says_its_unit_and_where_and_when_it_was_measured(scripts: Scripts) -> None:
    for name in scripts.figures.releases():
        for claim, entry in scripts.figures.read_release(name).items():
            facts = entry.keys() - {"interval"}
            assert facts == {"value", "unit", "commit", "date", "machine"}, claim
            assert all(entry[key] != "" for key in ("commit", "date", "machine")), claim


def test_each_figure_comes_from_a_result_that_a_command_makes(scripts: Scripts) -> None:
    newest = scripts.figures.read_release(scripts.figures.releases()[-1])
    results = {claim.partition(".")[0] for claim in newest}
    assert results == scripts.release.MEASURED.keys()


def test_a_figure_that_is_not_the_release_s_is_told(scripts: Scripts, releases: Path) -> None:
    named = "of [release 0.1](../../benchmarks/releases/0.1.json): "
    right = (
        "1.75<!-- result: a.ratio --> times, 2.7%<!-- result: a.share -->, "
        "1.3 GiB<!-- result: a.mib / 1024 -->, 11,661<!-- result: a.count --> groups"
    )
    assert scripts.figures.complaints_of(named + right) == []
    wrong = "1.74<!-- result: a.ratio -->, 2.6%<!-- result: a.share -->, 1<!-- result: b.c -->"
    assert scripts.figures.complaints_of(named + wrong) == [
        "1.74: a.ratio is 1.7459",
        "2.6: a.share is 2.67",
        "1: the release has no claim b.c",
    ]
    with pytest.raises(ValueError, match="1 comments name a result, 0 of a number"):
        scripts.figures.complaints_of(named + "many<!-- result: a.ratio -->")


@pytest.mark.parametrize(
    "named", ["", "[0.9](benchmarks/releases/0.9.json) ", "[it](benchmarks/releases/0.1.json.md) "]
)
def test_a_page_with_figures_names_a_release_that_there_is(
    named: str, scripts: Scripts, releases: Path
) -> None:
    (line,) = scripts.figures.complaints_of(f"{named}1.75<!-- result: a.ratio -->")
    assert line.endswith("its figures are of one of ['0.1']")
    assert scripts.figures.complaints_of("A page without figures.") == []


def test_releases_come_in_the_order_of_their_numbers(scripts: Scripts, releases: Path) -> None:
    for name in ("0.10", "0.2"):
        scripts.figures.write_release(name, {})
    assert scripts.figures.releases() == ["0.1", "0.2", "0.10"]


def test_a_yardstick_is_no_release_and_keeps_what_no_page_quotes(
    scripts: Scripts, releases: Path
) -> None:
    """What was measured again replaces what the same benchmark had."""
    result: dict[str, Any] = {
        "benchmark": "b",
        "commit": "0123456789abcdef",
        "date": "2026-01-01",
        "machine": {"cores": 2, "processor": "P", "memory_gib": 8},
        "claims": [{"name": "old", "value": 1, "unit": "s", "bar": 5}],
        "details": [],
    }
    scripts.release.keep("0.1-before", result)
    scripts.release.keep("0.1-before", result | {"benchmark": "c"})
    details = [{"name": "new one", "value": 2, "unit": "s", "bar": None}]
    scripts.release.keep("0.1-before", result | {"claims": [], "details": details})
    kept = scripts.figures.read_release("0.1-before")
    assert {name: entry["value"] for name, entry in kept.items()} == {"b.new_one": 2, "c.old": 1}
    assert scripts.figures.releases() == ["0.1"]


def test_a_release_takes_quoted_claims_of_new_results_and_keeps_the_others(
    scripts: Scripts, releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no page quotes is left out, of new results and of the release before."""
    monkeypatch.setattr(scripts.figures, "quoted", lambda: {"a.ratio", "a.share", "b.new_one"})
    monkeypatch.setattr(scripts.release, "MEASURED", {"b": ("false",)})
    monkeypatch.setattr(scripts.figures, "complaints", list)
    result = {
        "benchmark": "b",
        "commit": "0123456789abcdef",
        "date": "2026-01-01",
        "machine": {"cores": 2, "processor": "P ", "memory_gib": 8},
        "claims": [{"name": "new one", "value": 3, "unit": "s", "bar": 5, "interval": [2, 4]}],
        "details": [{"name": "other", "value": 4, "unit": "s", "bar": None}],
    }
    results = tmp_path / "results"
    results.mkdir()
    (results / "b.json").write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["release.py", "0.2", "--results", str(results)])
    assert scripts.release.main() == 0
    assert scripts.figures.read_release("0.2") == {
        "a.ratio": {"value": 1.7459},
        "a.share": {"value": 0.0267},
        "b.new_one": {
            "value": 3,
            "unit": "s",
            "interval": [2, 4],
            "commit": "0123456789ab",
            "date": "2026-01-01",
            "machine": "2 cores (P), 8 GiB",
        },
    }


def test_a_command_that_fails_is_told_and_what_was_measured_before_stays(
    scripts: Scripts,
    releases: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(scripts.figures, "quoted", lambda: {"a.ratio"})
    monkeypatch.setattr(scripts.release, "MEASURED", {"a": ("false",)})
    monkeypatch.setattr(scripts.figures, "complaints", list)
    monkeypatch.setattr(sys, "argv", ["release.py", "0.2", "--results", str(tmp_path / "none")])
    assert scripts.release.main() == 1
    assert "a: exit code 1 of: false" in capsys.readouterr().out
    assert scripts.figures.read_release("0.2") == {"a.ratio": {"value": 1.7459}}


def test_where_the_pages_are_not_a_benchmark_still_says_what_it_measured(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.figures, "ROOT", tmp_path)
    assert scripts.figures.quoted() == frozenset()
