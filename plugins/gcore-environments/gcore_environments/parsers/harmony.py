"""Reads turns as gpt-oss writes them: several messages, each to a channel or to a tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .base import Call, Read, ToolParser, called

_MESSAGE = re.compile(
    r"(?:<\|start\|>)?((?:(?!<\|message\|>|<\|start\|>).)*)<\|message\|>"
    r"(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")


class Harmony(ToolParser):
    name = "harmony"
    #: Each message ends with a token of its own, and so does a turn that was cut.
    pairs: tuple[tuple[str, str], ...] = (("<|channel|>analysis", ""),)

    def writes(self, template: str) -> bool:
        return "<|channel|>" in template

    def read(self, text: str, tools: Sequence[Any] = ()) -> Read:
        said, thought = [], []
        calls: list[Call] = []
        at = 0
        for match in _MESSAGE.finditer(text):
            said.append(text[at : match.start()])
            at = match.end()
            head, body = match.groups()
            channel = _CHANNEL.search(head)
            if to := _TO.search(head):
                name = to.group(1).removeprefix("functions.")
                calls.append(called(name, body.strip(), body))
            elif channel and channel.group(1) == "analysis":
                thought.append(body)
            else:
                said.append(body)
        said.append(text[at:])
        reasoning = "\n".join(thought).strip()
        return Read(text="".join(said), reasoning=reasoning, calls=tuple(calls))
