"""What parsers of tool calls have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a tool, as it was said.

    name: of the tool; "" where it could not be read.
    arguments: an object in JSON; the text that was said where it could not be read.
    id: that the policy gave it; "" where its format has none.
    is_read: whether name and arguments are what was meant.
    """

    name: str
    arguments: str
    id: str = ""
    is_read: bool = True


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a policy said in one turn: to the user, to itself, and to tools."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class ToolParser(Protocol):
    """Reads the format of one family of models."""

    #: That jobs call it by.
    name: str

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Texts that open and close a thought, and then those of calls.

        What is open when a turn is cut gets closed.
        """

    def writes(self, template: str) -> bool:
        """Whether a chat template with this text writes calls in this format."""

    def read(self, text: str, tools: Sequence[Any] = ()) -> Read:
        """Reads one turn. Never raises: what cannot be read is a call that says so.

        text: with special tokens, without the one that ended it; where the prompt has opened a
            thought it begins with what opens one.
        tools: that were offered, in the form of chat completions. Formats whose arguments have no
            types take them from there.
        """


THINK = ("<think>", "</think>")


class TaggedParser:
    """Reads calls that stand between two texts, each by itself.

    A parser of a family says what the texts are, and reads what is between them.
    """

    name = ""
    tags: tuple[str, str] = ("", "")
    thinks: tuple[str, str] = THINK
    #: Texts around all calls of a turn, where there are such.
    section: tuple[str, str] | None = None
    #: One of these texts in a chat template tells the family.
    told_by: tuple[str, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        around = [self.section] if self.section else []
        return (self.thinks, *around, self.tags)

    def writes(self, template: str) -> bool:
        return any(each in template for each in self.told_by or self.tags[:1])

    def read(self, text: str, tools: Sequence[Any] = ()) -> Read:
        reasoning, rest = split_thinking(text, self.thinks)
        opens, closes = self.tags
        pieces, calls, at = [], [], 0
        while (begin := rest.find(opens, at)) >= 0:
            pieces.append(rest[at:begin])
            inside = begin + len(opens)
            end = rest.find(closes, inside)
            body = rest[inside:] if end < 0 else rest[inside:end]
            at = len(rest) if end < 0 else end + len(closes)
            calls += self.calls_in(body, tools) if end >= 0 else [unread(body)]
        if not calls:
            return Read(text=rest, reasoning=reasoning)
        pieces.append(rest[at:])
        said = "".join(pieces)
        for each in self.section or ():
            said = said.replace(each, "")
        return Read(text=said.strip(), reasoning=reasoning, calls=tuple(calls))

    def calls_in(self, body: str, tools: Sequence[Any]) -> list[Call]:
        """Returns the calls that stand between the two texts."""
        raise NotImplementedError


def split_thinking(text: str, pair: tuple[str, str] = THINK) -> tuple[str, str]:
    """Returns (what a turn says before its thought is closed, what it says then).

    A turn that has opened a thought and not closed it says nothing then.
    """
    opens, closes = pair
    begun = text.lstrip()
    if begun.startswith(opens):
        thought, closed, rest = begun[len(opens) :].partition(closes)
        return (thought.strip(), rest.lstrip("\n")) if closed else (thought.strip(), "")
    thought, closed, rest = text.partition(closes)
    if closed and opens not in thought:
        return thought.strip(), rest.lstrip("\n")
    return "", text


def unread(body: str) -> Call:
    """Returns a call that could not be read, with what was said."""
    return Call(name="", arguments=body.strip(), is_read=False)


def called(name: Any, arguments: Any, body: str, id: str = "") -> Call:
    """Returns a call of an object, or of one in JSON; one that is not read where it is neither.

    body: what was said, in case that it cannot be read.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return Call(
                name=name if isinstance(name, str) else "",
                arguments=arguments,
                id=id,
                is_read=False,
            )
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        return unread(body)
    return Call(name=name, arguments=json.dumps(arguments, ensure_ascii=False), id=id)


def parsed(text: str) -> Any:
    """Returns what a text says in JSON; None where it says nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def object_of(body: str, *keys: str) -> Call:
    """Returns the call that an object in JSON says.

    keys: under which the arguments may stand.
    """
    said = parsed(body)
    if not isinstance(said, dict):
        return unread(body)
    arguments: Any = next((said[key] for key in keys if key in said), {})
    id = said.get("id")
    return called(said.get("name"), arguments, body, id if isinstance(id, str) else "")


def called_by_texts(name: str, pattern: re.Pattern[str], body: str, tools: Sequence[Any]) -> Call:
    """Returns a call whose arguments stand in a text as keys and values.

    pattern: of one argument: its key and its value. Between two there is nothing.
    """
    name = name.strip()
    if not name or pattern.sub("", body).strip():
        return Call(name=name, arguments=body.strip(), is_read=False)
    said = {match.group(1).strip(): match.group(2) for match in pattern.finditer(body)}
    return called(name, typed(name, said, tools), body)


def typed(name: str, arguments: Mapping[str, str], tools: Sequence[Any]) -> dict[str, Any]:
    """Returns arguments that were said as texts with the types that a tool's description gives.

    A text stays one where the description says so; else it is what it says in JSON, if anything.
    """
    types = _types_of(name, tools)
    return {key: _typed(value, types.get(key)) for key, value in arguments.items()}


def _types_of(name: str, tools: Sequence[Any]) -> dict[str, Any]:
    """Returns the schema of each parameter of a tool; {} where no tool has that name."""
    for tool in tools:
        described = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(described, Mapping) and described.get("name") == name:
            schema = described.get("parameters")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            return dict(properties) if isinstance(properties, Mapping) else {}
    return {}


def _typed(value: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return value
    text = value.strip()
    said = parsed(text)
    if said is None and text != "null":
        words = {"True": True, "False": False, "None": None}
        return words.get(text, value)
    return said
