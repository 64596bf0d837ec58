"""Reads calls as MiniMax M2 writes them: a tag that has a name for each call and parameter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .base import Call, TaggedParser, called_by_texts, unread

_INVOKE = re.compile(r'\s*<invoke name="?([^">]+)"?>(.*?)</invoke>\s*', re.DOTALL)
_PARAMETER = re.compile(r'<parameter name="?([^">]+)"?>\n?(.*?)\n?</parameter>', re.DOTALL)


class MiniMax(TaggedParser):
    name = "minimax"
    tags = ("<minimax:tool_call>", "</minimax:tool_call>")

    def calls_in(self, body: str, tools: Sequence[Any]) -> list[Call]:
        found = list(_INVOKE.finditer(body))
        if "".join(match.group() for match in found) != body or not found:
            return [unread(body)]
        return [
            called_by_texts(match.group(1), _PARAMETER, match.group(2), tools) for match in found
        ]
