"""Whole runs whose weights travel as on CUDA, with a file in place of its handle and gloo in that
of NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_language.testing import assert_run_agrees

pytestmark = pytest.mark.rest

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize("transport", ["ipc", pytest.param("nccl", marks=pytest.mark.slow)])
def test_two_sharded_ranks_and_two_generators_agree_after_every_push(
    transport: str, tmp_path: Path
) -> None:
    overrides = ["cluster.devices=4", "roles.policy.slots=2", "roles.rollout.slots=2"]
    overrides += [f"controller.config.push_transport={transport}"]
    assert_run_agrees(QUICKSTART, tmp_path / "run", 2, overrides, timeout_s=300)
