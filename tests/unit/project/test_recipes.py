"""Recipes of real models: each is a job that loads, that is planned, and that has a page.

This machine has neither their devices nor their engines, and no hub: what a recipe may lack here is
listed. ``tests/recipes.py`` runs them, made small.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gcore_core.cli import main
from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError
from tests.recipes import NAMES

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "recipes"
#: What a recipe may lack where it is checked: engines, the venvs that have them.
LACKING = re.compile("has no (vLLM|Megatron)|there is no venv")
_PLAN = re.compile(r"g-core plan (recipes/\S+\.yaml[^\n]*)")


def job_of(name: str) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    return job


@cache
def pages() -> dict[str, str]:
    """Recipe -> the page that shows it."""
    found = {}
    for page in PAGES.glob("*.md"):
        for name in re.findall(r"\[`recipes/(\w+)\.yaml`\]", page.read_text()):
            found[name] = page.read_text()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_page_names_the_models_and_data_of_its_recipe(name: str) -> None:
    page = pages()[name]
    job = job_of(name)
    named = [role["model"]["path"] for role in job["roles"].values() if "model" in role]
    named += [job["data"]["config"]["path"]]
    for path in named:
        assert path in page, f"docs/recipes does not name {path} of {name}"
    assert "easured by us" in page


def commands() -> list[str]:
    return sorted({command for page in pages().values() for command in _PLAN.findall(page)})


def planned() -> set[str]:
    """The recipes that pages plan."""
    return {Path(command.split()[0]).stem for command in commands()}


@pytest.mark.parametrize("name", sorted(set(NAMES) - planned()))
def test_a_recipe_is_a_job_that_loads(name: str) -> None:
    """One that is planned loads too; these are stages that another one's page shows."""
    try:
        load_plan(ROOT / "recipes" / f"{name}.yaml")
    except ConfigError as error:
        problems = error.facts.get("problems", [str(error)])
        assert not [problem for problem in problems if not LACKING.search(problem)]


@pytest.mark.parametrize("command", commands())
def test_a_recipe_fits_the_devices_that_its_page_names(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", *shlex.split(command)]) == 0
    assert "what is known fits" in capsys.readouterr().out


def test_every_recipe_is_planned_on_some_page() -> None:
    assert planned() | {"feedback_reward_model"} == set(NAMES)


#: Recipe -> TFLOP of one call of its transformer for an image of 512 x 512 and 256 tokens of T5
#: (77 of CLIP beside them in SD3), by torch's FlopCounterMode on the meta device; calls for each
#: trained step; the seconds and hours of its page at the peak of 4 H100 in bfloat16.
HOURS = {
    "sd35_flow_grpo": (2.442642604, 4, "15 s a step", "at least 4 for 1,000 steps"),
    "flux_flow_grpo": (17.686253273, 3, "108 s a step", "at least 15 for 500 steps"),
}


@pytest.mark.parametrize("name", HOURS)
def test_hours_of_an_image_recipe_are_the_arithmetic_of_its_job(name: str) -> None:
    tflop, trained_calls, seconds, hours = HOURS[name]
    job = job_of(name)
    sampler = job["roles"]["rollout"]["config"]
    assert (sampler["height"], sampler["width"]) == (512, 512)
    guided = 2 if name == "sd35_flow_grpo" else 1
    images = job["controller"]["config"]["prompts"] * job["advantage"]["config"]["group_size"]
    trained = sampler["steps"] - 1  # the last step draws no noise
    calls = images * guided * (sampler["steps"] + trained * trained_calls)
    devices = job["roles"]["policy"]["slots"]
    assert devices == job["roles"]["rollout"]["slots"] == 4
    step_s = calls * tflop / (devices * 989)
    assert f"{step_s:.0f} s a step" == seconds
    steps = job["run"]["steps"]
    assert f"at least {step_s * steps / 3600:.0f} for {steps:,} steps" == hours
    assert seconds in pages()[name] and hours in pages()[name]


def test_the_list_of_recipes_is_whole() -> None:
    for text in ((PAGES / "index.md").read_text(), (ROOT / "README.md").read_text()):
        for page in PAGES.glob("*.md"):
            assert page.stem == "index" or f"{page.stem}.md" in text
