"""The plugin ``nodes`` has a launcher for runs on several machines: ``nodes/command``.

It starts a node agent on each host through a command that leads there, such as ``ssh {host}``.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import LauncherProvider
from gcore_nodes.config import CommandConfig


@hookimpl
def gcore_launchers() -> Iterable[LauncherProvider]:
    yield LauncherProvider(
        name="command",
        summary="several machines, reached by a command such as ssh, srun or kubectl exec",
        factory="gcore_nodes.command_launcher:CommandLauncher",
        config=CommandConfig,
    )
