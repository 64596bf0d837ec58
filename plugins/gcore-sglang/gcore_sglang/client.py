"""Speaks HTTP to SGLang's server: many samples at once, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
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

    answer: SGLang's ``output_ids`` and ``meta_info``; empty when it has none.
    ended: whether this is the sample's last event.
    error: why SGLang refused it, or what broke off the answer; empty when all is well.
    lost: whether the connection broke off.
    """

    rid: str
    answer: Mapping[str, Any]
    ended: bool = True
    error: str = ""
    lost: bool = False


class Client:
    """Sends requests to one server, from an event loop in a thread of its own.

    connections: most requests for samples that are open at once. Samples that wait for one go
        together in the next request.
    """

    def __init__(self, url: str, key: str, *, connections: int) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._connections = connections
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._waiting: dict[str, Mapping[str, Any]] = {}  # not sent yet: rid -> body
        self._names: dict[str, str] = {}  # of samples that were sent again: rid -> SGLang's id
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sglang-client", daemon=True
        )
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    async def _open(self) -> None:
        """Opens two HTTP sessions: one for samples, one for calls.

        Each request has a connection of its own. The server closes connections that idle, so a
        request on a kept one could meet its end, and a call of a push cannot be sent twice.
        """
        timeout = aiohttp.ClientTimeout(total=None)
        # Calls have connections of their own, so that none waits for a sample to end.
        self._calls, self._samples = (
            aiohttp.ClientSession(
                self._url,
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=timeout,
                read_bufsize=_LINE_BYTES,
            )
            for _ in range(2)
        )
        self._room = asyncio.Semaphore(self._connections)

    # -- samples -----------------------------------------------------------------------------------

    def sample(self, bodies: Mapping[str, Mapping[str, Any]]) -> None:
        """Begins samples and returns at once; ``wait`` gives their events.

        bodies: rid -> body of ``/generate``; all bodies have the same keys.
        """
        self._loop.call_soon_threadsafe(self._begin, bodies)

    def sent_as(self, rid: str) -> str:
        """Returns the id by which SGLang knows a sample."""
        return self._names.get(rid, rid)

    def withdraw(self, rids: Sequence[str]) -> None:
        """Ends the samples among these that were not sent yet, with an empty answer."""
        self._loop.call_soon_threadsafe(self._take_back, rids)

    def wait(self, timeout_s: float) -> list[Event]:
        """Returns the events since the last call; waits up to ``timeout_s`` for at least one."""
        events: list[Event] = []
        try:
            events.append(
                self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
            )
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def _begin(self, bodies: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds samples to those that wait, and starts a task that sends them."""
        self._waiting.update(bodies)
        task = self._loop.create_task(self._send_waiting())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take_back(self, rids: Sequence[str]) -> None:
        """Forgets samples that were not sent yet, and ends each of them."""
        for rid in rids:
            if self._waiting.pop(rid, None) is not None:
                self._events.put(Event(rid, {}))

    async def _send_waiting(self) -> None:
        """Sends all samples that wait, once fewer than ``connections`` requests are open."""
        async with self._room:
            bodies = self._waiting
            self._waiting = {}
            if bodies:
                await self._sample(bodies)

    async def _sample(self, bodies: Mapping[str, Mapping[str, Any]]) -> None:
        """Sends one request for all samples, and divides it where SGLang refuses it.

        Halves of a refused request are sent on their own, until each sample that is refused stands
        alone and the others have been sampled.
        """
        open_rids = set(bodies)
        try:
            refusal = await self._read_answers(bodies, open_rids)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._end(open_rids, str(error), lost=True)
            return
        # SGLang checks all samples of a request before it begins any, so a refusal after some have
        # ended is no reason to divide.
        if refusal and len(open_rids) == len(bodies) > 1:
            # Two seconds after a refusal SGLang aborts all that came with it, by their ids.
            self._names |= {rid: _renamed(self.sent_as(rid)) for rid in bodies}
            items = list(bodies.items())
            half = len(items) // 2
            await asyncio.gather(self._sample(dict(items[:half])), self._sample(dict(items[half:])))
        elif open_rids:
            self._end(open_rids, refusal or "the answer has no end", lost=not refusal)

    def _end(self, rids: Iterable[str], error: str, *, lost: bool) -> None:
        """Ends samples with an error and without an answer.

        lost: whether the connection broke off.
        """
        for rid in sorted(rids):
            self._names.pop(rid, None)
            self._events.put(Event(rid, {}, error=error, lost=lost))

    async def _read_answers(
        self, bodies: Mapping[str, Mapping[str, Any]], open_rids: set[str]
    ) -> str:
        """Reads a request's answers and takes the samples that end out of ``open_rids``.

        Returns SGLang's words when it refuses the request, else an empty text.
        """
        first = next(iter(bodies.values()))
        columns = {name: [body[name] for body in bodies.values()] for name in first}
        rid_of = {self.sent_as(rid): rid for rid in bodies}
        request = {**columns, "rid": list(rid_of), "stream": True}
        async with self._samples.post("/generate", json=request) as response:
            if response.status != 200:
                return await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                answer = json.loads(line.removeprefix(b"data: "))
                if "error" in answer:
                    return json.dumps(answer["error"])
                meta = answer["meta_info"]
                ended = meta["finish_reason"] is not None
                rid = rid_of[meta["id"]]
                self._events.put(Event(rid, answer, ended=ended))
                if ended:
                    open_rids.discard(rid)
                    self._names.pop(rid, None)
        return ""

    # -- calls -------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = _CALL_S,
    ) -> str:
        """Returns the text of an answer.

        Raises Refused when its status is not 200, Unreachable when there is none in time.
        """
        status, text = self._request(method, path, body, timeout_s)
        if status != 200:
            raise Refused(f"{path} gives {status}: {text[:300]}")
        return text

    def call_each(
        self, path: str, bodies: Iterable[Mapping[str, Any]], *, timeout_s: float = _CALL_S
    ) -> None:
        """Posts all bodies at once and ignores what the answers say. Raises Unreachable."""

        async def all_of_them() -> None:
            await asyncio.gather(*(self._respond("POST", path, body, timeout_s) for body in bodies))

        asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()

    def is_healthy(self) -> bool:
        """Returns whether there is a server that has drawn its first sample."""
        try:
            return self._request("GET", "/health", None, _HEALTH_S)[0] == 200
        except Unreachable:
            return False

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, str]:
        """Returns status and text of an answer. Raises Unreachable when there is none in time."""
        return asyncio.run_coroutine_threadsafe(
            self._respond(method, path, body, timeout_s), self._loop
        ).result()

    async def _respond(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, str]:
        """Makes a call on the event loop; returns status and text."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._calls.request(method, path, json=body, timeout=limit) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{path}: {str(error) or type(error).__name__}") from error

    def close(self) -> None:
        """Ends all requests, the event loop and its thread; does nothing when called again."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        """Cancels all requests and closes both sessions."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._samples.close()
        await self._calls.close()


def _renamed(name: str) -> str:
    """Returns another id of the same length: SGLang aborts all whose ids begin with one.

    name: begins with a digit where the sample was sent once, else with a letter.
    """
    return (chr(ord(name[0]) + 1) if name[0].isalpha() else "a") + name[1:]
