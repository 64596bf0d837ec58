"""A whole run: two tensor-parallel slots teach, torch samples, and both agree after every push."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def test_trainer_and_generator_agree_after_every_push_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("gcore_torch")
    from gcore_language.testing import assert_run_agrees

    overrides = [
        "roles.policy.use=megatron",
        "roles.policy.slots=2",
        "roles.policy.config.tensor_parallel=2",
    ]
    assert_run_agrees(QUICKSTART, tmp_path / "run", 3, overrides, timeout_s=540)


@pytest.mark.slow
def test_trainer_and_generator_agree_where_the_trainer_sleeps(tmp_path: Path) -> None:
    pytest.importorskip("gcore_torch")
    from gcore_language.testing import assert_run_agrees_with_sleep

    overrides = [
        "roles.policy.use=megatron",
        "roles.policy.slots=2",
        "roles.policy.config.tensor_parallel=2",
    ]
    assert_run_agrees_with_sleep(QUICKSTART, tmp_path / "run", 3, overrides, timeout_s=540)


@pytest.mark.slow
def test_megatron_continues_a_run_started_by_torch(tmp_path: Path) -> None:
    """Two tensor-parallel slots take over from one rank of torch, with its moments, in a run of
    real processes.
    """
    pytest.importorskip("gcore_torch")
    from gcore_language.elastic import assert_run_goes_on

    overrides = [
        "roles.policy.use=megatron",
        "roles.policy.slots=2",
        "roles.policy.config.tensor_parallel=2",
    ]
    assert_run_goes_on(QUICKSTART, tmp_path, overrides, timeout_s=540)


@pytest.mark.slow
def test_a_critic_trains_beside_the_policy_in_a_run(tmp_path: Path) -> None:
    """Both by tensor parallelism, on two slots each."""
    pytest.importorskip("gcore_algorithms.critic")
    from tests.support.critic_runs import assert_a_critic_trains

    overrides = ["roles.policy.config.tensor_parallel=2", "roles.critic.config.tensor_parallel=2"]
    assert_a_critic_trains(tmp_path / "run", "megatron", overrides)
