"""Defines the settings of ``core/local``, and checks that other launchers share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gcore_core.contract.errors import ConfigError

_LAST_PORT = 65535


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
    """

    socket_dir: str | None = None
    port: int | None = None
    store_gib: float | None = None
    spill_dir: str | None = None
    spill_after_s: float = 5.0

    GONE_KEYS: ClassVar[dict[str, str]] = {
        "lease_s": "remove it: a node agent ends with its supervisor; the next one starts another"
    }

    def __post_init__(self) -> None:
        if self.port is not None:
            check_port(self.port)
        check_store(self.store_gib, self.spill_after_s)


def check_port(port: int) -> None:
    """Raises ValueError unless a row of ports may begin with it."""
    if not 1024 <= port <= 65000:
        raise ValueError(f"port must be from 1024 to 65000, not {port}")


def check_store(store_gib: float | None, spill_after_s: float) -> None:
    """Raises ValueError for settings of the store that are none."""
    if store_gib is not None and not 0 < store_gib < math.inf:
        raise ValueError(f"store_gib must be a positive number, not {store_gib}")
    if not 0 <= spill_after_s < math.inf:
        raise ValueError(f"spill_after_s must be a number from 0 on, not {spill_after_s}")


def check_ports(first: int, last: int) -> None:
    """Raises ConfigError for a row of ports that ends behind the last one there is."""
    if last > _LAST_PORT:
        raise ConfigError(
            f"a host needs the ports {first} to {last}, and the last one is {_LAST_PORT}",
            where="launcher.config.port",
            todo=f"set it to at most {_LAST_PORT - (last - first)}",
        )
