"""Draws answers, looks at them, and has the best wrong one drawn again with a critique.

All of it is one episode, and one record: each answer trains under the ids that it was drawn from.
It runs in any interpreter of Python 3.11 or later, and needs the standard library only.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from gcore_environments import Endpoint

Message = dict[str, Any]


class Refine:
    """Asks the row, then goes on with the answer that is nearest, as long as it is wrong.

    first: answers to the row's own prompt.
    again: how often the nearest one is drawn again.
    """

    def __init__(self, first: int = 3, again: int = 1) -> None:
        self._first = first
        self._again = again

    async def run(self, row: dict[str, Any], seed: int, endpoint: Endpoint) -> dict[str, float]:
        """Returns the rewards: the share of first answers that are right, and the last answer's."""
        asked: list[Message] = row["messages"]
        answers = await asyncio.gather(*(ask(endpoint, asked) for _ in range(self._first)))
        right = [is_right(row, answer) for answer in answers]
        best = min(answers, key=lambda answer: distance(row, answer))
        history = asked
        for _ in range(self._again):
            if is_right(row, best):
                break
            history = [*history, says("assistant", best), says("user", critique(row))]
            best = await ask(endpoint, history)
        return {"first": sum(right) / len(right), "last": float(is_right(row, best))}


def says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


async def ask(endpoint: Endpoint, messages: list[Message]) -> str:
    """Returns the policy's answer to a history."""
    return await asyncio.to_thread(_post, endpoint, messages)


def _post(endpoint: Endpoint, messages: list[Message]) -> str:
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": endpoint.model, "messages": messages}).encode(),
        {"authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answered:
        content: str | None = json.load(answered)["choices"][0]["message"]["content"]
    return content or ""


def critique(row: dict[str, Any]) -> str:
    """What is said of a wrong answer: no, and the question once more, in the model's characters."""
    return f"n{row['prompt']}"


def is_right(row: dict[str, Any], answer: str) -> bool:
    return answer[-2:] == row["answer"]


def distance(row: dict[str, Any], answer: str) -> float:
    """How far the sum of an answer is from the right one; infinitely where it has none."""
    digits = answer[-2:]
    return abs(int(digits) - int(row["answer"])) if digits.isdecimal() else float("inf")
