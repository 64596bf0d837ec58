"""Reads calls as Mistral's models write them, the older as a list, the newer each by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .base import THINK, Call, Read, ToolParser, called, split_thinking, unread

_TAG = "[TOOL_CALLS]"
_THINK = ("[THINK]", "[/THINK]")
_NAMED = re.compile(
    r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]([^\[]*))?(?:\[ARGS\])?\s*(\{.*)",
    re.DOTALL,
)


class Mistral(ToolParser):
    name = "mistral"
    pairs: tuple[tuple[str, str], ...] = (_THINK,)

    def writes(self, template: str) -> bool:
        return _TAG in template

    def read(self, text: str, tools: Sequence[Any] = ()) -> Read:
        thinks = _THINK if any(tag in text for tag in _THINK) else THINK
        reasoning, rest = split_thinking(text, thinks)
        said, *bodies = rest.split(_TAG)
        if not bodies:
            return Read(text=rest, reasoning=reasoning)
        calls = tuple(call for body in bodies for call in _calls_in(body))
        return Read(text=said.strip(), reasoning=reasoning, calls=calls)


def _calls_in(body: str) -> Iterator[Call]:
    if named := _NAMED.fullmatch(body):
        name, id, arguments = named.groups()
        yield called(name, arguments.strip(), body, (id or "").strip())
        return
    try:
        said, _ = json.JSONDecoder().raw_decode(body.strip())
    except (ValueError, RecursionError):
        yield unread(body)
        return
    each: Any
    for each in said if isinstance(said, list) and said else [said]:
        if isinstance(each, dict):
            id = each.get("id")
            arguments = each.get("arguments", {})
            yield called(each.get("name"), arguments, body, id if isinstance(id, str) else "")
        else:
            yield unread(body)
