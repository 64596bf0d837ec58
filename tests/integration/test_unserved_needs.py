"""A need of a plugin that nobody serves ends the run, also where the plugin checks nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

OUTSIDE = '''
"""Providers of an author who has written no ``gcore_check``."""
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_core.kits.programs import Ahead, StepProgram, Stopwatch, SyncConfig
from gcore_testing import fake


class Runs(StepProgram):
    """Generates one step ahead, and pushes while samples run."""

    def make_schedule(self, config):
        return Ahead.of(config, self.context.facts, ahead=1, age=1)

    async def run(self):
        try:
            await super().run()
        finally:
            await self.producer.stop()

    async def step(self, step):
        watch = Stopwatch(self.context.trace, step)
        taken = await self.take(step)
        trained = await self.train(step, taken, watch)
        return await self.end(step, self.producer.seal(taken), trained, watch)


class Adapts(fake.FakeObjective):
    def observe(self, metrics):
        pass

    def state(self):
        return {"steps": 0}

    def restore(self, state):
        pass


class Stays(Adapts):
    def state(self):
        return {}


@dataclass(frozen=True, kw_only=True)
class CorrectsConfig:
    def traits(self):
        return Traits(takes_stale=True)


@dataclass(frozen=True, kw_only=True)
class ValuesConfig:
    def traits(self):
        return Traits(requires=frozenset({"values"}))


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    def traits(self):
        return Traits(requires=frozenset({"logp@group"}))


@dataclass(frozen=True, kw_only=True)
class ReplaysConfig(fake.FakeTrainerConfig):
    def traits(self):
        return Traits(needs_routing=True)


@dataclass(frozen=True, kw_only=True)
class DrawsConfig(fake.FakeGeneratorConfig):
    def traits(self):
        return Traits(receives_weights=True)


@hookimpl
def gcore_controllers():
    yield p.ControllerProvider(
        name="runs", summary="-", factory="outside:Runs", config=SyncConfig,
        calls={
            "generator": frozenset({"generate", "push"}),
            "trainer": frozenset({"prepare", "train", "push", "save"}),
            "scorer": frozenset({"score"}),
        },
        parts=p.PARTS,
    )


@hookimpl
def gcore_advantages():
    yield p.AdvantageProvider(
        name="actions", summary="-", factory="outside:make", level="action",
    )


@hookimpl
def gcore_objectives():
    yield p.ObjectiveProvider(
        name="values", summary="-", factory="outside:make", config=ValuesConfig,
    )
    yield p.ObjectiveProvider(
        name="tokens", summary="-", factory="outside:make", config=TokensConfig,
    )
    yield p.ObjectiveProvider(name="adapts", summary="-", factory="outside:Adapts")
    yield p.ObjectiveProvider(name="stays", summary="-", factory="outside:Stays")
    yield p.ObjectiveProvider(
        name="corrects", summary="-", factory="outside:make", config=CorrectsConfig,
    )


def make(config):
    return fake.FakeObjective(None)


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(
        name="replays", summary="-", factory="gcore_testing.fake:FakeTrainer", config=ReplaysConfig,
    )


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(
        name="draws", summary="-", factory="gcore_testing.fake:FakeGenerator", config=DrawsConfig,
    )
'''


def finished(directory: Path, **changes: Any) -> tuple[int, str]:
    """Returns how a run with parts of that plugin ends, and what it says, in one line."""
    job = runs.job(launcher={"use": "core/inline"}, **changes)
    job["local"].append("outside.py")
    directory.mkdir(exist_ok=True)
    (directory / "outside.py").write_text(OUTSIDE)
    code, run = runs.finish(directory, job)
    return code, " ".join(run.output.split())


AHEAD = {"controller": {"use": "outside/runs"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"objective": {"use": "outside/adapts"}},
            "outside.py:Adapts adapts its loss to what steps measure, and trainer ",
        ),
        (
            AHEAD,
            "fake does not correct for actions that older weights sampled, and controller "
            "outside/runs trains on such actions",
        ),
        (
            {
                **AHEAD,
                "objective": {"use": "outside/corrects"},
                "roles": {"policy": {"use": "fake"}, "rollout": {"use": "outside/draws"}},
            },
            "controller outside/runs pushes while samples run, and outside/draws is not known to "
            "go on with them",
        ),
        (
            {"roles": {"policy": {"use": "outside/replays"}, "rollout": {"use": "fake"}}},
            "fake does not say under these settings which experts computed a token, and "
            "outside/replays, which roles.policy uses, is to replay them",
        ),
        (
            {"objective": {"use": "outside/values"}},
            "trouble/recording has no value head, which objective (outside/values) trains",
        ),
        (
            {"objective": {"use": "outside/tokens"}},
            "trouble/recording, which roles.policy uses, does not compute them",
        ),
        (
            {"advantage": {"use": "outside/actions"}},
            "trouble/recording cannot compute advantages for each action, as outside/actions does",
        ),
    ],
    ids=["adapts", "stale", "cut", "routing", "values", "tokens", "actions"],
)
def test_a_need_that_nobody_serves_ends_the_run(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    code, output = finished(tmp_path, **changes)
    assert code != 0
    assert said in output, output


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"use": "outside/stays"}},
        {**AHEAD, "objective": {"use": "outside/corrects"}},
    ],
    ids=["stays", "ahead"],
)
def test_needs_that_are_served_let_it_run(changes: dict[str, Any], tmp_path: Path) -> None:
    code, output = finished(tmp_path, **changes)
    assert code == 0, output
