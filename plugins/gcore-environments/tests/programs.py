"""Programs for tests: each asks the endpoint in its own way. It runs in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import urllib.error
import urllib.request
from typing import Any

from gcore_environments import Endpoint


class Asks:
    """Asks ``times`` times, one after the other, and posts all that was said each time.

    together: how many calls it makes at once from the first point.
    rewrites: whether it changes what the policy said.
    gives_up: whether an error of the endpoint ends it well.
    sampling: further fields of each request.
    """

    def __init__(
        self,
        directory: str = "",
        times: int = 2,
        together: int = 1,
        rewrites: bool = False,
        gives_up: bool = False,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        self._times = times
        self._together = together
        self._rewrites = rewrites
        self._gives_up = gives_up
        self._sampling = sampling or {}

    async def run(self, row: dict[str, Any], seed: int, endpoint: Endpoint) -> dict[str, float]:
        messages = list(row["messages"])
        first = [self._ask(endpoint, messages) for _ in range(self._together)]
        said = (await asyncio.gather(*first))[0]
        for _ in range(self._times - 1):
            content = said["content"]
            messages.append({**said, "content": "7" if self._rewrites else content})
            messages.append({"role": "user", "content": "+"})
            try:
                said = await self._ask(endpoint, messages)
            except OSError:
                if self._gives_up:
                    return {"gave_up": 0.5}
                raise
        return {"asked": float(self._times)}

    async def _ask(self, endpoint: Endpoint, messages: list[Any]) -> dict[str, Any]:
        return await asyncio.to_thread(_post, endpoint, messages, **self._sampling)


def _post(endpoint: Endpoint, messages: list[Any], **sampling: Any) -> dict[str, Any]:
    body = {"model": endpoint.model, "messages": messages, **sampling}
    whole = _send(endpoint, "chat/completions", body)
    message: dict[str, Any] = whole["choices"][0]["message"]
    return message


class AsksRole:
    """Asks the policy, then the role "opponent" what it says to that, then the policy again.

    fields: further fields of the request to the role.
    """

    def __init__(self, directory: str = "", fields: dict[str, Any] | None = None) -> None:
        self._fields = fields or {}

    async def run(self, row: dict[str, Any], seed: int, endpoint: Endpoint) -> dict[str, float]:
        return await asyncio.to_thread(self._run, row["messages"], endpoint)

    def _run(self, messages: list[Any], endpoint: Endpoint) -> dict[str, float]:
        said = _post(endpoint, messages)
        asked = [{"role": "user", "content": said["content"]}]
        try:
            whole = _send(
                endpoint,
                "chat/completions",
                {"model": "opponent", "messages": asked, **self._fields},
            )
        except urllib.error.HTTPError as error:
            return {"refused": float(error.code)}
        answer = whole["choices"][0]["message"]
        _post(endpoint, [*messages, said, {"role": "user", "content": answer["content"]}])
        return {
            "models": float(len(_send(endpoint, "models", None)["data"])),
            "total_tokens": float(whole["usage"]["total_tokens"]),
            "is_named": float(whole["model"] == "opponent"),
        }


def _send(endpoint: Endpoint, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{endpoint.base_url}/{path}",
        None if body is None else json.dumps(body).encode(),
        {"authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        whole: dict[str, Any] = json.load(answer)
    return whole


class Curious:
    """Asks once, and then looks at what else listens on the machine's loopback.

    port: of a socket of the machine.
    """

    def __init__(self, directory: str = "", port: int = 0) -> None:
        self._port = port

    async def run(self, row: dict[str, Any], seed: int, endpoint: Endpoint) -> dict[str, float]:
        if row["does"] == "dies":
            os._exit(3)
        await asyncio.to_thread(_post, endpoint, row["messages"])
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=5).close()
        except OSError:
            return {"asked": 1.0, "reached": 0.0}
        return {"asked": 1.0, "reached": 1.0}
