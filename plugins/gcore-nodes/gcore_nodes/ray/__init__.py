"""The plugin ``ray`` has a launcher that runs a job on the machines of a Ray cluster.

Ray finds the machines and starts a node agent on each. Everything else goes over the run's own
network, past Ray.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import LauncherProvider, VenvProvider
from gcore_nodes.ray.config import RayConfig


@hookimpl
def gcore_launchers() -> Iterable[LauncherProvider]:
    yield LauncherProvider(
        summary="the machines of a Ray cluster",
        factory="gcore_nodes.ray.launcher:RayLauncher",
        config=RayConfig,
        needs=("ray>=2.50",),
    )


@hookimpl
def gcore_venvs() -> Iterable[VenvProvider]:
    yield VenvProvider(
        name="cpu",
        summary="Ray, for g-core on a cluster of the same version; machines without CUDA",
        engine="ray",
        requirements="gcore_nodes.ray:cpu.txt",
    )
    yield VenvProvider(name="cuda", summary="the same for CUDA", engine="ray", extras=("ray",))
