"""However slots share a model, they compute what one rank computes that holds it whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language.tiny import save_model

from gcore_core.testing.runs import run_together
from tests.support import layout_ranks

Numbers = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("models")
    for family in {like.model for like in layout_ranks.LIKES.values()}:
        save_model(room / family, family)
    return room


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def alone(models: Path, room: Path) -> dict[str, Numbers]:
    """Returns what one rank comes to, by key of ``LIKES``; its states are below alone/."""
    likes = layout_ranks.LIKES
    return {like: layout_ranks.alone(like, models, room / "alone" / like) for like in likes}


@pytest.fixture(scope="module")
def together(models: Path, room: Path, alone: dict[str, Numbers]) -> dict[str, Numbers]:
    """Returns what several ranks come to, whose third step starts from one rank's state."""
    found: dict[str, Numbers] = {}
    for count in sorted({case.ranks for case in layout_ranks.CASES.values()}):
        work = room / f"of {count}"
        work.mkdir()
        given = [str(count), str(models), str(work), str(room / "alone")]
        run_together([["-m", layout_ranks.__name__, str(rank), *given] for rank in range(count)])
        found |= json.loads((work / "numbers.json").read_text())
    return found


def assert_close(
    one: dict[str, list[float]], other: dict[str, list[float]], tolerance: float
) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        size = max(1.0, *np.abs(values))
        np.testing.assert_allclose(values, other[name], atol=tolerance * size, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", layout_ranks.CASES)
def test_gradients_metrics_and_weights_are_those_of_one_rank(
    name: str, alone: dict[str, Numbers], together: dict[str, Numbers]
) -> None:
    """The third step starts from the state that the one rank saved."""
    like = layout_ranks.CASES[name].like
    tolerance = layout_ranks.LIKES[like].tolerance
    one, other = alone[like], together[name]
    assert len(one["gradients"]) == len(other["gradients"]) == 3 * 2
    for left, right in zip(one["gradients"], other["gradients"], strict=True):
        assert_close(left, right, tolerance)
    for left, right in zip(one["metrics"], other["metrics"], strict=True):
        assert left == pytest.approx(right, rel=10 * tolerance, abs=10 * tolerance)
    assert_close(one["weights"], other["weights"], tolerance)
    assert_close(one["after"], other["after"], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, case in layout_ranks.CASES.items() if not case.exactly]
)
def test_one_rank_goes_on_from_the_state_of_several(
    name: str, models: Path, room: Path, together: dict[str, Numbers], alone: dict[str, Numbers]
) -> None:
    case = layout_ranks.CASES[name]
    state = room / f"of {case.ranks}" / name / "state"
    one, tolerance = alone[case.like], layout_ranks.LIKES[case.like].tolerance
    back = layout_ranks.alone(case.like, models, room / "back" / name, state)
    near = 10 * tolerance
    assert back["metrics"][2] == pytest.approx(one["metrics"][2], rel=near, abs=near)
    assert_close(back["after"], one["after"], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, case in layout_ranks.CASES.items() if case.exactly]
)
def test_where_a_state_lies_changes_no_bit(name: str, together: dict[str, Numbers]) -> None:
    """On a CPU, with FSDP2 on one rank too, and with checkpointed layers."""
    assert together[name] == together[layout_ranks.CASES[name].exactly]
