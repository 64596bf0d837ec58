"""Defines what the core calls on a step program."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Controller(Protocol):
    """Runs the step program for one shard.

    ``run`` returns when the last step is committed, or when the run is to stop and is saved. Its
    process ends then. An error that it raises ends the attempt.
    """

    async def run(self) -> None: ...
