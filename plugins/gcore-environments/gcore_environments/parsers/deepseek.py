"""Reads calls as DeepSeek V3, R1 and V3.1 write them: a name, a separator, and JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .base import Call, TaggedParser, called, unread

_SEPARATOR = "<｜tool▁sep｜>"
_FENCED = re.compile(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?", re.DOTALL)


class DeepSeek(TaggedParser):
    name = "deepseek"
    tags = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

    def calls_in(self, body: str, tools: Sequence[Any]) -> list[Call]:
        first, found, rest = body.partition(_SEPARATOR)
        if not found:
            return [unread(body)]
        fenced = _FENCED.fullmatch(rest)
        if fenced and first.strip() == "function":  # V3: the kind of tool, its name, fenced JSON
            return [called(fenced.group(1), fenced.group(2), body)]
        return [called(first.strip(), rest.strip(), body)]
