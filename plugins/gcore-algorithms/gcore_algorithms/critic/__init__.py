"""The plugin ``critic`` has the role of a value model, and the loss that trains it."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_algorithms.critic.config import ValueLossConfig
from gcore_core import hookimpl
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.providers import ObjectiveProvider, RoleProvider

#: The role's name.
CRITIC = "critic"
#: What it gives for each action.
COLUMNS = ("values", "next_values")


@hookimpl
def gcore_roles() -> Iterable[RoleProvider]:
    yield RoleProvider(
        name=CRITIC,
        summary="a value model, trained beside the policy: what reward is still to come",
        kind="trainer",
        columns=COLUMNS,
        objective="critic",
    )


@hookimpl
def gcore_objectives() -> Iterable[ObjectiveProvider]:
    yield ObjectiveProvider(
        summary="squared error of values, clipped around the old ones (PPO's critic)",
        factory="gcore_algorithms.critic.loss:ValueLoss",
        config=ValueLossConfig,
        needs=("torch>=2.7",),
    )


@hookimpl
def gcore_check(job: ResolvedJob) -> Iterable[str]:
    """Yields what a critic needs of its trainer and of the advantage."""
    from gcore_algorithms.critic.checks import problems_of

    return problems_of(job)
