from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing.runs import run_together

from tests.support import lockstep_ranks, torch_ranks

pytestmark = pytest.mark.rest


def run_two(packing: torch_ranks.Packing, model: Path, work: Path, resume: Path) -> None:
    given = ["2", packing, str(model), str(work), str(resume)]
    run_together([["-m", torch_ranks.__name__, str(rank), *given] for rank in range(2)])


@pytest.mark.parametrize("packing", ["auto", pytest.param("padded", marks=pytest.mark.slow)])
def test_two_sharded_ranks_match_one_rank(
    packing: torch_ranks.Packing, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Metrics and weights, also when each goes on from the state that the other number of ranks
    saved, with what the objective had learned from steps. auto is flat here; in the padded layout
    ranks pack in lock-step.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    (two / "meet").mkdir(parents=True)
    torch_ranks.run(0, 1, packing, model_dirs["qwen2"], one, one / "state")
    run_two(packing, model_dirs["qwen2"], two, one / "state")
    left, right = (json.loads((work / "numbers.json").read_text()) for work in (one, two))
    assert len(left["metrics"]) == 5
    for alone, together in zip(left["metrics"], right["metrics"], strict=True):
        assert alone == pytest.approx(together, rel=1e-4, abs=1e-6)
    torch_ranks.run(0, 1, packing, model_dirs["qwen2"], tmp_path / "back", two / "state")
    back: dict[str, Any] = json.loads((tmp_path / "back" / "numbers.json").read_text())
    for key, other in (("weights", right), ("after", right), ("after", back)):
        assert left[key].keys() == other[key].keys()
        for name, values in left[key].items():
            np.testing.assert_allclose(values, other[key][name], atol=1e-5, err_msg=name)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (two / "pretrained" / name).is_file()


def test_ranks_pack_so_that_they_wait_less_than_first_come(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    as_packed, first_come = lockstep_ranks.waits_of("torch", model_dirs["qwen2"], tmp_path)
    assert as_packed < first_come
