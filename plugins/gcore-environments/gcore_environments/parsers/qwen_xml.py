"""Reads calls as Qwen3-Coder, Qwen 3.5 and Nemotron write them: a tag for each parameter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .base import Call, TaggedParser, called_by_texts, unread

_FUNCTION = re.compile(r"\s*<function=([^>]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class QwenXml(TaggedParser):
    name = "qwen3_xml"
    tags = ("<tool_call>", "</tool_call>")
    told_by = ("<function=",)

    def calls_in(self, body: str, tools: Sequence[Any]) -> list[Call]:
        found = list(_FUNCTION.finditer(body))
        if "".join(match.group() for match in found).strip() != body.strip() or not found:
            return [unread(body)]
        return [
            called_by_texts(match.group(1), _PARAMETER, match.group(2), tools) for match in found
        ]
