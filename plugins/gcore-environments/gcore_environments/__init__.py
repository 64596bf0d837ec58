"""Lets a policy act over several turns in an environment, with tools, exact to the token."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import AdvantageProvider
from gcore_environments.advantages import TurnsConfig


@hookimpl
def gcore_advantages() -> Iterable[AdvantageProvider]:
    yield AdvantageProvider(
        name="turns",
        summary="what each turn earns from itself on, against the group's other episodes",
        factory="gcore_environments.advantages:TurnAdvantage",
        config=TurnsConfig,
        level="action",
    )
