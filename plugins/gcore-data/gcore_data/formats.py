"""Makes prompts from the rows of data sets, in the formats in which the hub has them.

prompt                    a text, or a chat [{role, content}, ...]
messages, conversations   a chat; also [{from, value}, ...], as ShareGPT writes it
chosen, rejected          texts or chats of preference data, with a prompt or without
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gcore_core.contract.errors import DataError, did_you_mean
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import shortened
from gcore_data.config import HubConfig
from gcore_data.extraction import extracted

Turns = list[dict[str, Any]]

_CHATS = ("messages", "conversations")
_ANSWERS = ("chosen", "rejected")
#: Who speaks, in ShareGPT's words -> role of a chat.
_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
#: Who tells a model how to behave, in the first turn of a chat.
_SYSTEM = ("system", "developer")
#: Where an answer begins in a dialogue that is one text (Anthropic's HH).
_ASSISTANT = "\n\nAssistant:"
#: Where an image stands in a text of a data set with images.
_IMAGE = "<image>"
_PLACE = re.compile(r"\{(\w+)\}")


def prompt_of(row: int, values: Mapping[str, Any], config: HubConfig, where: str) -> Prompt:
    """Makes the prompt of a row, without images.

    row: its number. values: column -> value. where: the row, for errors.

    Raises DataError where a column is missing, or a value is of no format.
    """
    fields = _named(values, config, where)
    prompt = _prompt(fields, config, where)
    if isinstance(prompt, str) and config.form == "chat":
        content = _parts(prompt) if config.images else prompt
        prompt = [{"role": "user", "content": content}]
    if not isinstance(prompt, str):
        if config.form == "text":
            raise DataError("its prompt is a chat, and form is text", where=where)
        if config.system and prompt[0]["role"] not in _SYSTEM:
            prompt = [{"role": "system", "content": config.system}, *prompt]
        if config.last_answer == "take":
            prompt = _without_answer(prompt, fields, where)
    for name, rule in config.extract.items():
        fields[name] = _extracted(fields, name, rule, where)
    if isinstance(prompt, str):
        return Prompt(row=row, text=prompt, fields=fields)
    return Prompt(row=row, messages=prompt, fields=fields)


def places_of(template: str) -> list[str]:
    """Returns the fields that a template names, in their order."""
    return list(dict.fromkeys(_PLACE.findall(template)))


def _named(values: Mapping[str, Any], config: HubConfig, where: str) -> dict[str, Any]:
    """Returns field -> value: columns by the names that the configuration gives them."""
    renamed = {field: _value_at(values, column, where) for field, column in config.columns.items()}
    taken = {column for column in config.columns.values() if "." not in column}
    others = {name: value for name, value in values.items() if name not in taken}
    return {**others, **renamed}


def _value_at(values: Mapping[str, Any], column: str, where: str) -> Any:
    """Returns the value of a column; dots lead into objects."""
    if column in values:
        return values[column]
    value: Any = values
    for key in column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            there = list(value) if isinstance(value, Mapping) else []
            raise DataError(
                f"no column {column!r}{did_you_mean(key, there)}",
                where=where,
                why=f"there are: {', '.join(there) or 'none below it'}",
                todo="correct data.config.columns",
            )
        value = value[key]
    return value


def _prompt(fields: dict[str, Any], config: HubConfig, where: str) -> str | Turns:
    """Returns the prompt, and takes the field that holds it off the others."""
    if config.template:
        return _filled(config.template, fields, where)
    if "prompt" in fields:
        value = fields.pop("prompt")
        return value if isinstance(value, str) else _turns(value, "prompt", where)
    for name in _CHATS:
        if name in fields:
            return _turns(fields.pop(name), name, where)
    if all(name in fields for name in _ANSWERS):
        return _common_beginning(fields, where)
    raise DataError(
        "nothing in the row is a prompt",
        where=where,
        why=f"it has: {', '.join(fields) or 'no column'}",
        todo="name the column: data.config.columns: {prompt: <column>}, or set a template",
    )


def _filled(template: str, fields: Mapping[str, Any], where: str) -> str:
    """Returns the template's text with the values of its fields, as JSON where they are no text."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if fields.get(name) is not None:
            plain = msgspec.to_builtins(fields[name])
            return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
        if name in fields:
            raise DataError(
                f"the template names {name!r}, which is null",
                where=where,
                todo="correct or drop the row, or leave the field out of data.config.template",
            )
        raise DataError(
            f"the template names {name!r}{did_you_mean(name, list(fields))}",
            where=where,
            why=f"the row has: {', '.join(fields)}",
            todo="correct data.config.template, or data.config.columns",
        )

    return _PLACE.sub(value, template)


