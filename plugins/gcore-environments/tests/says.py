"""An environment for tests: a user says the row's prompt, and then a tool says it."""

from __future__ import annotations

from typing import Any

from gcore_environments import Observation, Reply


class Says:
    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._text = row["prompt"]
        self._left = ["tool", "user"]
        return Observation(messages=[{"role": "user", "content": self._text}])

    async def step(self, reply: Reply) -> Observation:
        if not self._left:
            return Observation(done=True)
        message = {"role": self._left.pop(0), "content": self._text}
        if message["role"] == "tool":
            message |= {"name": "add", "tool_call_id": "call00000"}
        return Observation(messages=[message])

    async def close(self) -> None:
        pass
