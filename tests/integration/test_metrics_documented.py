"""Every number that a run writes stands on the page of metrics, with what it means."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/metrics.md"
GOLDENS = sorted((ROOT / "tests/oracles/goldens").glob("*.json"))
ROW = re.compile(r"^\| `([^`]+)` \|([^|]*)\|([^|]+)\|$", re.M)


def documented() -> list[re.Pattern[str]]:
    """What each row of the page names; a name in angle brackets stands for any."""
    names = [row[0] for row in ROW.findall(PAGE.read_text())]
    return [re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(name))) for name in names]


def undocumented(names: set[str]) -> list[str]:
    rows = documented()
    return sorted(name for name in names if not any(row.fullmatch(name) for row in rows))


def names_in(value: Any) -> Iterator[str]:
    """Keys of every object named ``metrics`` or ``evaluation``, wherever it lies."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("metrics", "evaluation") and isinstance(inner, dict):
                yield from inner
            else:
                yield from names_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from names_in(inner)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)
def test_every_metric_of_a_recorded_recipe_is_on_the_page(golden: Path) -> None:
    names = set(names_in(json.loads(golden.read_text())))
    assert len(names) > 20
    assert undocumented(names) == []


def test_every_metric_of_a_run_in_processes_is_on_the_page(tmp_path: Path) -> None:
    code, run = runs.finish(tmp_path, runs.job(checkpoint={"every": 1}))
    assert code == 0, run.output
    names = set(names_in(run.metrics()))
    assert {"seconds/step", "seconds/checkpoint", "cpu_seconds/policy.0", "reward"} <= names
    assert undocumented(names) == []


def test_every_metric_has_one_row_with_its_meaning() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) > 50
    assert [name for name, _, meaning in rows if len(meaning.split()) < 3] == []
    names = [name for name, *_ in rows]
    assert sorted(names) == sorted(set(names))


def test_a_metric_missing_from_the_page_is_detected() -> None:
    assert undocumented({"reward", "reward/x", "reward/x/y", "rewards"}) == [
        "reward/x/y",
        "rewards",
    ]
