"""The plugin named ``core`` offers what the core brings, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.job_settings import POLICY, ROLLOUT
from gcore_core.contract.looking import Look


@hookimpl
def gcore_controllers() -> Iterable[p.ControllerProvider]:
    from gcore_core.controllers.config import SyncConfig

    yield p.ControllerProvider(
        name="sync",
        summary="one step after the other: generation, rewarding, preparation, training, push",
        factory="gcore_core.controllers.synchronous:SynchronousController",
        config=SyncConfig,
        calls=p.CALLS,
        parts=p.PARTS,
    )


@hookimpl
def gcore_roles() -> Iterable[p.RoleProvider]:
    yield p.RoleProvider(name=POLICY, summary="the model that learns", kind="trainer")
    yield p.RoleProvider(
        name=ROLLOUT,
        summary="samples from the policy",
        kind="generator",
        follows=POLICY,
    )
    yield p.RoleProvider(name="judge", summary="a generator that rewards", kind="generator")


@hookimpl
def gcore_launchers() -> Iterable[p.LauncherProvider]:
    from gcore_core.node.config import LocalConfig

    yield p.LauncherProvider(
        name="local",
        summary="processes on this machine",
        factory="gcore_core.node.launchers:LocalLauncher",
        config=LocalConfig,
    )
    yield p.LauncherProvider(
        name="inline",
        summary="everything in one process and one event loop, for a debugger",
        factory="gcore_core.node.launchers:InlineLauncher",
    )


@hookimpl
def gcore_datasets() -> Iterable[p.DatasetProvider]:
    from gcore_core.builtin.config import JsonLinesConfig

    yield p.DatasetProvider(
        name="jsonl",
        summary="one JSON object a line",
        factory="gcore_core.builtin.json_lines:JsonLines",
        config=JsonLinesConfig,
    )


@hookimpl
def gcore_rewards() -> Iterable[p.RewardProvider]:
    from gcore_core.builtin.config import FunctionRewardConfig

    yield p.RewardProvider(
        name="function",
        summary="a function in a Python file of yours",
        factory="gcore_core.builtin.function_reward:FunctionScorer",
        config=FunctionRewardConfig,
    )


@hookimpl
def gcore_filters() -> Iterable[p.FilterProvider]:
    from gcore_core.builtin.config import VariedConfig

    yield p.FilterProvider(
        name="keep-all", summary="every group teaches", factory="gcore_core.builtin.filters:KeepAll"
    )
    yield p.FilterProvider(
        name="varied",
        summary="groups whose rewards are not all equal",
        factory="gcore_core.builtin.filters:Varied",
        config=VariedConfig,
    )


@hookimpl
def gcore_sentinels() -> Iterable[p.SentinelProvider]:
    yield p.SentinelProvider(
        name="band",
        summary="stops at the first action whose log-prob is off by more than the pair's band",
        factory="gcore_core.builtin.band:Band",
    )


@hookimpl
def gcore_balancers() -> Iterable[p.BalancerProvider]:
    yield p.BalancerProvider(
        name="in-order",
        summary="equal counts, in order",
        factory="gcore_core.builtin.balancer:InOrder",
    )


@hookimpl
def gcore_placement_policies() -> Iterable[p.PlacementProvider]:
    yield p.PlacementProvider(
        name="even",
        summary="each role gets its slots, from the first device on",
        factory="gcore_core.builtin.placement:Even",
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    from gcore_core.builtin.checks import problems_of

    return problems_of(plan)


@hookimpl
def gcore_check_files(plan: Mapping[str, Any], here: bool) -> Iterable[Look]:
    from gcore_core.builtin.checks import function_looks

    return function_looks(plan) if here else ()
