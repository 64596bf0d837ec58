"""Defines the settings of ``nodes/command``."""

from __future__ import annotations

import ipaddress
import shlex
from dataclasses import dataclass, field

from gcore_nodes.commands import check_template
from gcore_nodes.hosts import listed


@dataclass(frozen=True, kw_only=True)
class CommandConfig:
    """Holds the settings of ``nodes/command``.

    hosts: names or addresses of the machines, in order; or ``slurm``: those of the slurm job that
        this is run in; or the path of a file with one host a line.
    command: what leads to a host. ``{host}`` stands for it. No shell reads it.
    python: the interpreter on the hosts. Default: the path of this one.
    port: first of a row of ports that processes use on each host; one for each process of the run,
        and two more. Nothing else may listen there.
    address: a network, such as 10.0.0.0/16; each host's own address in it is used. Default: the
        address that the host's name stands for.
    private: networks that nobody else is on. In these, content of the store is sent in plain,
        checked and not encrypted, and so is what ranks of one trainer on several hosts send each
        other, unchecked. Messages are encrypted everywhere. Default: none.
    devices: devices of each host that are used. Default: all.
    socket_dir: where a private directory of sockets is made, on each host; its path must be short.
        Default: the host's directory for temporary files.
    store_gib: shared memory on each host for what generators make; when it is used up, they wait.
        Default: half of what is free.
    spill_after_s: how long nothing may be freed in a full store before more of it is made on disk.
    spill_dir: where on disk, on each host. Default: in the run's directory.
    start_s: how long a host may take to answer, and an agent to start.
    patience_s: when a host gives no sign of life for so long, its agent ends with all that it has
        started, and the run has lost the host.
    """

    hosts: str | list[str]
    command: str = "ssh -o BatchMode=yes {host}"
    python: str | None = None
    port: int = 29400
    address: str | None = None
    private: list[str] = field(default_factory=list)
    devices: int | None = None
    socket_dir: str | None = None
    store_gib: float | None = None
    spill_after_s: float = 5.0
    spill_dir: str | None = None
    start_s: float = 60.0
    patience_s: float = 15.0

    def __post_init__(self) -> None:
        check_template(self.command)
        if isinstance(self.hosts, list):
            listed(self.hosts)
        if self.python is not None and shlex.quote(self.python) != self.python:
            raise ValueError(f"python must be a path without blanks or quotes, not {self.python!r}")
        if not 1024 <= self.port <= 65000:
            raise ValueError(f"port must be from 1024 to 65000, not {self.port}")
        for network in (*self.private, *([self.address] if self.address else [])):
            ipaddress.ip_network(network, strict=False)
        for name in ("devices", "store_gib", "start_s", "patience_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.patience_s < 4:
            raise ValueError(f"patience_s must be at least 4, not {self.patience_s}")
