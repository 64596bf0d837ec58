"""Speaks HTTP to SGLang's server: many samples at once, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

_CALL_S = 60.0
_HEALTH_S = 5.0
#: Longest line of an answer: log-probs of all its actions.
_LINE_BYTES = 2**28


class Refused(Exception):
    """SGLang answered with an error."""


class Unreachable(Exception):
    """There was no answer."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the sample ``rid``.

    answer: SGLang's ``output_ids`` and ``meta_info``; empty when it has none. ended: no more comes. error: it was
    refused. lost: the connection broke off.
    """

    rid: str
    answer: Mapping[str, Any]
    ended: bool = True
    error: str = ""
    lost: bool = False


class Client:
    """At most ``connections`` samples are with SGLang at once; others wait here."""

    def __init__(self, url: str, key: str, *, connections: int) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._connections = connections
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Task[None]] = {}  # not sent yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-client", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    async def _open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        # Calls have connections of their own, so that none waits for a sample to end.
        self._calls, self._samples = (
            aiohttp.ClientSession(
                self._url,
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=timeout,
                read_bufsize=_LINE_BYTES,
            )
            for _ in range(2)
        )
        self._room = asyncio.Semaphore(self._connections)

    # -- samples ------------------------------------------------------------------------------------------------------

    def sample(self, bodies: Mapping[str, Mapping[str, Any]]) -> None:
        """Begins samples, rid -> body of ``/generate``; returns at once. What comes of them is told by ``wait``."""
        self._loop.call_soon_threadsafe(self._begin, bodies)

    def withdraw(self, rids: Sequence[str]) -> None:
        """Ends those that were not sent yet, with an empty answer."""
        self._loop.call_soon_threadsafe(lambda: [self._waiting[rid].cancel() for rid in rids if rid in self._waiting])

    def wait(self, timeout_s: float) -> list[Event]:
        """What has happened since the last call; waits for at least one event, at most that long."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait())
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return found

    def _begin(self, bodies: Mapping[str, Mapping[str, Any]]) -> None:
        for rid, body in bodies.items():
            task = self._loop.create_task(self._sample(rid, body))
            self._waiting[rid] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _sample(self, rid: str, body: Mapping[str, Any]) -> None:
        try:
            async with self._room:
                del self._waiting[rid]
                await self._read_answer(rid, body)
        except asyncio.CancelledError:
            self._waiting.pop(rid, None)
            self._events.put(Event(rid, {}))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._events.put(Event(rid, {}, error=str(error), lost=True))

    async def _read_answer(self, rid: str, body: Mapping[str, Any]) -> None:
        async with self._samples.post("/generate", json={**body, "rid": rid, "stream": True}) as response:
            if response.status != 200:
                self._events.put(Event(rid, {}, error=await response.text()))
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                answer = json.loads(line.removeprefix(b"data: "))
                if "error" in answer:
                    self._events.put(Event(rid, {}, error=json.dumps(answer["error"])))
                    return
                ended = answer["meta_info"]["finish_reason"] is not None
                self._events.put(Event(rid, answer, ended=ended))
                if ended:
                    return
        self._events.put(Event(rid, {}, error="the answer has no end", lost=True))

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = _CALL_S) -> str:
        """The text of an answer. Raises Refused, Unreachable."""
        status, text = self._request(method, path, body, timeout_s)
        if status != 200:
            raise Refused(f"{path} gives {status}: {text[:300]}")
        return text

    def is_healthy(self) -> bool:
        """Whether a server is there that has drawn its first sample."""
        try:
            return self._request("GET", "/health", None, _HEALTH_S)[0] == 200
        except Unreachable:
            return False

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> tuple[int, str]:
        return asyncio.run_coroutine_threadsafe(self._respond(method, path, body, timeout_s), self._loop).result()

    async def _respond(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, str]:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._calls.request(method, path, json=body, timeout=limit) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{path}: {str(error) or type(error).__name__}") from error

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._samples.close()
        await self._calls.close()
