"""Defines the settings of ``shrink/namespaces``."""

from __future__ import annotations

from dataclasses import dataclass

from gcore_nodes.machines_config import MachinesConfig

from gcore_tools.shrink.namespaces import MOST_NODES


@dataclass(frozen=True, kw_only=True)
class NamespacesConfig(MachinesConfig):
    """Holds the settings of ``shrink/namespaces``.

    nodes: how many nodes are made.
    shm_mib: size of each one's shared memory.
    The others are those of every launcher for several machines; ``address`` and ``private`` are
    those of the network that is made, and may not be set.
    """

    nodes: int
    shm_mib: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"nodes must be from 1 to {MOST_NODES}, not {self.nodes}")
        if self.shm_mib < 1:
            raise ValueError(f"shm_mib must be positive, not {self.shm_mib}")
        if self.address or self.private:
            raise ValueError("address and private are those of the network that is made")
