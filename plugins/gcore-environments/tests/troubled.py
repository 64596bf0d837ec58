"""An environment for tests: a row says what it does. It runs in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gcore_environments import Observation, Reply


class Troubled:
    """Asks ``turns`` times for a word, and gives 1 for each.

    directory: where it leaves marks, such as the numbers of its processes.
    slow: seconds that it awaits in each step.
    """

    def __init__(self, directory: str = "", turns: int = 2, slow: float = 0.0) -> None:
        self._directory = Path(directory)
        self._left = turns
        self._reward = 1.0
        self._slow = slow
        if directory:
            (self._directory / f"pid.{os.getpid()}").touch()

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._does = row.get("does", "")
        print("a print is no message", flush=True)
        return Observation(messages=[{"role": "user", "content": row["prompt"]}])

    async def step(self, reply: Reply) -> Observation:
        if self._does:
            await getattr(self, f"_{self._does}")()
        await asyncio.sleep(self._slow)
        self._left -= 1
        if self._left:
            return Observation(
                messages=[{"role": "user", "content": "+"}], rewards={"word": self._reward}
            )
        return Observation(rewards={"word": self._reward}, done=True)

    async def close(self) -> None:
        pass

    async def _loops(self) -> None:
        while True:
            time.sleep(0.01)

    async def _awaits(self) -> None:
        await asyncio.Event().wait()

    async def _raises(self) -> None:
        raise ValueError("no such move")

    async def _infinite(self) -> None:
        self._reward = float("inf")

    async def _dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def _dies_once(self) -> None:
        mark = self._directory / "died"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    async def _prints(self) -> None:
        print('{"id": [0, 0], "turn": 1, "done": true}', flush=True)
        sys.stdout.flush()
