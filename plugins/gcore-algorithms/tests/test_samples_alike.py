"""A job whose groups are of one answer each would train on nothing, and is refused before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gcore_sglang.config import SglangGeneratorConfig
from gcore_torch.config import TorchGeneratorConfig
from gcore_vllm.config import VllmGeneratorConfig

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import traits_of

JOB = """\
launcher: {use: core/inline}
data: {use: core/jsonl, config: {path: rows.jsonl}}
advantage: {use: algorithms/grpo, config: {group_size: 4}}
objective: {use: algorithms/ppo_clip}
roles:
  policy: {use: torch, model: {path: org/name}}
  rollout: {use: torch}
rewards:
  length: {use: algorithms/overlong, config: {max_actions: 8, soft_actions: 2}}
"""
COMPARING = ("grpo", "dr-grpo", "rloo", "reinforce-pp-baseline", "gdpo")
ALIKE = ("temperature=0", "temperature=0.001", "top_k=1", "top_p=1e-6", "top_p=0.01")
Check = Callable[..., str]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Returns what a job with some settings of the rollout is refused with; "": it is not."""

    def checked(*overrides: str) -> str:
        job = tmp_path / "job.yaml"
        job.write_text(JOB)
        try:
            load_plan(job, overrides)
        except ConfigError as error:
            return str(error)
        return ""

    return checked


@pytest.mark.parametrize(
    ("name", "setting"),
    [*((name, ALIKE[0]) for name in COMPARING), *(("grpo", setting) for setting in ALIKE[1:])],
)
def test_greedy_groups_are_refused_by_every_estimator_with_a_baseline_of_the_group(
    check: Check, name: str, setting: str
) -> None:
    said = check(f"advantage.use=algorithms/{name}", f"roles.rollout.config.{setting}")
    key = setting.partition("=")[0]
    assert said.startswith(f"roles.rollout.config.{key}: with {key}=")
    assert f"algorithms/{name} compares the samples of one prompt" in said
    assert "advantage 0 and teaches nothing" in said


@pytest.mark.parametrize("setting", ["temperature=0.1", "top_k=2", "top_p=0.5"])
def test_samples_that_differ_are_not_refused(check: Check, setting: str) -> None:
    assert check(f"roles.rollout.config.{setting}") == ""


def test_where_the_batch_or_values_are_the_baseline_greedy_samples_still_teach(
    check: Check,
) -> None:
    greedy = "roles.rollout.config.temperature=0"
    assert check("advantage.use=algorithms/reinforce-pp", greedy) == ""


def test_every_engine_of_language_models_says_it() -> None:
    for config in (TorchGeneratorConfig, VllmGeneratorConfig, SglangGeneratorConfig):
        assert traits_of(config(top_k=1)).samples_alike == "top_k=1"
        assert traits_of(config()).samples_alike == ""


def test_diffusion_without_any_noise_that_differs_is_refused(check: Check) -> None:
    role = "{use: diffusion, model: {path: org/name}}"
    changes = (f"roles.policy={role}", "roles.rollout.use=diffusion", "objective.use=diffusion/nft")
    still = "roles.rollout.config.scale=0"
    assert check(*changes, still) == ""  # they begin with other noise
    said = check(*changes, still, "roles.rollout.config.same_noise=true")
    assert said.startswith("roles.rollout.config.scale: with scale=0.0 all samples")
