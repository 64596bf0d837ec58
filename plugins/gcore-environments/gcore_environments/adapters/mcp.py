"""Tools of MCP servers, each a process of its own that a command starts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from gcore_environments import Observation, Reply, ToolCall

try:
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the distribution mcp is missing ({error})") from error


class Mcp:
    """Starts servers for each episode, which ends when the policy calls no tool.

    It gives no reward: those of the job read what the policy said last. What a tool raises, that it
    does not end, or that its server does, is an observation.

    commands: of the servers.
    path: the folder in which they are started; empty: this process's.
    env: further variables of theirs.
    tool_s: longest that a call may take.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        path: str = "",
        env: Mapping[str, str] | None = None,
        tool_s: float = 10.0,
    ) -> None:
        self._commands = [list(command) for command in commands]
        self._path = path or None
        self._env = dict(env or {})
        self._tool_s = tool_s
        self._stack = contextlib.AsyncExitStack()
        self._session_of: dict[str, ClientSession] = {}  # of each tool
        self._lost: set[int] = set()  # ids of sessions whose server has ended

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        tools = []
        for command in self._commands:
            tools += await self._start(command)
        return Observation(messages=list(row["messages"]), tools=tools)

    async def _start(self, command: list[str]) -> list[dict[str, Any]]:
        """Starts a server; returns the schemas of its tools."""
        program, *arguments = command
        server = StdioServerParameters(
            command=program, args=arguments, env=self._env or None, cwd=self._path
        )
        streams = await self._stack.enter_async_context(stdio_client(server))
        session = await self._stack.enter_async_context(ClientSession(*streams))
        await session.initialize()
        schemas = []
        for tool in (await session.list_tools()).tools:
            if tool.name in self._session_of:
                raise ValueError(f"two servers have a tool {tool.name}: leave one of them out")
            self._session_of[tool.name] = session
            facts = tool.model_dump(mode="json", by_alias=True)  # names of the protocol
            function = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": facts["inputSchema"],
            }
            schemas.append({"type": "function", "function": function})
        return schemas

    async def step(self, reply: Reply) -> Observation:
        if not reply.calls:
            return Observation(done=True)
        texts = await asyncio.gather(*map(self._answer, reply.calls))
        return Observation(
            messages=[
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
                for call, text in zip(reply.calls, texts, strict=True)
            ]
        )

    async def _answer(self, call: ToolCall) -> str:
        """Calls a tool; returns what the policy is told of it."""
        session = self._session_of.get(call.name)
        if session is None:
            names = ", ".join(self._session_of) or "none"
            return f"error: there is no tool {call.name!r}. Tools: {names}"
        if call.arguments is None:
            return f"error: the arguments of {call.name} are not a JSON object"
        if id(session) in self._lost:
            return f"error: the server of {call.name} has ended"
        try:
            async with asyncio.timeout(self._tool_s):
                result = await session.call_tool(call.name, call.arguments)
        except TimeoutError:
            return f"error: {call.name} did not end within {self._tool_s:g} s"
        except Exception as error:
            if "onnection closed" in str(error):
                self._lost.add(id(session))
                return f"error: the server of {call.name} has ended"
            return f"error: {call.name}: {error}"
        return "\n".join(str(getattr(part, "text", part.type)) for part in result.content)

    async def close(self) -> None:
        await self._stack.aclose()
