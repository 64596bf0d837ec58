"""Whole runs whose trainer shares its model in other ways than by rows alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_language.testing import assert_run_agrees

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["tensor", "replicas"])
def test_slots_in_another_layout_agree_with_the_generator_after_every_push(
    sharding: str, tmp_path: Path
) -> None:
    overrides = [
        "cluster.devices=3",
        "roles.policy.slots=2",
        f"roles.policy.config.sharding.{sharding}=2",
    ]
    assert_run_agrees(QUICKSTART, tmp_path / "run", 2, overrides, timeout_s=500)
