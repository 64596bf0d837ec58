"""A whole run whose trainer's slots share every micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_language.testing import assert_run_agrees

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.mark.slow
def test_slots_that_share_contexts_agree_with_the_generator_after_every_push(
    tmp_path: Path,
) -> None:
    overrides = [
        "cluster.devices=3",
        "roles.policy.slots=2",
        "roles.policy.config.context.ring=2",
    ]
    assert_run_agrees(QUICKSTART, tmp_path / "run", 2, overrides, timeout_s=500)
