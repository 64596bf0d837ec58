"""A job chooses what its policy acts in under ``environment``; the policy's generator must fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.providers import EnvironmentProvider

GAMES = """
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits


@dataclass(frozen=True)
class GamesConfig:
    turns: int = 8
    file: str = ""
    python: str = ""


@dataclass(frozen=True)
class EngineConfig:
    tokens: bool = True

    def traits(self):
        return Traits(tokens=self.tokens)


@dataclass(frozen=True)
class TurnsConfig:
    def traits(self):
        return Traits(requires={"turn_reward"})


@hookimpl
def gcore_environments():
    yield p.EnvironmentProvider(
        summary="games", factory="gcore_games:make", config=GamesConfig, columns=("turn_reward",)
    )


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(summary="samples", factory="gcore_games:make", config=EngineConfig)


@hookimpl
def gcore_advantages():
    for level in ("action", "record"):
        yield p.AdvantageProvider(
            name=level, summary="-", factory="gcore_games:make", config=TurnsConfig, level=level
        )


@hookimpl
def gcore_objectives():
    yield p.ObjectiveProvider(summary="loss", factory="gcore_games:make", config=TurnsConfig)
"""
ACTS = "environment: {use: games, config: {turns: 2}}\n"
ROLES = "roles: {policy: {use: fake}, rollout: {use: games}}\n"

Job = Callable[..., Path]


@pytest.fixture
def games(job: Job, installed: InstalledPlugins) -> Job:
    installed.add("games", GAMES)
    return job


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_plan(file, overrides)
    return str(caught.value)


def test_a_job_without_the_section_has_no_environment(job: Job) -> None:
    plan = load_plan(job())
    assert plan.settings.environment is None
    assert "environment" not in plan.provided


def test_an_environment_is_chosen_with_settings_of_its_own(games: Job) -> None:
    plan = load_plan(games(ACTS + ROLES))
    assert plan.provided["environment"].reference == "games"
    factory = plan.factory("environment")
    assert (factory.factory, factory.config) == (
        "gcore_games:make",
        {"turns": 2, "file": "", "python": ""},
    )


def test_an_unknown_setting_of_an_environment_is_refused_by_its_path(games: Job) -> None:
    text = refusal(games(ACTS + ROLES), "environment.config.turnz=3")
    assert text.startswith("environment.config.turnz")


def test_a_generator_that_takes_no_tokens_is_refused(games: Job) -> None:
    text = refusal(games(ACTS + ROLES), "roles.rollout.config.tokens=false")
    assert text.startswith("roles.rollout.use: games cannot go on behind given tokens")
    assert "take a generator with the trait tokens" in text


def test_an_objective_may_require_what_an_environment_gives(games: Job) -> None:
    load_plan(games(ACTS + ROLES), ["objective.use=games"])
    text = refusal(games(ROLES), "objective.use=games")
    assert "requires 'turn_reward', which nothing supplies" in text


def test_an_advantage_of_records_sees_no_column_of_an_environment(games: Job) -> None:
    text = refusal(games(ACTS + ROLES), "advantage.use=games/record")
    assert "advantage: requires 'turn_reward', which nothing supplies" in text


def test_an_advantage_of_actions_may_require_what_an_environment_gives(games: Job) -> None:
    # The trainer of this job computes no advantages of actions; that is its only problem.
    text = refusal(games(ACTS + ROLES), "advantage.use=games/action")
    assert text.startswith("roles.policy.use: fake cannot compute advantages for each action")


@pytest.mark.parametrize("name", ["action_ids", "turn reward"])
def test_a_column_that_is_no_new_one_makes_a_description_invalid(name: str) -> None:
    provider = EnvironmentProvider(summary="games", factory="games:make", columns=(name,))
    assert [text for text in provider.problems("games") if name in text]


def test_files_of_an_environment_are_relative_to_the_job(games: Job) -> None:
    file = games(ACTS + ROLES)
    plan = load_plan(file, ["environment.config.file=maze.py:Maze"])
    assert plan.objects["environment"].file == f"{file.parent / 'maze.py'}:Maze"
    elsewhere = [
        "environment.config.file=mazes.small:Maze",
        "environment.config.python=./own/python",
    ]
    plan = load_plan(file, elsewhere)
    assert plan.objects["environment"].file == "mazes.small:Maze"
    assert plan.objects["environment"].python == str(file.parent / "own/python")


WITH_OPPONENT = ROLES.replace("}}", "}, opponent: {use: games}}")


def test_a_role_that_speaks_for_a_player_is_a_generator_without_a_plugin_of_its_own(
    games: Job,
) -> None:
    plan = load_plan(games(ACTS + WITH_OPPONENT), ["environment.roles.1=opponent"])
    assert plan.settings.speakers == {"1": "opponent"}
    assert plan.provided["roles.opponent"].kind == "generator"


def test_a_player_may_be_a_number_in_the_file(games: Job) -> None:
    acts = ACTS.replace("}}", "}, roles: {1: opponent}}")
    assert load_plan(games(acts + WITH_OPPONENT)).settings.speakers == {"1": "opponent"}


@pytest.mark.parametrize(
    ("role", "problem"),
    [
        ("oponent", "'oponent' is no generator of this run (did you mean 'opponent'?)"),
        ("policy", "'policy' is no generator of this run; besides the policy's it has: opponent."),
        ("rollout", "rollout is the policy, which speaks for every player that is not named here"),
    ],
)
def test_only_another_generator_of_the_run_speaks_for_a_player(
    games: Job, role: str, problem: str
) -> None:
    file = games(ACTS + WITH_OPPONENT)
    text = refusal(file, "environment.roles.1=opponent", f"environment.roles.2={role}")
    assert text.startswith("environment.roles.2: ")
    assert problem in text


def test_a_role_that_neither_a_reward_nor_an_episode_asks_is_refused(games: Job) -> None:
    text = refusal(games(ACTS + WITH_OPPONENT), "environment.roles.1=rollout")
    assert "roles.opponent: no reward asks it" in text or "no loaded plugin knows" in text


def test_a_role_whose_name_an_environment_misspells_is_found(games: Job) -> None:
    text = refusal(games(ACTS + WITH_OPPONENT), "environment.roles.1=oponent")
    assert text.startswith("roles.opponent: ")
    assert "did you mean 'oponent'?" in text
    assert "rewards and environment.roles name: oponent" in text


def test_a_role_that_speaks_for_a_player_follows_nobody(games: Job) -> None:
    follows = ["environment.roles.1=opponent", "roles.opponent.follows=policy"]
    text = refusal(games(ACTS + WITH_OPPONENT), *follows)
    assert text.startswith("roles.opponent.follows: weights are pushed to rollout alone")
