"""What may not be meant is told: at the start, and of a reward that nobody gives."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gcore_algorithms
import numpy as np
import pytest
from gcore_algorithms import teacher
from gcore_algorithms.config import GspoConfig
from gcore_environments import notes
from gcore_environments.advantages import TurnsConfig
from gcore_environments.checks import problems
from gcore_environments.rewards import EPISODES, EnvironmentReward
from gcore_environments.settings import EnvironmentConfig, EnvironmentRewardConfig

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import Prompt, RunFacts, StepReport
from gcore_core.contract.run_files import METRICS
from gcore_core.contract.scorer import ScoredRecord
from gcore_core.contract.traits import traits_of


def job(objective: Any = None, reward: bool = True, **config: Any) -> Any:
    """Makes a job as hooks see it, as far as they look."""
    objects: dict[str, Any] = {
        "objective": objective or GspoConfig(),
        "environment": EnvironmentConfig(environment="game.py:Game", **config),
        "roles.rollout": SimpleNamespace(max_new_tokens=32),
    }
    if reward:
        objects["rewards.right"] = EnvironmentRewardConfig(name="right")
    provided = {"objective": SimpleNamespace(reference="mine", owner="acme-losses 1.0")}
    settings = SimpleNamespace(run=SimpleNamespace(patience_s=600.0), speakers={})
    return SimpleNamespace(objects=objects, provided=provided, settings=settings)


def told(given: Any) -> list[str]:
    return list(notes.notes(given))


def test_a_job_in_which_all_fits_has_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAME", "chess")
    assert told(job(turn_tokens=32, variables=["GAME"])) == []
    assert told(SimpleNamespace(objects={})) == []


def test_rewards_that_nobody_reads_are_told_of() -> None:
    given = job(reward=False)
    assert "no reward of this job reads what the environment gives" in told(given)[0]
    given.objects["advantage"] = TurnsConfig()
    assert told(given) == []


def test_settings_without_effect_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAME", raising=False)
    tokens, variables = told(job(turn_tokens=33, variables=["GAME"]))
    assert tokens.startswith("environment.config.turn_tokens: 33 has no effect")
    assert variables.startswith("environment.config.variables: GAME is not set here")


def test_an_objective_that_does_not_say_so_is_to_divide_by_rows() -> None:
    (note,) = told(job(SimpleNamespace()))
    assert note.startswith("objective.use: ")
    assert "mine (acme-losses 1.0) does not say" in note and "column rows" in note


def test_every_objective_of_ours_that_reads_episodes_says_that_it_weighs_rows() -> None:
    """Those of one set of records, offline, read none."""
    found = {
        provider.name: traits_of(provider.config()).weighs_rows
        for provider in [*gcore_algorithms.gcore_objectives(), *teacher.gcore_objectives()]
    }
    assert len(found) >= 6 and all(found.values()), found


def test_a_parser_that_there_is_not_is_a_problem_of_the_job() -> None:
    (problem,) = problems({}, job(parser="hermess"))
    assert problem.startswith("environment.config.parser: ")
    assert "'hermess' (did you mean 'hermes'?)" in problem


def test_two_rewards_that_keep_episodes_are_a_problem_of_the_job() -> None:
    given = job()
    for name in ("left", "both"):
        given.objects[f"rewards.{name}"] = EnvironmentRewardConfig(keep=True)
    given.provided["environment"] = SimpleNamespace(reference="environments")
    (problem,) = problems({}, given)
    assert problem.startswith("rewards.both.config.keep: rewards.left keeps each episode already")


def facts(directory: Path, steps: int = 9) -> RunFacts:
    rewards = {
        "right": {"use": "environments", "config": {"name": "wright"}},
        "sum": {"use": "environments", "config": {}},
        "called": {"use": "environments", "config": {"name": "called"}},
        "math": {"use": "rewards/math", "config": None},
    }
    return RunFacts(name="run", directory=str(directory), steps=steps, config={"rewards": rewards})


def after(run: RunFacts, number: int, **rewards: float) -> None:
    """Ends a step: it is told of, and then in the run's file."""
    metrics = {f"reward/{name}": value for name, value in rewards.items()}
    notes.after_step(run, StepReport(step=number, version=number, metrics=metrics))
    row = {"step": number, "version": number, "time_unix_s": 0.0, "metrics": metrics}
    with (Path(run.directory) / METRICS).open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_a_reward_that_is_never_given_is_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = facts(tmp_path)
    after(run, 0)
    for number in range(1, 7):
        after(run, number, right=0.0, sum=0.0, math=0.0, called=float(number == 2))
        said = capsys.readouterr().err
        assert ("rewards.right was 0 on average in each of the first 3" in said) is (number == 3)
        assert said.count("rewards.") == int(number == 3)


def test_a_run_of_one_step_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after(facts(tmp_path, steps=1), 1, right=0.0, called=1.0)
    said = capsys.readouterr().err
    assert "rewards.right was 0 on average in the only step" in said and "'wright'" in said


def scored(rewards: dict[str, float]) -> ScoredRecord:
    text = json.dumps({"rewards": rewards}).encode()
    columns = {"episode": np.frombuffer(text, np.uint8)}
    prompt = Prompt(row=0, text="")
    return ScoredRecord(
        ordinal=0, sample=0, prompt=prompt, text="", status="finished", columns=columns
    )


def test_the_log_says_which_names_there_were(caplog: pytest.LogCaptureFixture) -> None:
    reward = EnvironmentReward(EnvironmentRewardConfig(name="wright"), WorkerContext(role="scorer"))
    for _ in range(3):
        scores = reward.score([scored({"right": 1.0, "called": 2.0})] * (EPISODES // 2))
        assert {score.value for score in scores} == {0.0}
    (line,) = caplog.messages
    assert "'wright' (did you mean 'right'?); they gave: called, right" in line


def test_a_reward_that_is_given_at_times_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    reward = EnvironmentReward(EnvironmentRewardConfig(name="right"), WorkerContext(role="scorer"))
    reward.score([scored({}), scored({"right": 0.0}), *[scored({})] * 2 * EPISODES])
    assert caplog.messages == []


@pytest.mark.parametrize("place", ["games/game:Game", "game.py", "game.py:a b", ":Game", "a..b:C"])
def test_what_names_no_class_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=r"must be file\.py:Class or package\.module:Class"):
        EnvironmentConfig(environment=place)
