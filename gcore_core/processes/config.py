"""Settings of the launchers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """Settings of ``core/local``.

    socket_dir: where the run's private directory of sockets is made; its path must be short. Default: the system's.
    port: first of a row of loopback ports to use instead of unix sockets.
    """

    socket_dir: str | None = None
    port: int | None = None
