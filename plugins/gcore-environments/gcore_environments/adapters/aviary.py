"""Environments of aviary, whose actions are calls of tools."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore_environments import Observation, Reply

try:
    from aviary.core import Environment, Tool, ToolRequestMessage
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the distribution fhaviary is missing ({error})") from error

_ROLES = ("system", "user", "assistant", "tool")


class Aviary:
    """Makes an environment anew for each episode.

    cls: "file.py:Class", "package.module:Class", or a name that aviary knows.
    options: what it is made with. Without any, a row's field ``task`` goes to ``from_task``.
    """

    def __init__(self, cls: str, options: Mapping[str, Any] | None = None) -> None:
        self._cls = cls
        self._options = dict(options or {})

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._env = self._made(row)
        messages, tools = await self._env.reset()
        return Observation(messages=_plain(messages), tools=[_schema(tool) for tool in tools])

    def _made(self, row: Mapping[str, Any]) -> Any:
        task = None if self._options else row.get("task")
        if ":" not in self._cls:
            return Environment.from_name(self._cls, task=task, **self._options)
        cls = _named(self._cls)
        return cls(**self._options) if task is None else cls.from_task(task)

    async def step(self, reply: Reply) -> Observation:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments or {}},
            }
            for call in reply.calls
        ]
        if not calls:
            text = "Call one of the tools."
            return Observation(messages=[{"role": "user", "content": text}])
        request = ToolRequestMessage(content=reply.text or None, tool_calls=calls)
        messages, reward, done, truncated = await self._env.step(request)
        return Observation(
            messages=_plain(messages),
            rewards={"aviary": float(reward)},
            done=bool(done),
            truncated=bool(truncated) and not done,
        )

    async def close(self) -> None:
        if hasattr(self, "_env"):
            await self._env.close()


def _named(place: str) -> Any:
    """Returns the class "file.py:Class" or "package.module:Class"."""
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        file = Path(where)
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        where = file.stem
    return getattr(importlib.import_module(where), name)


def _plain(messages: list[Any]) -> list[dict[str, Any]]:
    """Returns messages as a chat template reads them."""
    plain = []
    for message in messages:
        role = message.role if message.role in _ROLES else "user"
        one = {"role": role, "content": message.content or ""}
        if role == "tool":
            one |= {"tool_call_id": message.tool_call_id, "name": message.name}
        plain.append(one)
    return plain


def _schema(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.info.model_dump(mode="json", exclude_none=True)}
