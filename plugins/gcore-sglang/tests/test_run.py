"""A whole run: the torch trainer teaches, SGLang samples, and both agree after every push."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def test_trainer_and_generator_agree_after_every_push_of_a_run(tmp_path: Path) -> None:
    from gcore_language.testing import assert_run_agrees

    overrides = [
        "roles.rollout.use=sglang",
        "roles.rollout.follows=policy",
    ]
    assert_run_agrees(QUICKSTART, tmp_path / "run", 4, overrides, timeout_s=540)


@pytest.mark.slow
def test_trainer_and_generator_agree_on_prompts_with_images(tmp_path: Path) -> None:
    from gcore_language.testing import assert_image_run_agrees

    assert_image_run_agrees("sglang", {"temperature": 0.8}, tmp_path, timeout_s=540, patch=14)
