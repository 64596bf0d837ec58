"""The plugin ``nodes`` has launchers for runs on several machines.

``nodes/command`` starts a node agent on each host through a command that leads there, such as
``ssh {host}``. ``nodes/join`` waits for nodes that start themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider, LauncherProvider
from gcore_nodes.config import CommandConfig, JoinConfig


@hookimpl
def gcore_launchers() -> Iterable[LauncherProvider]:
    yield LauncherProvider(
        name="command",
        summary="several machines, reached by a command such as ssh, srun or kubectl exec",
        factory="gcore_nodes.command_launcher:CommandLauncher",
        config=CommandConfig,
    )
    yield LauncherProvider(
        name="join",
        summary="several machines that start themselves and join with a token",
        factory="gcore_nodes.join_launcher:JoinLauncher",
        config=JoinConfig,
    )


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        name="join",
        summary="join the run that waits at an address, with this machine",
        factory="gcore_nodes.join:main",
    )
    yield CommandProvider(
        name="drain",
        summary="have a host leave a run that goes on, at its next checkpoint",
        factory="gcore_nodes.drain:main",
    )
    yield CommandProvider(
        name="slurm",
        summary="write a script for sbatch that runs a job on several nodes",
        factory="gcore_nodes.slurm:main",
    )
    yield CommandProvider(
        name="jobset",
        summary="write a manifest for Kubernetes that runs a job in several pods",
        factory="gcore_nodes.jobset:main",
    )
