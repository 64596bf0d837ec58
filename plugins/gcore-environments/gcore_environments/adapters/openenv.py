"""Environments of OpenEnv: a class in this process, or a server that has one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore_environments import Observation, Reply

try:
    from openenv import GenericEnvClient
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the distribution openenv is missing ({error})") from error

#: How long a server may take for an answer. The clock of a turn, ``turn_s``, is shorter.
_PATIENCE_S = 3600.0
#: What every observation of OpenEnv has besides its own fields.
_COMMON = {"done", "reward", "metadata"}


class OpenEnv:
    """Acts in an environment by text. OpenEnv knows no ``truncated``: all that ends is done.

    A row's field ``number`` is the seed in place of the sample's, so that all samples of a prompt
    begin alike.

    cls: "file.py:Class" or "package.module:Class" of the environment; or, in its place,
    base_url: of a server, such as "http://127.0.0.1:8000".
    action: the class of its actions, written so, where ``cls`` is given.
    field: the action's field that is the text of a reply. Empty: the reply is a JSON object, the
        action's fields.
    told: the observation's field that is told. Empty: all of its fields, as JSON.
    options: what the environment is made with.
    """

    def __init__(
        self,
        cls: str = "",
        base_url: str = "",
        action: str = "",
        field: str = "",
        told: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._base_url = base_url
        self._field, self._told_field = field, told
        self._env = None if base_url else _named(cls)(**(options or {}))
        self._action = None if base_url else _named(action)
        self._client: Any = None

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        seed = int(row.get("number", seed)) % 2**31
        if self._env is not None:
            return self._told(_facts(await self._env.reset_async(seed=seed, episode_id=str(seed))))
        self._client = GenericEnvClient(
            base_url=self._base_url, connect_timeout_s=_PATIENCE_S, message_timeout_s=_PATIENCE_S
        )
        await self._client.connect()
        return self._told(_result(await self._client.reset(seed=seed)))

    async def step(self, reply: Reply) -> Observation:
        try:
            fields = {self._field: reply.text} if self._field else json.loads(reply.text)
            action = fields if self._action is None else self._action(**fields)
        except (ValueError, TypeError) as error:  # pydantic's is a ValueError
            text = f"This is no action: {error}"
            return Observation(messages=[{"role": "user", "content": text}])
        if self._env is not None:
            return self._told(_facts(await self._env.step_async(action)))
        return self._told(_result(await self._client.step(action)))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._env is not None:
            self._env.close()

    def _told(self, seen: Mapping[str, Any]) -> Observation:
        own = {name: value for name, value in seen.items() if name not in _COMMON}
        text = str(own[self._told_field]) if self._told_field else json.dumps(own)
        return Observation(
            messages=[{"role": "user", "content": text}],
            rewards={"openenv": float(seen["reward"])} if seen["reward"] is not None else {},
            done=bool(seen["done"]),
        )


def _named(place: str) -> Any:
    """Returns the class "file.py:Class" or "package.module:Class"."""
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        file = Path(where)
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        where = file.stem
    return getattr(importlib.import_module(where), name)


def _facts(seen: Any) -> dict[str, Any]:
    """Returns what a class's observation says."""
    facts: dict[str, Any] = seen.model_dump(mode="json")
    return facts


def _result(result: Any) -> dict[str, Any]:
    """Returns what a server's answer says."""
    return {**result.observation, "done": result.done, "reward": result.reward}