def _parts(text: str) -> str | list[dict[str, str]]:
    """Returns a text with places of images as the parts of a turn."""
    if _IMAGE not in text:
        return text
    first, *others = text.split(_IMAGE)
    parts = [{"type": "text", "text": first}] if first else []
    for other in others:
        parts.append({"type": "image"})
        parts += [{"type": "text", "text": other}] if other else []
    return parts


def _turns(value: Any, name: str, where: str) -> Turns:
    """Returns a chat in the form [{role, content}]. Raises DataError for what is none."""
    turns = [_turn(turn) for turn in value] if isinstance(value, list) else []
    if turns and all(turn is not None for turn in turns):
        return [turn for turn in turns if turn is not None]
    raise DataError(
        f"field {name!r} is {shortened(repr(value).encode())}, neither a text nor a chat",
        where=where,
        why='a chat is a list of objects with "role" and "content", or "from" and "value"',
    )


def _turn(turn: Any) -> dict[str, Any] | None:
    """Returns a turn with what it says; None for what is no turn.

    A table has every key in every turn, so those without a value are no part of it.
    """
    if not isinstance(turn, Mapping):
        return None
    if "from" in turn and "value" in turn:
        speaker = str(turn["from"])
        return {"role": _ROLES.get(speaker, speaker), "content": turn["value"]}
    if isinstance(turn.get("role"), str) and "content" in turn:
        return {key: value for key, value in turn.items() if value is not None}
    return None


def _common_beginning(fields: dict[str, Any], where: str) -> str | Turns:
    """Returns what both answers begin with, and leaves of them what follows it."""
    chosen, rejected = (fields[name] for name in _ANSWERS)
    if isinstance(chosen, str) and isinstance(rejected, str):
        end = _common_text(chosen, rejected)
        fields.update(chosen=chosen[end:], rejected=rejected[end:])
        prompt: str | Turns = chosen[:end]
    else:
        both = [_turns(fields[name], name, where) for name in _ANSWERS]
        common = 0
        while common < min(map(len, both)) and both[0][common] == both[1][common]:
            common += 1
        while common and (common == min(map(len, both)) or both[0][common]["role"] != "assistant"):
            common -= 1
        fields.update(chosen=both[0][common:], rejected=both[1][common:])
        prompt = both[0][:common]
    if not prompt:
        raise DataError("chosen and rejected begin with no prompt that is the same", where=where)
    return prompt


def _common_text(chosen: str, rejected: str) -> int:
    """Returns where the answers begin in two texts of a dialogue; 0 where they share none."""
    end = chosen.rfind(_ASSISTANT)
    if end < 0 or chosen[:end] != rejected[:end] or rejected.rfind(_ASSISTANT) != end:
        return 0
    return end + len(_ASSISTANT)


def _without_answer(turns: Turns, fields: dict[str, Any], where: str) -> Turns:
    if turns[-1]["role"] != "assistant" or len(turns) < 2:
        raise DataError(
            "its chat does not end with a turn of the assistant",
            where=where,
            todo="set data.config.last_answer: keep",
        )
    if "completion" in fields:
        raise DataError(
            "its chat's last answer would take the place of the field 'completion'",
            where=where,
            todo="name that column otherwise in data.config.columns, or set last_answer: keep",
        )
    fields["completion"] = turns[-1]["content"]
    return turns[:-1]


def _extracted(fields: Mapping[str, Any], name: str, rule: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise DataError(
            f"field {name!r}, from which an answer is to be extracted, is "
            f"{shortened(repr(value).encode()) if name in fields else 'not there'}",
            where=where,
            why=f"the row has: {', '.join(fields)}",
            todo="correct data.config.extract, or data.config.columns",
        )
    answer = extracted(rule, value)
    if answer is None:
        raise DataError(
            f"no answer by the rule {rule!r} in field {name!r}: {shortened(value.encode())}",
            where=where,
            todo="correct data.config.extract",
        )
    return answer
