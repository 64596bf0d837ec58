"""Defines the settings of the launchers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """Holds the settings of ``core/local``.

    socket_dir: where the run's private directory of sockets is made; its path must be short.
        Default: the system's.
    port: first of a row of loopback ports to use instead of unix sockets.
    store_gib: shared memory for what generators make; when it is used up, they wait. Default: half
        of what is free.
    spill_after_s: how long nothing may be freed in a full store before more of it is made on disk.
    spill_dir: where on disk. Default: in the run's directory.
    lease_s: how long the node agent waits for another supervisor when it has lost its own. It
        keeps processes ready meanwhile, and ends with them when none has come.
    """

    socket_dir: str | None = None
    port: int | None = None
    store_gib: float | None = None
    spill_dir: str | None = None
    spill_after_s: float = 5.0
    lease_s: float = 15.0

    def __post_init__(self) -> None:
        if self.store_gib is not None and not self.store_gib > 0:
            raise ValueError(f"store_gib must be positive, not {self.store_gib}")
        if not self.lease_s > 0:
            raise ValueError(f"lease_s must be positive, not {self.lease_s}")
