"""The calculator's task by an agent: a loop of its own, over the plain client of OpenAI's API.

It posts the conversation each time, as agents do. ``calculator/calculator.py`` says what is asked
for, what a call is and what it is told.

This file runs in processes of its own, and needs ``openai`` there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from gcore_environments import Endpoint
from openai import AsyncOpenAI

TURNS = 3
TURN_TOKENS = 14  # a call has 12: '*', five digits, four signs, 'n', end


class Agent:
    """One problem. A reply that begins with ``*`` is a call; any other is the answer."""

    async def run(self, row: dict[str, Any], seed: int, endpoint: Endpoint) -> dict[str, float]:
        client = _client(endpoint.base_url).with_options(api_key=endpoint.api_key)
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        called = 0.0
        for _ in range(TURNS):
            answer = await client.chat.completions.create(
                model=endpoint.model, messages=messages, max_tokens=TURN_TOKENS
            )
            (choice,) = answer.choices
            said = choice.message.content or ""
            if choice.finish_reason != "stop":
                break
            if not said.startswith("*"):
                return {"right": float(said[-2:] == row["answer"]), "called": called}
            called = 1.0
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "tool", "tool_call_id": "add", "content": _sum(said[1:-1])})
        return {"right": 0.0, "called": called}


@cache
def _client(base_url: str) -> AsyncOpenAI:
    """One for the process: to make a client costs more than a request. Each episode has its key."""
    return AsyncOpenAI(base_url=base_url, api_key="of no episode", max_retries=0)


def _sum(terms: str) -> str:
    try:
        return f":{sum(map(int, terms.split('+'))):02d}y"
    except ValueError:
        return ":n"
