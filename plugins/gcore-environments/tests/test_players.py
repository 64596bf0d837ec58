"""A game of two in one record: whose turn is whose, and who earned what."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_environments.advantages import TurnAdvantage, TurnsConfig
from gcore_environments.draws import EpisodeDraws
from gcore_environments.scripted import ScriptedEngine
from gcore_environments.settings import EnvironmentConfig
from gcore_language.action_advantages import per_action

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import import_file
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FINISHED, Prompt
from gcore_core.contract.trainer import TrainRecord

HERE = Path(__file__).parent
PATIENCE_S = 120.0


@pytest.fixture
def game(tmp_path: Path) -> Iterator[Finished]:
    """Gives the record of a game of two rounds."""
    transformers = pytest.importorskip("transformers")
    task = import_file(HERE.parents[2] / "recipes" / "quickstart" / "arithmetic.py")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=task._tokenizer(), bos_token="<bos>", eos_token="<eos>"
    )
    draws = EpisodeDraws(
        EnvironmentConfig(environment=f"{HERE}/seats.py:Seats", turn_s=PATIENCE_S),
        WorkerContext(role="rollout", deterministic=True, directory=str(tmp_path)),
        ScriptedEngine(tokenizer, lambda text: "25"),
    )
    try:
        draws.submit([SampleRequest(ordinal=0, sample=0, seed=1, prompt=Prompt(row=0, text="1"))])
        until_s = time.monotonic() + PATIENCE_S
        while not (ended := draws.step()):
            assert time.monotonic() < until_s
        yield ended[0]
    finally:
        draws.close()


def test_a_game_of_two_is_one_record_with_a_sequence_for_each(game: Finished) -> None:
    assert game.status == FINISHED, game.reason
    assert len(game.columns["sequences"]) == 2
    assert game.columns["turns"][:, 3].tolist() == [0, 0, 1, 1]
    episode: dict[str, Any] = json.loads(game.columns["episode"].tobytes())
    assert list(episode["players"]) == ["1", "2"]
    assert episode["forks"] == {"player": 1}


def test_a_reward_that_names_a_player_goes_to_that_players_latest_turn(game: Finished) -> None:
    """One that names none goes to the latest turn of all, which is the second player's."""
    reward = game.columns["turn_reward"]
    earned = [float(reward[begin:end].sum()) for begin, end, _, _ in game.columns["turns"]]
    assert earned == [0.0, 1.0, 0.0, -0.5]


def test_each_players_turns_are_compared_with_that_players_in_other_games(game: Finished) -> None:
    class OneRank:
        def add_up(self, terms: Any) -> Any:
            return {name: tuple(map(sum, zip(*rows, strict=True))) for name, rows in terms.items()}

    lost = {**game.columns, "turn_reward": -game.columns["turn_reward"]}
    records = [
        TrainRecord(ordinal=0, sample=sample, minibatch=0, columns=columns)
        for sample, columns in enumerate((game.columns, lost))
    ]
    advantage = TurnAdvantage(TurnsConfig(rest=False))
    ranks: Any = OneRank()
    computed = per_action(advantage, records, np.zeros(2), ranks)
    begins = game.columns["turns"][:, 0]
    assert computed.advantages[0][begins].tolist() == [2.0, 2.0, -1.0, -1.0]
    assert computed.advantages[1][begins].tolist() == [-2.0, -2.0, 1.0, 1.0]
