"""The plugin ``human``: people compare a run's answers, or label them as one of its rewards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider, RewardProvider
from gcore_core.contract.records import RunFacts
from gcore_rewards.human.checks import problems_of, queues
from gcore_rewards.human.config import HumanConfig


@hookimpl
def gcore_rewards() -> Iterable[RewardProvider]:
    yield RewardProvider(
        summary="what people answer to a question about the completion, on a page; the run waits",
        factory="gcore_rewards.human.reward:HumanReward",
        config=HumanConfig,
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    return problems_of(plan)


@hookimpl
def gcore_run_start(run: RunFacts) -> None:
    """Says what people have to do, since the run would otherwise wait without a word."""
    for directory in queues(run.config, Path(run.directory)):
        shown = run.directory if directory.parent == Path(run.directory) else directory
        print(f"this run waits for people: g-core human label {shown}", file=sys.stderr, flush=True)


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="the commands of this plugin",
        factory="gcore_rewards.human.commands:default",
    )
    yield CommandProvider(
        name="rate",
        summary="a page on which people compare two answers to one prompt",
        factory="gcore_rewards.human.commands:rate",
    )
    yield CommandProvider(
        name="label",
        summary="a page on which people answer what a run's reward asks them",
        factory="gcore_rewards.human.commands:label",
    )
    yield CommandProvider(
        name="pairs",
        summary="judgements as preference data: prompt, chosen, rejected",
        factory="gcore_rewards.human.commands:pairs",
    )
    yield CommandProvider(
        name="agreement",
        summary="how far raters agree, with intervals",
        factory="gcore_rewards.human.commands:agreement",
    )
