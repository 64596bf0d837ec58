"""Reads calls as Llama 3 writes them: a turn that is nothing but JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from .base import Call, Read, ToolParser, called, split_thinking, unread

_TAG = "<|python_tag|>"
_BEGINS = re.compile(r'\{\s*"(?:name|type)"\s*:')
_KEYS = ("parameters", "arguments")


class Llama(ToolParser):
    name = "llama3"
    pairs: tuple[tuple[str, str], ...] = ()

    def writes(self, template: str) -> bool:
        return _TAG in template or '{"name": function name, "parameters"' in template

    def read(self, text: str, tools: Sequence[Any] = ()) -> Read:
        reasoning, rest = split_thinking(text)
        said, tag, body = rest.partition(_TAG)
        if not tag:
            said, body = "", rest
        calls = _calls_in(body)
        if calls is None and (tag or _BEGINS.match(body.strip())):
            calls = [unread(body)]
        if not calls:
            return Read(text=rest, reasoning=reasoning)
        return Read(text=said.strip(), reasoning=reasoning, calls=tuple(calls))


def _calls_in(body: str) -> list[Call] | None:
    """Returns the calls of a text that is nothing else; they stand with semicolons between."""
    decoder = json.JSONDecoder()
    calls, at, text = [], 0, body.strip()
    while at < len(text):
        try:
            said, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or not any(key in said for key in _KEYS):
            return None
        arguments: Any = next(said[key] for key in _KEYS if key in said)
        calls.append(called(said.get("name"), arguments, text[at:end]))
        at = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
    return calls or None
