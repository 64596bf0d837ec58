"""The recipe of a game: the texts that teach its model, its rules, its job, a short run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import pytest

from gcore_core.config.plan import load_plan
from gcore_core.contract.factories import import_file
from tests.support.recipe_runs import ten_steps

pytest.importorskip("gcore_environments")
RECIPES = Path(__file__).parents[2] / "recipes"
FOLDER = RECIPES / "noughts"


@pytest.fixture(scope="module")
def model() -> ModuleType:
    return import_file(FOLDER / "model.py")


def play(moves: str, number: int = 0) -> tuple[list[str], dict[str, float]]:
    """Plays a game; returns which player read which board, and the rewards."""
    from gcore_environments import Reply

    async def game() -> tuple[list[str], dict[str, float]]:
        environment = import_file(FOLDER / "noughts.py").Noughts()
        seen = await environment.reset({"number": number}, seed=3)
        read = []
        for move in moves:
            read.append(f"{seen.player} {seen.messages[0]['content']}")
            seen = await environment.step(Reply(text=move))
        assert seen.done
        return read, seen.rewards

    return asyncio.run(game())


# -- texts that teach ------------------------------------------------------------------------------


def test_teaching_texts_are_boards_of_one_player_and_moves_to_empty_squares(
    model: ModuleType,
) -> None:
    np = pytest.importorskip("numpy")
    tokenizer = model.tokenizer()
    ids, own = model.texts(np.random.default_rng(0), 300)
    begun = 0
    for row, mine in zip(ids.tolist(), own.tolist(), strict=True):
        text = tokenizer.decode(row)
        turns = [text[at : at + 11] for at in range(0, len(text), 11)]
        said = [token for token, is_own in zip(row, mine, strict=True) if is_own]
        assert tokenizer.decode(said) == "".join(turn[10] for turn in turns)
        assert said[1::2] == [model.arithmetic.EOS] * len(turns)
        begun += "o" not in turns[0]
        for count, turn in enumerate(turns):
            board, square = turn[:9], turn[10]
            assert turn[9] == "=" and square in board
            assert board.count("x") == count
            assert board.count("o") == count + ("o" in turns[0])
    assert begun == 150, "each player begins in half of them"


def test_what_is_taught_plays_by_lot(model: ModuleType) -> None:
    """Of two who do so the one that begins wins 58 games in 100."""
    np = pytest.importorskip("numpy")
    random = np.random.default_rng(1)
    won = 0
    for _ in range(2000):
        board, square = model.game(random, "0")[-1]
        marks = {str(at) for at in range(9) if board[at] == "x"} | {square}
        won += any(set(line) <= marks for line in model.noughts.LINES)
    assert 0.54 < won / 2000 < 0.63


# -- the environment -------------------------------------------------------------------------------


def test_each_player_reads_its_own_marks_as_x() -> None:
    read, _ = play("404")
    assert read == ["0 012345678=", "1 0123o5678=", "0 o123x5678="]


@pytest.mark.parametrize(
    ("moves", "number", "winner"),
    [
        ("03142", 0, "0"),
        ("03142", 1, "1"),
        ("031485", 0, "1"),
        ("031485", 1, "0"),
        ("402635178", 0, ""),
        ("44", 0, "0"),
        ("44", 1, "1"),
        ("x", 0, "1"),
    ],
)
def test_three_in_a_line_win_and_a_square_that_is_not_empty_loses(
    moves: str, number: int, winner: str
) -> None:
    rewards = {"0/win": float(winner == "0"), "1/win": float(winner == "1")}
    assert play(moves, number)[1] == rewards


def test_a_lot_moves_where_the_opponent_begins_with_no_square() -> None:
    """The same one each time, and the policy has a turn in every game."""
    read, _ = play("xx", number=1)
    assert read == play("xx", number=1)[0]
    assert read[0] == "1 012345678=" and read[1].startswith("0 ") and read[1].count("o") == 1


# -- the job ---------------------------------------------------------------------------------------


def test_the_yaml_is_a_valid_job_whose_opponent_is_the_start() -> None:
    for plugin in ("gcore_torch", "gcore_report"):
        pytest.importorskip(plugin)
    plan = load_plan(RECIPES / "noughts.yaml")
    assert plan.at("environment.config.environment") == f"{FOLDER}/noughts.py:Noughts"
    assert plan.at("environment.roles") == {"1": "opponent"}
    assert plan.at("roles.opponent.model") == plan.at("roles.policy.model")
    assert plan.at("run.steps") * plan.at("controller.config.prompts") <= 4096
    assert plan.at("evaluation.data.config.begin") >= plan.at("data.config.rows")
    assert plan.at("environment.config.turns") >= 9
    assert plan.at("roles.rollout.config.max_new_tokens") >= 5 * 2


@pytest.mark.rest
def test_ten_steps_improve_the_policy(tmp_path: Path) -> None:
    """A short run, as a person starts it, against an opponent that stays as it was."""
    rows = ten_steps("noughts", tmp_path)
    before, after = (rows[at]["evaluation"]["sampled/win"] for at in (0, -1))
    assert 0.3 < before < 0.55
    assert after > before
    assert rows[-1]["metrics"]["logprob_gap_max"] < 1e-3
