"""Reads calls as Kimi K2 writes them: an id that holds the name, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import Call, TaggedParser, called, unread

_ARGUMENTS = "<|tool_call_argument_begin|>"


class Kimi(TaggedParser):
    name = "kimi"
    tags = ("<|tool_call_begin|>", "<|tool_call_end|>")
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

    def calls_in(self, body: str, tools: Sequence[Any]) -> list[Call]:
        id, found, arguments = body.partition(_ARGUMENTS)
        id = id.strip()
        name = id.removeprefix("functions.").rpartition(":")[0] or id
        return [called(name, arguments.strip(), body, id) if found else unread(body)]
