"""Environments of Gymnasium and minigrid, next to plain loops over them."""

from __future__ import annotations

import random
from typing import Any

import pytest

#: Plays actions in a plain loop; prints the reward of each step, and how the episode ended.
PLAIN = """
import json, sys, gymnasium
id, options, seed, actions = json.loads(sys.argv[1])
env = gymnasium.make(id, **options)
env.reset(seed=seed)
rewards, done, truncated = [], False, False
for action in actions:
    _, reward, done, truncated, _ = env.step(action)
    rewards.append(float(reward))
    if done or truncated:
        break
print(json.dumps([rewards, bool(done), bool(truncated and not done)]))
"""
TEMPLATE = "State {state}. Answer with a number from 0 to {last}."


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("id", "options", "count"),
    [
        ("FrozenLake-v1", {}, 4),
        ("FrozenLake-v1", {"is_slippery": False}, 4),
        ("Taxi-v3", {}, 6),
        ("Taxi-v3", {"max_episode_steps": 7}, 6),
    ],
)
def test_rewards_and_ends_are_those_of_a_plain_loop(
    player: Any, id: str, options: dict[str, Any], count: int, seed: int
) -> None:
    draw = random.Random(seed)
    actions = [draw.randrange(count) for _ in range(300)]
    left = iter(actions)
    seen = player.play(
        "gymnasium:Gymnasium",
        lambda _: {"text": f"I take {next(left)}."},
        seed=seed,
        id=id,
        options=options,
        template=TEMPLATE,
    )
    rewards, done, truncated = player.plain(PLAIN, id, options, seed, actions)
    assert [one["rewards"]["game"] for one in seen[1:]] == rewards
    assert (seen[-1]["done"], seen[-1]["truncated"]) == (done, truncated)
    assert done or truncated


def test_a_game_is_won_by_names_of_actions(player: Any) -> None:
    names = ["left", "down", "right", "up"]
    way = iter(["down", "down", "right", "right", "down", "right"])
    seen = player.play(
        "gymnasium:Gymnasium",
        lambda _: {"text": f"Not UP but {next(way)}"},
        id="FrozenLake-v1",
        options={"is_slippery": False},
        actions=names,
        template="{state}: {actions}",
    )
    assert seen[0]["messages"][0]["content"] == "0: left, down, right, up"
    assert seen[-1]["rewards"] == {"game": 1.0} and seen[-1]["done"]


def test_an_answer_without_an_action_costs_what_the_job_says(player: Any) -> None:
    answers = iter([{"text": "hm, 17"}, None])
    seen = player.play(
        "gymnasium:Gymnasium",
        lambda _: next(answers),
        id="FrozenLake-v1",
        template=TEMPLATE,
        unread=0.25,
    )
    assert seen[1]["rewards"] == {"unread": -0.25}
    assert "Answer with one of: 0, 1, 2, 3" in seen[1]["messages"][0]["content"]


def test_minigrid_is_drawn_in_text(player: Any) -> None:
    way = iter(["forward", "forward", "right", "forward", "forward"])
    seen = player.play(
        "gymnasium:Gymnasium",
        lambda _: {"text": next(way)},
        id="minigrid:MiniGrid-Empty-5x5-v0",
        actions=["left", "right", "forward", "pickup", "drop", "toggle", "done"],
        template="{text}\n{state[mission]}",
    )
    assert "WGWGWGWGWG" in seen[0]["messages"][0]["content"]
    assert "get to the green goal square" in seen[0]["messages"][0]["content"]
    assert seen[-1]["done"] and seen[-1]["rewards"]["game"] > 0.9


def test_actions_that_are_no_numbers_are_refused(player: Any) -> None:
    seen = player.play(
        "gymnasium:Gymnasium", lambda _: None, id="MountainCarContinuous-v0", template="{state}"
    )
    assert "the actions of MountainCarContinuous-v0 are no numbers but Box" in seen[-1]["error"]
