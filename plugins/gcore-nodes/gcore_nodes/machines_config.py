"""Defines the settings that all launchers for several machines have."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

#: The least ``patience_s``: within it the kernel notices a silence, a lease expires and workers
#: end, see ``agent.split_patience``.
LEAST_PATIENCE_S = 8.0
#: The most: a day. The kernel counts the silence between machines up to three days only.
_MOST_PATIENCE_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class MachinesConfig:
    """Holds the settings that all launchers for several machines have.

    port: first of a row of ports that processes use on each host; one for each process of the run,
        and two more. Nothing else may listen there.
    address: a network, such as 10.0.0.0/16; each host's own address in it is used. Default: the
        address that the host's name stands for.
    private: networks that nobody else is on. In these, ranks of one trainer may be on several
        hosts; what they send each other is in plain, and unchecked. All else is encrypted
        everywhere. Default: none.
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
    leave_s: a host that is told to leave waits so long for the run's next checkpoint; then it ends
        anyhow, and the run has lost it.
    """

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
    leave_s: float = 600.0

    def __post_init__(self) -> None:
        # Loaded with a job's settings, not with the list of launchers, which needs none of it.
        from gcore_core.kits.launching import check_port, check_store

        check_port(self.port)
        check_store(self.store_gib, self.spill_after_s)
        for network in (*self.private, *([self.address] if self.address else [])):
            ipaddress.ip_network(network, strict=False)
        for name in ("devices", "start_s", "patience_s", "leave_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.patience_s < LEAST_PATIENCE_S:
            raise ValueError(
                f"patience_s must be at least {LEAST_PATIENCE_S:g}, not {self.patience_s}"
            )
        if self.patience_s > _MOST_PATIENCE_S:
            raise ValueError(
                f"patience_s must be at most {_MOST_PATIENCE_S:g}, a day, not {self.patience_s}"
            )
