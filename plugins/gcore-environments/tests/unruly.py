"""An environment that does what its row says, for tests of the processes in which it runs."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from gcore_environments import Endpoint, Observation, Reply


def words(text: str) -> Observation:
    return Observation(messages=[{"role": "user", "content": text}])


class Unruly:
    """Does ``row[where]`` in the method ``where``: the name of a method below, or nothing.

    marks: a folder in which it leaves a file for each thing that a test wants to know.
    """

    def __init__(self, marks: str = "") -> None:
        self._marks = Path(marks)
        self._row: dict[str, Any] = {}

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._row = row
        if "reset" in row:
            return await self._does("reset")
        return words(f"{row.get('prompt', '')}{random.random()}")

    async def step(self, reply: Reply) -> Observation:
        self._reply = reply
        return await self._does("step") if "step" in self._row else words(reply.text)

    async def close(self) -> None:
        self._mark(f"closed.{self._row.get('name')}")
        if "close" in self._row:
            await self._does("close")

    async def _does(self, where: str) -> Any:
        return await getattr(self, self._row[where])()

    def _mark(self, name: str, text: str = "") -> None:
        if self._marks != Path():
            part = self._marks / f"{name}.part"
            part.write_text(text)
            part.rename(self._marks / name)

    async def loop(self) -> None:
        self._mark("loops")
        while True:
            pass

    async def loop_in_child(self) -> None:
        await asyncio.gather(self.loop())

    async def wait(self) -> None:
        self._mark("waits")
        await asyncio.Event().wait()

    async def wait_stubbornly(self) -> None:
        while True:
            try:
                await self.wait()
            except asyncio.CancelledError:
                self._mark("refused")

    async def hold(self) -> None:
        """Holds the interpreter's lock, so that no thread runs."""
        self._mark("holds")
        ctypes.PyDLL(None).pause()

    async def stop(self) -> None:
        """Stops the process, as a debugger does."""
        self._mark("stops")
        os.kill(os.getpid(), signal.SIGSTOP)

    async def fail(self) -> None:
        raise LookupError("no such move: ünmöglich")

    async def leave(self) -> None:
        sys.exit(3)

    async def end(self) -> None:
        os._exit(7)

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def start(self) -> None:
        """Starts a process that outlives it, and says its number."""
        child = subprocess.Popen(["sleep", "1000"])
        self._mark("child", str(child.pid))
        await self.wait()

    async def talk(self) -> Observation:
        print("a print", flush=True)
        os.write(1, b'{"ready": true}\n')
        subprocess.run(["sh", "-c", "echo a child; cat"], check=True)
        return words(f"input: {sys.stdin.read()!r}")

    async def see(self) -> Observation:
        """Says what it sees of the system."""
        seen: dict[str, Any] = {"variables": dict(os.environ)}
        for path in self._row["paths"]:
            try:
                seen[path] = Path(path).read_text()
            except OSError as error:
                seen[path] = type(error).__name__
        try:
            with socket.create_connection(tuple(self._row["address"]), timeout=5):
                seen["network"] = "open"
        except OSError as error:
            seen["network"] = type(error).__name__
        return words(json.dumps(seen))

    async def give(self) -> Any:
        return {
            "none": None,
            "text": "hello",
            "dict": {"messages": []},
            "role": Observation(messages=[{"content": "x"}]),
            "content": Observation(messages=[{"role": "user"}]),
            "number": Observation(messages=[{"role": "tool", "content": 5}]),
            "nothing": Observation(),
            "done": Observation(done="no"),  # type: ignore[arg-type]
            "messages": Observation(messages="hello"),  # type: ignore[arg-type]
            "nan": Observation(rewards={"right": float("nan")}),
            "reward": Observation(rewards={"right": "1"}),  # type: ignore[dict-item]
            "object": Observation(messages=[{"role": "user", "content": object()}]),
            "player": Observation(player=1),  # type: ignore[arg-type]
        }[self._row["gives"]]

    async def big(self) -> Observation:
        return words(self._reply.text * 2)


class Seeded:
    """Lets others run between its random numbers; only those of ``reset`` up to its first await
    are its own.
    """

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        number = random.random()
        await asyncio.sleep(0)
        return words(str(number))

    async def step(self, reply: Reply) -> Observation:
        return Observation(done=True)


class Asking:
    """A program."""

    async def run(self, row: dict[str, Any], seed: int, endpoint: Endpoint) -> dict[str, float]:
        if row.get("gives"):
            return "hello"  # type: ignore[return-value]
        return {endpoint.model: float(len(endpoint.base_url))}


class Strange:
    pass
