"""The plugin ``shrink`` makes the job of a cluster small enough for this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider, LauncherProvider
from gcore_tools.shrink.without_nodes import WithoutNodes, has_nodes


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="make a job that runs here: tiny twins of models and data, few steps",
        factory="gcore_tools.shrink.commands:shrink",
    )


@hookimpl
def gcore_launchers() -> Iterable[LauncherProvider]:
    config: type = WithoutNodes
    if has_nodes():
        from gcore_tools.shrink.config import NamespacesConfig

        config = NamespacesConfig
    yield LauncherProvider(
        name="namespaces",
        summary="several nodes on this machine, out of namespaces that are made for the run",
        factory="gcore_tools.shrink.launcher:NamespacesLauncher",
        config=config,
        needs=("gcore-nodes>=0.3,<0.4",),
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    if plan.get("launcher", {}).get("use") != "shrink/namespaces":
        return
    from gcore_tools.shrink.namespaces import problem

    if why := problem():
        yield f"launcher.use: there can be no nodes of namespaces here: {why}."
