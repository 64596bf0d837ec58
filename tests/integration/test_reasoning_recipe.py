"""The curriculum's recipe: the texts that teach its model, its job, a short run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gcore_core.config.plan import load_plan
from gcore_core.contract.factories import import_file
from tests.support import peers
from tests.support.recipe_runs import ten_steps

pytest.importorskip("gcore_environments")
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def model() -> ModuleType:
    return import_file(RECIPES / "reasoning" / "model.py")


def test_teaching_texts_are_sums_that_are_worked_out_or_guessed(model: ModuleType) -> None:
    """What is worked out is right; what is guessed is near."""
    np = pytest.importorskip("numpy")
    random = np.random.default_rng(0)
    worked = 0
    for _ in range(1000):
        for number, terms in enumerate(model.TERMS):
            asked, said = model.problem(random, terms)
            digits = asked[:-1].replace("-", "+-").split("+")
            assert len(digits) == terms and len(asked) == 2 * terms
            value = sum(map(int, digits))
            work, _, answer = said.rpartition("=")
            assert abs(int(answer) - value) <= (0 if work else model.OFF_BY)
            if work:
                worked += 1
                sums = [sum(map(int, digits[: n + 1])) for n in range(terms)]
                assert work == "".join(f":{total}" for total in sums)
            assert len(said) + 1 <= model.ANSWER_TOKENS[number]
    assert 0.26 < worked / 3000 < 0.34


def test_the_policy_says_the_answers_and_their_ends_alone(model: ModuleType) -> None:
    np = pytest.importorskip("numpy")
    tokenizer = model.tokenizer()
    ids, own = model.texts(np.random.default_rng(0), 50)
    for row, mine in zip(ids.tolist(), own.tolist(), strict=True):
        said = [token for token, is_own in zip(row, mine, strict=True) if is_own]
        assert said.count(model.arithmetic.EOS) == len(model.TERMS)
        given = [token for token, is_own in zip(row, mine, strict=True) if not is_own]
        assert tokenizer.decode(given).count("=") == len(model.TERMS)
        assert ":" not in tokenizer.decode(given)


def test_the_tokenizer_reads_a_question_of_the_library_as_a_sum(model: ModuleType) -> None:
    pytest.importorskip("tokenizers")
    asked = "State the final answer to the following arithmetic problem: 5 + 6 - 3 ="
    assert model.tokenizer().encode(asked).tokens == ["<bos>", *"5+6-3="]


def test_the_yaml_is_a_valid_job_whose_turns_have_room(model: ModuleType) -> None:
    for plugin in ("gcore_torch", "gcore_report"):
        pytest.importorskip(plugin)
    plan = load_plan(RECIPES / "reasoning.yaml")
    levels = plan.at("environment.config.levels")
    assert tuple(level["max_terms"] for level in levels) == model.TERMS
    assert plan.at("environment.config.turns") >= len(levels)
    assert plan.at("environment.config.turn_tokens") >= max(model.ANSWER_TOKENS)
    assert plan.at("roles.rollout.config.max_new_tokens") >= sum(model.ANSWER_TOKENS)
    data, held_out = plan.at("data.config"), plan.at("evaluation.data.config")
    assert held_out["begin"] >= data["rows"]
    assert held_out["begin"] + held_out["rows"] <= plan.at("environment.config.size")


@pytest.mark.rest
def test_ten_steps_end_and_harder_questions_are_asked_of_who_is_right(tmp_path: Path) -> None:
    """What is asked on the second level is given, so it is among the masked tokens."""
    own = importlib.util.find_spec("reasoning_gym")
    python = sys.executable if own else peers.interpreter("reasoning", "reasoning-gym==0.1.25")
    overrides = [
        "roles.policy.model.make.config.steps=200",
        f"environment.config.python={python}",
    ]
    rows = ten_steps("reasoning", tmp_path, *overrides)
    assert rows[-1]["step"] == 10
    metrics = [row["metrics"] for row in rows[1:]]
    assert all(0 < row["reward/right"] < 3 for row in metrics)
    assert max(row["logprob_gap_max"] for row in metrics) < 1e-3
    assert all(row["masked_share"] > 0 for row in metrics), "a second question was asked"
