"""A whole run: the torch trainer teaches, vLLM samples, and both agree after every push."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize("transport", ["auto", "ipc", "nccl"])
def test_trainer_and_generator_agree_after_every_push_of_a_run(
    transport: str, tmp_path: Path
) -> None:
    """The last two as on CUDA, with a file in place of its handle and gloo in that of NCCL."""
    from gcore_language.testing import assert_run_agrees

    overrides = [
        "roles.rollout.use=vllm",
        "roles.rollout.follows=policy",
        "roles.rollout.config.kv_cache_gib=0.1",
        f"controller.config.push_transport={transport}",
    ]
    assert_run_agrees(QUICKSTART, tmp_path / "run", 6, overrides, timeout_s=540)


def test_trainer_and_generator_agree_on_prompts_with_images(tmp_path: Path) -> None:
    from gcore_language.testing import assert_image_run_agrees

    assert_image_run_agrees(
        "vllm", {"kv_cache_gib": 0.1, "temperature": 0.8}, tmp_path, timeout_s=540
    )
