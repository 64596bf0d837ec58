"""Defines the settings of ``ray``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from gcore_nodes.machines_config import MachinesConfig


@dataclass(frozen=True, kw_only=True)
class RayConfig(MachinesConfig):
    """Holds the settings of ``ray``.

    cluster: HOST:PORT of the Ray cluster; or ``auto``: RAY_ADDRESS if it is set, else the cluster
        that this machine is a node of. This machine must be one of its nodes.
    nodes: how many Ray nodes the run takes. Ray chooses them. Default: all that are alive, those
        with GPUs where there are some.
    resources: what each of them must have free for the run, such as ``{GPU: 8, CPU: 32}``. Default:
        all that a node has.
    min_nodes: with how few of them a run may go on when it has lost others. ``nodes`` of them are
        first waited for, up to ``start_s``. Default: with what is left.
    wait_s: how long the run waits until Ray has so many nodes with so much free. An autoscaler adds
        them meanwhile.
    python: the interpreter on the nodes. Default: the one that Ray itself runs on there.
    environment: variables of the agents and of all that they start, on every node.
    The others are those of every launcher for several machines.
    """

    cluster: str = "auto"
    nodes: int | None = None
    resources: dict[str, float] = field(default_factory=dict)
    min_nodes: int | None = None
    wait_s: float = 600.0
    python: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.address is not None and not _is_network(self.address):
            raise ValueError(
                f"address is a network, such as 10.0.0.0/16, not {self.address!r}; the address of "
                "the Ray cluster is set by cluster"
            )
        super().__post_init__()
        if self.cluster.startswith("ray://"):
            raise ValueError(
                "cluster must be auto or HOST:PORT, not ray://: the supervisor has to be on a node "
                "of the cluster; `ray job submit` brings it there"
            )
        host, _, port = self.cluster.rpartition(":")
        if self.cluster != "auto" and not (host and port.isdecimal()):
            raise ValueError(f"cluster must be auto or HOST:PORT, not {self.cluster!r}")
        for name in ("nodes", "min_nodes", "wait_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.nodes is not None and (self.min_nodes or 1) > self.nodes:
            raise ValueError(f"min_nodes is {self.min_nodes}, and nodes is {self.nodes}")
        for name, amount in self.resources.items():
            if not amount > 0:
                raise ValueError(
                    f"resources must be positive, not {name}: {amount}; leave it out, as Ray drops "
                    "resources of 0"
                )
            if amount > 1 and amount != int(amount):
                raise ValueError(f"resources above 1 must be whole, not {name}: {amount}")


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
