"""Lets a policy act over several turns in an environment, with tools, exact to the token.

An author of environments imports the words from here: ``from gcore_environments import Tools``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.providers import AdvantageProvider, EnvironmentProvider, RewardProvider
from gcore_environments.advantages import TurnsConfig
from gcore_environments.settings import EnvironmentConfig, EnvironmentRewardConfig
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


@hookimpl
def gcore_environments() -> Iterable[EnvironmentProvider]:
    yield EnvironmentProvider(
        summary="a class of yours: an Environment, with tools or without, or a Program",
        factory="gcore_environments.draws:EpisodeDraws",
        config=EnvironmentConfig,
        columns=("turn_reward",),
    )


@hookimpl
def gcore_rewards() -> Iterable[RewardProvider]:
    yield RewardProvider(
        summary="what the environment gave in an episode: a named reward, or the sum",
        factory="gcore_environments.rewards:EnvironmentReward",
        config=EnvironmentRewardConfig,
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
