"""The quickstart's task with a tool: add five digits, by a careless guess or by calling an adder.

    prompt    7+3+8+5+2=
    guesses   ?31                    '?' and a number near the sum
    calls     *7+3+8+5+2n            '*', what is to be added, 'n'
    is told   :25y                   the sum; ':n' where the call cannot be read
    answers   25

The answer is what stands in the last two characters. ``model.py`` makes a model that has seen both
habits, mostly guesses; it has to find out that the adder is worth its two turns.

This file runs in processes of its own. It needs the standard library alone.
"""

from __future__ import annotations

from typing import Any

from gcore_environments import Observation, Reply


class Calculator:
    """One problem. A reply that begins with ``*`` is a call; any other is the answer."""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._answer = row["answer"]
        return Observation(messages=[{"role": "user", "content": row["prompt"]}])

    async def step(self, reply: Reply) -> Observation:
        ended = reply.status == "finished"
        if ended and reply.text.startswith("*"):
            content = _sum(reply.text[1:-1])
            return Observation(
                messages=[{"role": "tool", "content": content}], rewards={"called": 1.0}
            )
        right = ended and reply.text[-2:] == self._answer
        return Observation(rewards={"right": float(right)}, done=True)

    async def close(self) -> None:
        pass


def _sum(terms: str) -> str:
    """Returns what the adder says of "7+3+8+5+2"."""
    try:
        return f":{sum(int(term) for term in terms.split('+')):02d}y"
    except ValueError:
        return ":n"
