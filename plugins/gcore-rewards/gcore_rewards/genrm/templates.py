"""Fills texts that a judge is asked, with places such as ``{completion}`` and ``{fields[answer]}``.

A place is a word in braces, with a name in brackets behind it for ``fields``. Every other brace is
itself, so JSON needs no escapes, and ``{{word}}`` is ``{word}``. What is filled in is never read as
a template again.

Nothing in a template can compute or reach into a value, and all its places are known before a run
starts. That is why it is neither ``str.format`` (attributes, indexes) nor Jinja (code).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_language.json_values import json_value

from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.records import Prompt

_PLACE = re.compile(
    r"\{\{(?P<literal>\w+(?:\[[^\[\]{}]+\])?)\}\}|\{(?P<name>\w+)(?:\[(?P<field>[^\[\]{}]+)\])?\}"
)
FIELDS = "fields"


class MissingField(LookupError):
    """A row lacks a field that the template names, or has null there, or what JSON cannot say."""


class Template:
    """One text with places.

    used: names of the places in the text.
    shown: names of the images in the order of their places; one may occur several times.

    Raises ConfigError when the text has a place with another name.

    places: names that the text may use.
    where: the setting that an error names.
    images: names of images that the text may use too.
    """

    def __init__(
        self, text: str, places: frozenset[str], where: str, images: frozenset[str] = frozenset()
    ) -> None:
        self._text = text
        self._images = images
        known = places | images
        self.used = set()
        self.shown: list[str] = []
        for place in _PLACE.finditer(text):
            name = place["name"]
            field = place["field"]
            if name is None:
                continue
            if name == FIELDS and not field:
                raise ConfigError(
                    "{fields} needs the name of a field, as in {fields[answer]}.", where=where
                )
            if name not in known | {FIELDS} or (field and name != FIELDS):
                raise ConfigError(
                    f"{place[0]} is unknown{did_you_mean(name, sorted(known))}.",
                    where=where,
                    why=f"there are: {_listed(known)} and {{fields[<name>]}}",
                    todo=f"if it is meant as it stands, double the braces: {{{place[0]}}}",
                )
            self.used.add(name)
            if name in images:
                self.shown.append(name)

    def content(
        self, values: Mapping[str, str], fields: Mapping[str, Any]
    ) -> str | list[dict[str, str]]:
        """Returns a turn's content: text, or parts of text and image where it shows images.

        Raises MissingField.
        """
        if not self.shown:
            return self.fill(values, fields)
        parts = []
        start = 0
        for place in _PLACE.finditer(self._text):
            if place["name"] in self._images:
                parts += [
                    _text_part(self._fill(self._text[start : place.start()], values, fields)),
                    {"type": "image"},
                ]
                start = place.end()
        parts.append(_text_part(self._fill(self._text[start:], values, fields)))
        return [part for part in parts if part.get("text") != ""]

    def fill(self, values: Mapping[str, str], fields: Mapping[str, Any]) -> str:
        """Returns the text with its places filled. Raises MissingField."""
        return self._fill(self._text, values, fields)

    def _fill(self, text: str, values: Mapping[str, str], fields: Mapping[str, Any]) -> str:
        def value(place: re.Match[str]) -> str:
            if place["literal"]:
                return f"{{{place['literal']}}}"
            if not place["field"]:
                return values[place["name"]]
            if place["field"] not in fields:
                raise MissingField(
                    f"no field {place['field']!r}; the row has: {', '.join(fields) or 'none'}"
                )
            content = fields[place["field"]]
            if isinstance(content, str):
                return content
            if content is None:  # every row of a table has every column
                raise MissingField(
                    f"field {place['field']!r} is null, and the judge would be asked the word null"
                )
            try:
                return json.dumps(json_value(content), ensure_ascii=False)
            except (ValueError, RecursionError) as error:
                raise MissingField(f"field {place['field']!r} cannot be shown: {error}") from None

        return _PLACE.sub(value, text)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@dataclass(frozen=True, kw_only=True)
class Form:
    """A prompt to be filled.

    turns: chat turns, each a role and a template; empty for a plain text.
    text: the template of a plain text; None for a chat.
    """

    turns: Sequence[tuple[str, Template]] = ()
    text: Template | None = None

    @property
    def shown(self) -> list[str]:
        """Names of the images of all turns, in the order of their places."""
        return [name for _, template in self.turns for name in template.shown]

    def requiring(self, needed: frozenset[str], where: str) -> Form:
        """Returns itself. Raises ConfigError unless every needed place occurs somewhere."""
        templates = [template for _, template in self.turns] + ([self.text] if self.text else [])
        missing = needed - {name for template in templates for name in template.used}
        if missing:
            raise ConfigError(
                f"the template does not use {_listed(missing)}.",
                where=where,
                why="Without it, the judge would be asked the same whatever it is to judge.",
            )
        return self

    def fill(self, values: Mapping[str, str], fields: Mapping[str, Any]) -> Prompt:
        """Returns the prompt with its places filled. Raises MissingField."""
        if self.text is not None:
            return Prompt(row=0, text=self.text.fill(values, fields))
        turns = [
            {"role": role, "content": template.content(values, fields)}
            for role, template in self.turns
        ]
        return Prompt(row=0, messages=turns)


def read_template(path: str) -> str:
    """Reads the text of a template file. Raises ConfigError when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the template cannot be read: {error}.", where="path") from error


def _listed(names: frozenset[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names))


def text_of(prompt: Prompt) -> str:
    """Returns a prompt as the judge reads it: its text, its only turn, or all turns with roles."""
    if prompt.messages is None:
        return prompt.text or ""
    turns = [(str(turn.get("role", "")), _said(turn)) for turn in prompt.messages]
    return (
        turns[0][1]
        if len(turns) == 1
        else "\n".join(f"{role}: {content}" for role, content in turns)
    )


def _said(turn: Mapping[str, Any]) -> str:
    """Returns all that a turn says: its text, the mark <image> for an image, its calls as JSON."""
    content = turn.get("content")
    said = [_part(part) for part in content] if isinstance(content, list) else [content or ""]
    calls = [turn[key] for key in ("tool_calls", "function_call") if turn.get(key)]
    said += [json.dumps(call, ensure_ascii=False, default=str) for call in calls]
    return "\n".join(said[1:] if len(said) > 1 and not said[0] else said)


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    return str(part["text"]) if "text" in part else f"<{part.get('type', 'part')}>"
