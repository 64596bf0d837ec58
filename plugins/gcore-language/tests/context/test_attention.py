"""Attention that ranks share is that of each whole record by torch, forward and backward."""

from __future__ import annotations

import json

import pytest
from gcore_testing.runs import run_together

from tests.support import context_ranks

pytestmark = pytest.mark.rest

#: float64: sums in another order.
_TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Returns by case how far each of four ranks is from torch."""
    work = tmp_path_factory.mktemp("ranks")
    program = ["-m", context_ranks.__name__]
    run_together([[*program, str(rank), "4", str(work)] for rank in range(4)])
    return [json.loads((work / f"gaps-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("mesh", context_ranks.MESHES, ids=str)
def test_results_and_gradients_of_two_and_four_ranks_are_those_of_torch_in_float64(
    mesh: tuple[int, int], gaps: list[dict[str, float]]
) -> None:
    name = f"ring {mesh[0]}, ulysses {mesh[1]}, "
    cases = [(case, gap) for part in gaps for case, gap in part.items() if case.startswith(name)]
    assert len(cases) == 4 * len(context_ranks.LENGTHS) * 2 * 2
    assert [(case, gap) for case, gap in cases if not gap <= _TOLERANCE] == []
