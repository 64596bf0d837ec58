"""Trainers that sleep: nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gcore_core.testing.runs import run_together
from tests.support import sleeping_ranks


@pytest.mark.slow
def test_ranks_that_share_a_model_have_the_bits_of_a_run_without_sleep(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "meet").mkdir()
    given = [str(model_dirs["qwen2"]), str(tmp_path)]
    run_together([["-m", sleeping_ranks.__name__, str(rank), *given] for rank in range(2)])
    without, slept = json.loads((tmp_path / "numbers.json").read_text())
    assert slept == without
