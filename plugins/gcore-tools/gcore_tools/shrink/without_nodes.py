"""Says what to install where a small job is to have several nodes and gcore-nodes is missing.

Everything else of ``g-core shrink`` does without it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.installing import install_command


def has_nodes() -> bool:
    """Whether gcore-nodes is installed."""
    return importlib.util.find_spec("gcore_nodes") is not None


def missing(where: str) -> ConfigError:
    """Returns the error for what needs gcore-nodes."""
    return ConfigError(
        "several nodes on this machine come with gcore-nodes, which is not installed",
        where=where,
        todo=install_command("gcore-tools[nodes]"),
    )


@dataclass(frozen=True, kw_only=True)
class WithoutNodes:
    """Stands for the settings of ``shrink/namespaces``: a job that has some is refused.

    nodes: how many nodes are made.
    devices: of each.
    shm_mib: size of each one's shared memory.
    """

    nodes: int
    devices: int | None = None
    shm_mib: int = 512

    def __post_init__(self) -> None:
        raise missing("launcher.use")
