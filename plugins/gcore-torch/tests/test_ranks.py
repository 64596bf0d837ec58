from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_core.testing.runs import run_together

TESTS = Path(__file__).parent


def run_alone(model: Path, work: Path, resume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TESTS)
    spec = importlib.util.spec_from_file_location("two_ranks", TESTS / "two_ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.run(0, 1, model, work, resume)


def run_two(model: Path, work: Path, resume: Path) -> None:
    given = ["2", str(model), str(work), str(resume)]
    run_together([[str(TESTS / "two_ranks.py"), str(rank), *given] for rank in range(2)])


def test_two_sharded_ranks_are_one(
    model_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics and weights, also when each goes on from the state that the other number of ranks
    saved.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    (two / "meet").mkdir(parents=True)
    run_alone(model_dirs["qwen2"], one, one / "state", monkeypatch)
    run_two(model_dirs["qwen2"], two, one / "state")
    left, right = (json.loads((work / "numbers.json").read_text()) for work in (one, two))
    assert len(left["metrics"]) == 5
    for alone, together in zip(left["metrics"], right["metrics"], strict=True):
        assert alone == pytest.approx(together, rel=1e-4, abs=1e-6)
    run_alone(model_dirs["qwen2"], tmp_path / "back", two / "state", monkeypatch)
    back: dict[str, Any] = json.loads((tmp_path / "back" / "numbers.json").read_text())
    for key, other in (("weights", right), ("after", right), ("after", back)):
        assert left[key].keys() == other[key].keys()
        for name, values in left[key].items():
            np.testing.assert_allclose(values, other[key][name], atol=1e-5, err_msg=name)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (two / "pretrained" / name).is_file()
