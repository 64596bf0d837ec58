"""Reads calls as Hermes, Qwen 2.5 and Qwen 3 write them: JSON between two tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import Call, TaggedParser, object_of


class Hermes(TaggedParser):
    name = "hermes"
    tags = ("<tool_call>", "</tool_call>")

    def calls_in(self, body: str, tools: Sequence[Any]) -> list[Call]:
        return [object_of(body, "arguments", "parameters")]
