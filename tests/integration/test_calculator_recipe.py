"""The calculator's recipe: the texts that teach its model, its environment, its jobs, a short run.

What must not change a run's weights is in plugins/gcore-environments/tests/test_runs.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gcore_core.config.plan import load_plan
from gcore_core.contract.factories import import_file
from tests.support.recipe_runs import ten_steps

pytest.importorskip("gcore_environments")
RECIPES = Path(__file__).parents[2] / "recipes"
FOLDER = RECIPES / "calculator"


@pytest.fixture(scope="module")
def model() -> ModuleType:
    return import_file(FOLDER / "model.py")


@pytest.fixture
def calculator() -> Any:
    return import_file(FOLDER / "calculator.py").Calculator()


# -- texts that teach ------------------------------------------------------------------------------


def test_teaching_texts_are_what_an_episode_looks_like(model: ModuleType) -> None:
    """Guesses are near the sum; calls are right, and what the adder says is not the policy's."""
    np = pytest.importorskip("numpy")
    task = model.arithmetic
    tokenizer = task._tokenizer()
    calls = 0
    ids, own = model.texts(np.random.default_rng(0), 500)
    for row, mine in zip(ids.tolist(), own.tolist(), strict=True):
        prompt, _, said = tokenizer.decode(row).partition("=")
        total = sum(int(digit) for digit in prompt.split("+"))
        policy = tokenizer.decode(
            [token for token, is_own in zip(row, mine, strict=True) if is_own]
        )
        if said.startswith("*"):
            calls += 1
            assert said == f"*{prompt}n:{total:02d}y{total:02d}"
            assert policy == f"*{prompt}n{total:02d}"
        else:
            assert said == policy and said[0] == "?"
            assert abs(int(said[1:]) - total) <= task.CARELESS_OFF_BY
        assert not task.is_held_out(int(prompt.replace("+", "")))
    assert 0.24 < calls / 500 < 0.36


# -- the environment -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "told"),
    [("*7+3+8+5+2n", ":25y"), ("*7+3n", ":10y"), ("*7++3n", ":n"), ("*n", ":n"), ("*", ":n")],
)
def test_a_call_is_told_the_sum(calculator: Any, said: str, told: str) -> None:
    observation = step(calculator, said)
    assert [message["content"] for message in observation.messages] == [told]
    assert not observation.done


@pytest.mark.parametrize(
    ("said", "status", "right"),
    [
        ("25", "finished", 1.0),
        ("?25", "finished", 1.0),
        ("?24", "finished", 0.0),
        ("", "finished", 0.0),
        ("25", "truncated", 0.0),
        ("*7+3", "truncated", 0.0),
    ],
)
def test_the_last_two_characters_are_the_answer(
    calculator: Any, said: str, status: str, right: float
) -> None:
    observation = step(calculator, said, status)
    assert observation.done
    assert observation.rewards == {"right": right}


def step(calculator: Any, said: str, status: str = "finished") -> Any:
    from gcore_environments import Reply

    async def episode() -> Any:
        await calculator.reset({"prompt": "7+3+8+5+2=", "answer": "25"}, 0)
        return await calculator.step(Reply(text=said, status=status))

    return asyncio.run(episode())


# -- the jobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["calculator", "calculator_async"])
def test_the_yaml_is_a_valid_job_whose_turns_have_room(name: str) -> None:
    for plugin in ("gcore_torch", "gcore_algorithms", "gcore_report", "gcore_async"):
        pytest.importorskip(plugin)
    plan = load_plan(RECIPES / f"{name}.yaml")
    assert plan.at("environment.config.environment") == f"{FOLDER}/calculator.py:Calculator"
    assert plan.at("run.steps") * plan.at("controller.config.prompts") <= 4096
    call = 1 + 5 + 4 + 1 + 1  # '*', digits, signs, 'n', the end
    assert plan.at("environment.config.turn_tokens") >= call
    assert plan.at("roles.rollout.config.max_new_tokens") >= call + 3


def test_both_jobs_have_the_same_task() -> None:
    pytest.importorskip("gcore_async")
    one, other = (
        load_plan(RECIPES / f"{name}.yaml") for name in ("calculator", "calculator_async")
    )
    for key in ("data", "environment", "rewards", "advantage", "roles"):
        assert one.at(key) == other.at(key), key


@pytest.mark.rest
def test_ten_steps_improve_the_policy(tmp_path: Path) -> None:
    """A short run, as a person starts it; its records have turns, and all words of the adder are
    masked.
    """
    rows = ten_steps("calculator", tmp_path)
    before, after = (rows[at]["evaluation"]["sampled/right"] for at in (0, -1))
    assert 0.15 < before < 0.5
    assert after > before + 0.1
    metrics = rows[-1]["metrics"]
    assert metrics["logprob_gap_max"] < 1e-3
    assert 0.05 < metrics["masked_share"] < 0.4
