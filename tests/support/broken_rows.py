"""Writes files of rows that no model can be asked, in one way each.

``BROKEN`` has a maker for each way: ``rows(draw)`` returns JSON values, one a line; among whole
rows one, or all, are broken. ``chat`` says which key of ``core/jsonl`` names the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

#: Whole rows.
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "1+1="}]}
TEXT: dict[str, Any] = {"prompt": "1+1="}


@dataclass(frozen=True, kw_only=True)
class BrokenRows:
    """One way.

    broken: makes a row that is.
    says: a pattern of the problem that ``g-core check`` must tell.
    chat: whether the rows are chats, under ``messages``; else they are texts, under ``prompt``.
    """

    broken: Callable[[Random], Any]
    says: str
    chat: bool = True

    def write(self, file: Path, draw: Random) -> tuple[dict[str, Any], int]:
        """Writes a file in which one row is broken; returns ``data.config`` for core/jsonl, and
        which row is.
        """
        rows = [CHAT if self.chat else TEXT] * draw.randrange(0, 3)
        number = draw.randrange(0, len(rows) + 1)
        rows.insert(number, self.broken(draw))
        return write_rows(file, rows, chat=self.chat), number


def write_rows(file: Path, rows: Sequence[Any], *, chat: bool) -> dict[str, Any]:
    """Writes rows, or lines as they are; returns ``data.config`` for core/jsonl."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {"path": str(file), **({"messages": "messages"} if chat else {})}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": content}


def chat(*turns: Callable[[Random], Any] | dict[str, Any], says: str) -> BrokenRows:
    def broken(draw: Random) -> Any:
        return {"messages": [turn(draw) if callable(turn) else turn for turn in turns]}

    return BrokenRows(broken=broken, says=says)


def content(value: Callable[[Random], Any], says: str) -> BrokenRows:
    return chat(lambda draw: user(value(draw)), says=says)


def text(row: Any, says: str) -> BrokenRows:
    return BrokenRows(broken=lambda draw: row, says=says, chat=False)


def _number(draw: Random) -> Any:
    return draw.choice([0, 1, 7, 2.5, -1])


def _link(draw: Random) -> Any:
    url = draw.choice(["https://example.org/a.png", "data:image/png;base64,AA==", "a.png"])
    return [{"type": draw.choice(["image_url", "input_image"]), "image_url": {"url": url}}]


_ANSWERED = "it ends with the assistant's answer"

BROKEN: Mapping[str, BrokenRows] = {
    "answer-at-the-end": chat(user("1+1="), said("2"), says=_ANSWERED),
    "empty-answer-at-the-end": chat(user("1+1="), said(""), says=_ANSWERED),
    "answer-alone": chat(said("2"), says=_ANSWERED),
    "two-answers": chat(user("1+1="), said("2"), said("3"), says=_ANSWERED),
    "answer-of-a-model": chat(
        user("1"), lambda draw: said("2", draw.choice(["model", "gpt", "bot"])), says=_ANSWERED
    ),
    "calls-at-the-end": chat(
        user("1"), {**said(None), "tool_calls": [{"function": {"name": "f"}}]}, says=_ANSWERED
    ),
    "nothing-asked": content(lambda draw: draw.choice(["", " ", []]), "last turn .user. is empty"),
    "content-null": content(lambda draw: None, "its content is null"),
    "content-number": content(_number, "its content is a number"),
    "content-bool": content(lambda draw: draw.choice([True, False]), "true or false"),
    "content-object": content(lambda draw: {"text": "1"}, "its content is an object"),
    "earlier-null": chat(said(None, "system"), user("1"), says="turn 0 .system.: its content is"),
    "answer-null": chat(user("1"), said(None), user("2"), says="turn 1 .assistant.: its content"),
    "tool-object": chat(
        user("1"), said({"x": 1}, "tool"), user("2"), says="its content is an object"
    ),
    "part-link": content(_link, "it has a part of type (image_url|input_image)"),
    "part-image": content(
        lambda draw: [{"type": "image"}], "parts of type image, and the row names 0 images"
    ),
    "part-video": content(
        lambda draw: [{"type": draw.choice(["video", "audio", "input_audio"])}],
        "there are text and image",
    ),
    "part-without-type": content(lambda draw: [{"text": "1"}], "a part of type null"),
    "part-without-text": content(
        lambda draw: [{"type": "text", "text": draw.choice([None, 1])}], "type text has no text"
    ),
    "part-word": content(lambda draw: ["1+1="], "a part of its content is no object"),
    "no-turns": chat(says="not a list of chat messages"),
    "no-role": chat({"content": "1"}, says="not a list of chat messages"),
    "role-number": chat({"role": 1, "content": "1"}, says="not a list of chat messages"),
    "no-content": chat({"role": "user"}, says="not a list of chat messages"),
    "turns-text": BrokenRows(
        broken=lambda draw: {"messages": "1+1="}, says="not a list of chat messages"
    ),
    "other-field": BrokenRows(broken=lambda draw: {"chat": [user("1")]}, says="no field"),
    "no-json": BrokenRows(
        broken=lambda draw: draw.choice(["{", "1,2", "[1"]), says="not JSON|object"
    ),
    "text-null": text({"prompt": None}, "neither a text"),
    "text-number": text({"prompt": 5}, "neither a text"),
    "text-list": text({"prompt": ["1"]}, "not a list of chat messages"),
    "text-missing": text({"question": "1"}, "no field"),
    "text-no-object": text(["1"], "expected an object"),
}
