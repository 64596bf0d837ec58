"""Reads calls as GLM 4.5 and later write them: a tag for each key and for each value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .base import Call, TaggedParser, called_by_texts

_PAIR = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    re.DOTALL,
)


class Glm(TaggedParser):
    name = "glm"
    tags = ("<tool_call>", "</tool_call>")
    told_by = ("<arg_key>",)

    def calls_in(self, body: str, tools: Sequence[Any]) -> list[Call]:
        name, key, rest = body.partition("<arg_key>")
        return [called_by_texts(name, _PAIR, key + rest, tools)]
