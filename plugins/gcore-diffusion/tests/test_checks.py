"""What is refused before anything starts, and that the recipe is a valid job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gcore_diffusion.checks import file_problems, problems
from gcore_diffusion.config import DiffusionGeneratorConfig, DiffusionTrainerConfig

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "recipes/digits.yaml"


def test_the_recipe_is_a_valid_job() -> None:
    plan = load_plan(RECIPE, [])
    assert plan.config["objective"]["use"] == "algorithms/ppo_clip"
    assert list(problems(plan.config)) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["roles.policy.engine={compile: true}"],
            r"roles.policy.engine: diffusion has no engine, so compile would go nowhere",
        ),
        (
            ["roles.rollout.config.guidance=3.0"],
            r"roles.rollout.config.guidance: is 3.0, but 1.0 in roles.policy",
        ),
        (
            ["roles.policy.config.dtype=bfloat16"],
            r"roles.rollout.config.dtype: is 'float32', but 'bfloat16'",
        ),
        (
            ["roles.policy.config.lora.rank=8"],
            r"roles.rollout.config.lora: is .*, but .* in roles.policy",
        ),
        (
            ["roles.rollout.config.scale=0"],
            r"without noise there are no actions, which algorithms/ppo_clip needs",
        ),
        (["roles.rollout.config.window=11"], r"window: must be in 0..9, is 11"),
        (["roles.policy.config.weight_decay=-0.1"], r"weight_decay: must not be negative, is -0.1"),
        (["roles.policy.config.final_fraction=2"], r"final_fraction: must be in 0..1, is 2"),
        (
            ["objective.config.entropy_coefficient=-0.1", "advantage.use=algorithms/gae"],
            r"requires 'values'",
        ),
    ],
)
def test_incompatible_choices_are_refused_with_their_path(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_plan(RECIPE, overrides)


def test_the_forward_objective_accepts_the_deterministic_sampler() -> None:
    plain: dict[str, Any] = {"use": "diffusion/nft", "config": None}
    plan = load_plan(
        RECIPE, ["roles.rollout.config.scale=0"] + ["objective.use=diffusion/nft"] + _cleared()
    )
    assert plan.config["objective"]["use"] == plain["use"]


def _cleared() -> list[str]:
    """The recipe's settings of another objective, in this one's words."""
    return ["objective.config=null"]


def test_the_forward_objective_is_refused_for_a_language_trainer() -> None:
    plan = {
        "objective": {"use": "diffusion/nft"},
        "roles": {"policy": {"use": "torch", "config": {}}},
    }
    assert list(problems(plan)) == [
        (
            "objective.use: diffusion/nft teaches denoisers, and roles.policy uses none; choose "
            "another."
        )
    ]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"kl_coefficient": 0.1, "reference": False}, "kl_coefficient: needs reference: true"),
        ({"guidance": 0.5}, "guidance: must be at least 1, is 0.5"),
        ({"betas": [0.9]}, "betas: must be two numbers in 0..1"),
        ({"draws": 0}, "draws: must be positive, is 0"),
        ({"final_fraction": -0.5}, "final_fraction: must be in 0..1, is -0.5"),
        ({"max_sequence_length": 0}, "max_sequence_length: must be positive, is 0"),
    ],
)
def test_error_for_an_invalid_setting_names_the_setting(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        DiffusionTrainerConfig(**settings)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"shift": 0.0}, "shift: must be positive, is 0.0"),
        ({"height": -8}, "height: must not be negative, is -8"),
        ({"width": -8}, "width: must not be negative, is -8"),
    ],
)
def test_error_for_an_invalid_setting_of_a_sampler_names_it(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        DiffusionGeneratorConfig(**settings)
    assert told in str(caught.value)


def test_a_prompt_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    from gcore_core.builtin.config import JsonLinesConfig
    from gcore_core.builtin.json_lines import JsonLines
    from gcore_core.contract.errors import DataError

    with pytest.raises((ConfigError, DataError), match="gone.jsonl"):
        JsonLines(JsonLinesConfig(path=str(tmp_path / "gone.jsonl")))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises((ConfigError, DataError), match="empty"):
        JsonLines(JsonLinesConfig(path=str(tmp_path / "empty.jsonl")))


def test_a_directory_that_is_no_pipeline_and_one_that_is_not_there_are_told(
    tmp_path: Path,
) -> None:
    def told(path: Path, here: bool = True) -> list[str]:
        role = {"use": "diffusion", "model": {"path": str(path)}}
        said = file_problems({"roles": {"policy": role}}, here)
        return [one for one in said if isinstance(one, str)]

    [problem] = told(tmp_path)
    assert problem.startswith(f"roles.policy.model.path: {tmp_path} has neither a model_index.json")
    [problem] = told(tmp_path / "none")
    assert "there is no directory" in problem
    assert told(tmp_path / "none", here=False) == []
    (tmp_path / "model_index.json").touch()
    assert told(tmp_path) == []
