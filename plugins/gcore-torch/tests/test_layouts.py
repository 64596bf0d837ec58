"""However slots share a model, they compute what one rank computes that holds it whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language.tiny import save_model
from gcore_testing.runs import run_together

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


class Together:
    """What several ranks come to, by name of the case; their third step starts from one rank's
    state. Ranks are started when one of their cases is asked for, and take four cases.
    """

    def __init__(self, models: Path, room: Path) -> None:
        self._models = models
        self._room = room
        self._found: dict[str, Numbers] = {}

    def __getitem__(self, name: str) -> Numbers:
        if name not in self._found:
            cases = layout_ranks.CASES | layout_ranks.ROUNDED
            self._run(cases[name].ranks, _with(name))
        return self._found[name]

    def _run(self, count: int, names: Sequence[str]) -> None:
        given = [str(count), str(self._models), str(self._room), str(self._room / "alone"), *names]
        ranks = [["-m", layout_ranks.__name__, str(rank), *given] for rank in range(count)]
        run_together(ranks, timeout_s=900)
        for name in names:
            self._found[name] = json.loads((self._room / name / "numbers.json").read_text())


def _with(name: str) -> list[str]:
    """Returns the names of the cases that are run with this one."""
    if name in layout_ranks.ROUNDED:
        return list(layout_ranks.ROUNDED)
    count = layout_ranks.CASES[name].ranks
    names = [other for other, case in layout_ranks.CASES.items() if case.ranks == count]
    first = names.index(name) // 4 * 4
    return names[first : first + 4]


@pytest.fixture(scope="module")
def together(models: Path, room: Path, alone: dict[str, Numbers]) -> Together:
    return Together(models, room)


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
    name: str, alone: dict[str, Numbers], together: Together
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
    name: str, models: Path, room: Path, together: Together, alone: dict[str, Numbers]
) -> None:
    case = layout_ranks.CASES[name]
    assert together[name]["metrics"]  # so that the state is there
    state = room / name / "state"
    one, tolerance = alone[case.like], layout_ranks.LIKES[case.like].tolerance
    back = layout_ranks.alone(case.like, models, room / "back" / name, state)
    near = 10 * tolerance
    assert back["metrics"][2] == pytest.approx(one["metrics"][2], rel=near, abs=near)
    assert_close(back["after"], one["after"], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, case in layout_ranks.CASES.items() if case.exactly]
)
def test_where_a_state_lies_changes_no_bit(name: str, together: Together) -> None:
    """On a CPU, with FSDP2 on one rank too, and with checkpointed layers."""
    assert together[name] == together[layout_ranks.CASES[name].exactly]


@pytest.mark.slow
def test_experts_over_two_ranks_round_in_bfloat16_as_if_they_were_shared_with_their_layer(
    together: Together,
) -> None:
    """In step 1 routers choose by themselves, and a weight that is rounded otherwise may change a
    choice.
    """
    one, other = (together[name] for name in layout_ranks.ROUNDED)
    tolerances = {0: 1e-5, 1: 2e-2, 2: 1e-5}
    for step, tolerance in tolerances.items():
        for update in (2 * step, 2 * step + 1):
            assert_close(one["gradients"][update], other["gradients"][update], tolerance)
        near = pytest.approx(other["metrics"][step], rel=10 * tolerance, abs=10 * tolerance)
        assert one["metrics"][step] == near
