"""Defines what the core calls on a step program."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Controller(Protocol):
    """Runs one shard of the control program."""

    async def run(self) -> None: ...
