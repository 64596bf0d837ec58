"""Adapters on ranks that share the model: the same numbers, and states for any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing.runs import run_together

from tests.support import lora_ranks

pytestmark = pytest.mark.rest

#: float32 sums in another order, and bfloat16 ones, through four updates.
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-3}


@pytest.fixture(scope="module")
def works(
    model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Returns what one rank, two ranks, and one rank that goes on from the two came to."""
    room = tmp_path_factory.mktemp("lora")
    model = model_dirs["qwen2"]
    two = room / "two"
    two.mkdir()
    given = ["2", str(model), str(two)]
    run_together([["-m", lora_ranks.__name__, str(rank), *given] for rank in range(2)])
    return {
        "one": lora_ranks.run(0, 1, model, room / "one", None),
        "two": json.loads((two / "numbers.json").read_text()),
        "two, then one": lora_ranks.run(0, 1, model, room / "resumed", two),
    }


@pytest.mark.parametrize("case", lora_ranks.CASES)
def test_two_sharded_ranks_give_the_numbers_of_one_also_when_one_goes_on_from_two(
    case: str, works: dict[str, dict[str, Any]]
) -> None:
    dtype = lora_ranks.CASES[case][2]
    exact = case.startswith("exact")
    one = works["one"][case]
    for other in (works["two"][case], works["two, then one"][case]):
        assert not exact or one == other
        for alone, together in zip(one["metrics"], other["metrics"], strict=True):
            tolerance = 10 * TOLERANCES[dtype]
            assert alone == pytest.approx(together, rel=tolerance, abs=tolerance)
        assert one["adapter"].keys() == other["adapter"].keys()
        for name, values in one["adapter"].items():
            np.testing.assert_allclose(
                values, other["adapter"][name], atol=TOLERANCES[dtype], err_msg=name
            )
