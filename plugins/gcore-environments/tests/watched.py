"""The calculator for tests of whole runs: it leaves the number of its process, and may sleep, fail,
hang or die, alone or as an agent.

Marks lie in the folder in which the run was started. One episode in ``every`` has the first of the
faults, one the second, and so on: ``faults[seed % every]``.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcore_environments import Endpoint, Observation, Reply

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes" / "calculator"))
from calculator import Calculator, _sum  # type: ignore[import-not-found]  # noqa: E402

print("a print at import is no message")
if Path("dies at import").exists():
    Path("dies at import").rename("died at import")
    os._exit(3)


def leave_mark() -> None:
    """Writes down the process, a line of equal length for each reply."""
    with Path("pids").open("a") as file:
        print(f"{os.getpid():9}", file=file)


class Watched(Calculator):  # type: ignore[misc]
    """An environment.

    sleeps: seconds that a step takes at most, drawn anew each time.
    dies_at: its process is killed when so many replies were heard, once for each number.
    faults, every: see above.
    """

    def __init__(
        self,
        sleeps: float = 0.0,
        dies_at: Sequence[int] = (),
        faults: Sequence[str] = (),
        every: int = 100,
    ) -> None:
        self._sleeps = sleeps
        self._dies_at = dies_at
        self._faults = faults
        self._every = every
        self._fault = ""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        number = seed % self._every
        self._fault = self._faults[number] if number < len(self._faults) else ""
        said: Observation = await super().reset(row, seed)
        return said

    async def step(self, reply: Reply) -> Observation:
        leave_mark()
        self._die()
        if self._fault:
            Path(f"met.{self._fault}").touch()
            await getattr(self, f"_{self._fault}")()
        await asyncio.sleep(self._sleeps * random.SystemRandom().random())
        said: Observation = await super().step(reply)
        return said

    def _die(self) -> None:
        heard = Path("pids").stat().st_size // 10
        for number in self._dies_at:
            mark = Path(f"died.{number}")
            if heard > number and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    async def _loops(self) -> None:
        while True:
            time.sleep(0.01)

    async def _awaits(self) -> None:
        await asyncio.Event().wait()

    async def _tool(self) -> None:
        """Calls a tool that never answers, in a thread that nobody can end."""
        await asyncio.to_thread(threading.Event().wait)

    async def _raises(self) -> None:
        raise RuntimeError("no more paper")

    async def _prints(self) -> None:
        print('{"id": [0, 0], "turn": 1, "done": true}')


class Agent:
    """A program: it asks the policy over HTTP, and each episode has a thread of its own."""

    def __init__(self, faults: Sequence[str] = (), every: int = 100) -> None:
        self._faults = faults
        self._every = every

    async def run(self, row: dict[str, Any], seed: int, endpoint: Endpoint) -> dict[str, float]:
        leave_mark()
        number = seed % self._every
        fault = self._faults[number] if number < len(self._faults) else ""
        if fault:
            Path(f"met.{fault}").touch()
        return await asyncio.to_thread(self._play, row, endpoint, fault)

    def _play(self, row: dict[str, Any], endpoint: Endpoint, fault: str) -> dict[str, float]:
        connection = http.client.HTTPConnection(endpoint.base_url.split("/")[2])
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
        for _ in range(3):
            body = json.dumps(
                {"model": endpoint.model, "messages": messages, "max_tokens": 14}
            ).encode()
            if fault == "rubbish":
                body = b"\xff{ no JSON"
            connection.request("POST", "/v1/chat/completions", body, headers)
            if fault == "drops":
                connection.close()
                raise ConnectionError("the agent has dropped its connection")
            if fault == "leaves":  # the answer is never read, and nothing more is said
                threading.Event().wait()
            answer = connection.getresponse()
            told = json.loads(answer.read())
            if answer.status != 200:
                raise ValueError(told["error"]["message"])
            (choice,) = told["choices"]
            said = str(choice["message"]["content"] or "")
            if choice["finish_reason"] != "stop":
                break
            if not said.startswith("*"):
                return {"right": float(said[-2:] == row["answer"])}
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "tool", "tool_call_id": "add", "content": _sum(said[1:-1])})
        return {"right": 0.0}
