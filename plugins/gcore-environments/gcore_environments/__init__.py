"""Lets a policy act over several turns in an environment, with tools, exact to the token.

An author of environments imports the words from here: ``from gcore_environments import Tools``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.providers import (
    AdvantageProvider,
    DatasetProvider,
    EnvironmentProvider,
    RewardProvider,
)
from gcore_core.contract.records import RunFacts, StepReport
from gcore_environments.adapter_settings import (
    AviaryConfig,
    GymnasiumConfig,
    McpConfig,
    OpenEnvConfig,
    ReasoningConfig,
    ReasoningRewardConfig,
    ReasoningRowsConfig,
    TextArenaConfig,
)
from gcore_environments.advantages import TurnsConfig
from gcore_environments.numbered_rows import NumbersConfig
from gcore_environments.settings import EnvironmentConfig, EnvironmentRewardConfig, PlayConfig
from gcore_environments.words import (
    Endpoint,
    Environment,
    Observation,
    Program,
    Reply,
    ToolCall,
    Tools,
)

__all__ = ["Endpoint", "Environment", "Observation", "Program", "Reply", "ToolCall", "Tools"]

_DRAWS = "gcore_environments.draws:EpisodeDraws"
_COLUMNS = ("turn_reward",)


@hookimpl
def gcore_environments() -> Iterable[EnvironmentProvider]:
    yield EnvironmentProvider(
        summary="a class of yours: an Environment, with tools or without, or a Program",
        factory=_DRAWS,
        config=EnvironmentConfig,
        columns=_COLUMNS,
    )
    of_packages: dict[str, tuple[type[PlayConfig], str]] = {
        "gymnasium": (GymnasiumConfig, "an environment of Gymnasium, such as FrozenLake-v1"),
        "textarena": (TextArenaConfig, "a game of TextArena, for one player or several"),
        "reasoning": (ReasoningConfig, "a task of reasoning-gym"),
        "aviary": (AviaryConfig, "an environment of aviary"),
        "mcp": (McpConfig, "tools of MCP servers"),
        "openenv": (OpenEnvConfig, "an environment of OpenEnv, by class or behind its server"),
    }
    for name, (config, summary) in of_packages.items():
        yield EnvironmentProvider(
            name=name, summary=summary, factory=_DRAWS, config=config, columns=_COLUMNS
        )


@hookimpl
def gcore_datasets() -> Iterable[DatasetProvider]:
    yield DatasetProvider(
        name="numbers",
        summary="rows that are only numbered, for environments that make tasks of a number",
        factory="gcore_environments.numbered_rows:Numbers",
        config=NumbersConfig,
    )
    yield DatasetProvider(
        name="reasoning",
        summary="questions of reasoning-gym with their answers",
        factory="gcore_environments.reasoning:ReasoningRows",
        config=ReasoningRowsConfig,
    )


@hookimpl
def gcore_rewards() -> Iterable[RewardProvider]:
    yield RewardProvider(
        summary="what the environment gave in an episode: a named reward, or the sum",
        factory="gcore_environments.rewards:EnvironmentReward",
        config=EnvironmentRewardConfig,
    )
    yield RewardProvider(
        name="reasoning",
        summary="the score of an answer by the task of reasoning-gym that has asked",
        factory="gcore_environments.reasoning:ReasoningReward",
        config=ReasoningRewardConfig,
    )


@hookimpl
def gcore_advantages() -> Iterable[AdvantageProvider]:
    yield AdvantageProvider(
        name="turns",
        summary="what each turn earns from itself on, against the group's other episodes",
        factory="gcore_environments.advantages:TurnAdvantage",
        config=TurnsConfig,
        level="action",
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any], job: ResolvedJob) -> Iterable[str]:
    from gcore_environments.checks import problems

    return problems(plan, job)


@hookimpl
def gcore_check_files(plan: Mapping[str, Any], here: bool) -> Iterable[str]:
    from gcore_environments.checks import host_problems

    return host_problems(plan, here)


@hookimpl
def gcore_preflight(job: ResolvedJob) -> Iterable[str]:
    from gcore_environments.notes import notes

    return notes(job)


@hookimpl
def gcore_step_end(run: RunFacts, report: StepReport) -> None:
    from gcore_environments.notes import after_step

    after_step(run, report)
