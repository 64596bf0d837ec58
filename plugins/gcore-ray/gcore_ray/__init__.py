"""The plugin ``ray`` has a launcher that runs a job on the machines of a Ray cluster.

Ray finds the machines and starts a node agent on each. Everything else goes over the run's own
network, past Ray.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import LauncherProvider, VenvProvider
from gcore_ray.config import RayConfig


@hookimpl
def gcore_launchers() -> Iterable[LauncherProvider]:
    yield LauncherProvider(
        summary="the machines of a Ray cluster",
        factory="gcore_ray.launcher:RayLauncher",
        config=RayConfig,
        needs=("ray>=2.50",),
    )


@hookimpl
def gcore_venvs() -> Iterable[VenvProvider]:
    for name in ("cpu", "cuda"):
        yield VenvProvider(
            name=name,
            summary="Ray, for `g-core run` on a cluster of the same version",
            engine="ray",
            requirements="gcore_ray:engine.txt",
        )
