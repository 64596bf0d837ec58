"""The plugin ``sim`` has backends that go through the real protocol and only spend time.

A cost model says how much. With them the real supervisor, controllers, messages, store and pushes
run at hundreds of devices on one machine, in real time with many workers in a few processes
(``launcher: {use: sim/crowd}``) or on a virtual clock (``g-core sim run job.yaml``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_placement.sim import config


@hookimpl
def gcore_generators() -> Iterable[p.GeneratorProvider]:
    yield p.GeneratorProvider(
        summary="an engine with continuous batching that only spends time",
        factory="gcore_placement.sim.generator:SimGenerator",
        config=config.GeneratorConfig,
    )


@hookimpl
def gcore_trainers() -> Iterable[p.TrainerProvider]:
    yield p.TrainerProvider(
        summary="a trainer that only spends time; it can learn a table of letters",
        factory="gcore_placement.sim.trainer:SimTrainer",
        config=config.TrainerConfig,
        needs=("gcore-testing>=0.3",),
    )


@hookimpl
def gcore_objectives() -> Iterable[p.ObjectiveProvider]:
    yield p.ObjectiveProvider(
        summary="-advantage * logp, which the emulated trainer has built in",
        factory="gcore_placement.sim.objective:PolicyGradient",
    )


@hookimpl
def gcore_rewards() -> Iterable[p.RewardProvider]:
    yield p.RewardProvider(
        name="judge",
        summary="0 or 1 by chance, after the time that judges would take",
        factory="gcore_placement.sim.judge:SimJudge",
        config=config.JudgeConfig,
    )
    yield p.RewardProvider(
        name="asks",
        summary=(
            "asks an emulated judge about each record; rows say how long it thinks and "
            "whether a group teaches"
        ),
        factory="gcore_placement.sim.asking:SimAsks",
        config=config.AsksConfig,
    )


@hookimpl
def gcore_datasets() -> Iterable[p.DatasetProvider]:
    yield p.DatasetProvider(
        name="prompts",
        summary="rows that say how long their prompt and answers are",
        factory="gcore_placement.sim.prompts:SimPrompts",
        config=config.PromptsConfig,
    )


@hookimpl
def gcore_launchers() -> Iterable[p.LauncherProvider]:
    yield p.LauncherProvider(
        name="crowd",
        summary="many emulated workers in each of a few processes on this machine",
        factory="gcore_placement.sim.crowd:CrowdLauncher",
        config=config.CrowdConfig,
    )
    yield p.LauncherProvider(
        name="inline",
        summary="everything in this process; on virtual time under `g-core sim run`",
        factory="gcore_placement.sim.crowd:InlineCrowdLauncher",
        config=config.CrowdConfig,
    )


@hookimpl
def gcore_commands() -> Iterable[p.CommandProvider]:
    yield p.CommandProvider(
        name="run",
        summary="run a job of emulated backends on virtual time",
        factory="gcore_placement.sim.command:run",
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields a problem when an emulated trainer of several ranks has a learning rate."""
    role = plan["roles"]["policy"]
    if (
        role["use"].partition("/")[0] == "sim"
        and role["slots"] > 1
        and role["config"]["learning_rate"]
    ):
        yield (
            "roles.policy.config.learning_rate: ranks of an emulated trainer do not meet, so on "
            "more than one slot it "
            "must be 0."
        )
