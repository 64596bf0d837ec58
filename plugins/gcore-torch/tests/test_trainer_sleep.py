"""Trainers that sleep: nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sleeping_ranks


@pytest.mark.slow
def test_ranks_that_share_a_model_have_the_bits_of_a_run_without_sleep(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    case = sleeping_ranks.case_of("torch", model_dirs["qwen2"])
    ((without, slept),) = sleeping_ranks.found_by([case], tmp_path)
    assert slept == without
