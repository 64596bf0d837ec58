"""What ``g-core check`` says of jobs with trackers, before any process starts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_report.trackers import gcore_observers

from gcore_core.config import checks
from gcore_core.config.plan import Plan, load_plan
from gcore_core.contract.errors import ConfigError, GcoreError, PluginIncompatible

FAKE = Path(__file__).parents[4] / "plugins/gcore-testing/gcore_testing/fake.py"
#: An observer whose package nobody has.
LACKING = """
from gcore_core import hookimpl
from gcore_core.contract import providers as p

@hookimpl
def gcore_observers():
    yield p.ObserverProvider(summary="-", factory="lacking:x", needs=("no-such-tracker>=1.5",))
"""


def plan_of(directory: Path, *overrides: str, **observers: Any) -> Plan:
    job: dict[str, Any] = {
        "data": {"use": "fake"},
        "advantage": {"use": "fake"},
        "objective": {"use": "fake"},
        "roles": {"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
        "rewards": {"letters": {"use": "fake"}},
        "observers": observers,
        "local": [str(FAKE), "lacking.py"],
    }
    (directory / "lacking.py").write_text(LACKING)
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return load_plan(file, overrides)


def test_settings_have_paths_defaults_and_origins(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        "observers.mine.config.mode=offline",
        mine={"use": "trackers/wandb", "config": {"tags": ["a"]}},
        other={"use": "trackers/wandb", "timeout_s": 5.0},
    )
    assert plan.at("observers.mine.config.mode") == "offline"
    assert plan.at("observers.other.config.mode") == "online"
    why = plan.why("observers")
    assert 'observers.mine.config.mode = "offline"  # override' in why, why
    assert 'observers.mine.config.project = "g-core"  # default of trackers/wandb' in why
    assert "observers.other.timeout_s = 5.0  # " in why and "job.yaml" in why


@pytest.mark.parametrize(
    ("observer", "where", "problem"),
    [
        ({"use": "trackers/wanb"}, "observers.one.use", "did you mean 'trackers/wandb'?"),
        ({"use": "trackers"}, "observers.one.use", "has no default observer; say which."),
        ({"use": "fake/x"}, "observers.one.use", "has no observer named 'x'"),
        (
            {"use": "trackers/wandb", "config": {"projet": "x"}},
            "observers.one.config.projet",
            "did you mean 'project'?",
        ),
        (
            {"use": "trackers/wandb", "config": {"mode": "of"}},
            "observers.one.config.mode",
            "offline",
        ),
        ({"use": "trackers/mlflow", "config": {"project": ""}}, "observers.one.config.project", ""),
        (
            {"use": "trackers/trackio", "config": {"samples_every": -1}},
            "observers.one.config.samples_every",
            "must be at least 0, is -1.",
        ),
        (
            {"use": "trackers/mlflow", "config": {"tracking_uri": "https://me:secret@host/x"}},
            "observers.one.config.tracking_uri",
            "the configuration is no place for secrets",
        ),
        (
            {"use": "trackers/mlflow", "config": {"tracking_uri": "./mlruns"}},
            "observers.one.config.tracking_uri",
            "MLflow keeps runs in no directory any more",
        ),
        ({"use": "trackers/wandb", "timeout_s": 0}, "", "observers.one.timeout_s: must be greater"),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(
    observer: dict[str, Any], where: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(GcoreError) as raised:
        plan_of(tmp_path, one=observer)
    assert isinstance(raised.value, ConfigError)
    assert raised.value.where == where and problem in str(raised.value), raised.value
    assert "secret@" not in str(raised.value)


def test_a_package_that_is_missing_is_told_with_the_command_that_installs_it(
    tmp_path: Path,
) -> None:
    plan = plan_of(tmp_path, one={"use": "lacking"})
    with pytest.raises(PluginIncompatible) as raised:
        checks.interpreters(plan.settings, plan.provided, plan.source)
    assert raised.value.where == "observers.one.use"
    assert "-m pip install 'no-such-tracker>=1.5'" in raised.value.todo


def test_every_tracker_needs_what_its_extra_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needs = {provider.name: set(provider.needs) for provider in gcore_observers()}
    extras = project["optional-dependencies"]
    assert needs == {name: set(extras[name]) for name in needs}
