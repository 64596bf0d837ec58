"""Starts processes of other machines by commands that lead there."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

from gcore_core.kits.launching import input_of


async def spawn_over_input(command: list[str], spec: Any, log: str | Path) -> Process:
    """Starts a process through a command that may reach another machine; returns the command.

    The process ends when ``stdin`` of what is returned is closed, or when this process dies. A
    command that ends before it has read the spec is no error here: its exit says so. Raises OSError
    when the command cannot be started.

    command: what leads to the machine, and the process with its words; ``--stdin`` is added.
    spec: a msgspec struct, with the run's secret; it is in neither argv nor the environment.
    log: the file to which the command's output is appended.
    """
    with open(log, "ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--stdin",
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            # No terminal, on which a command could ask for a password.
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(input_of(spec))
        await process.stdin.drain()
    return process
