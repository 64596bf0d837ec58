"""Writes conversations by the chat template of a model's tokenizer, in the form that it takes.

Templates differ: contents as texts or as lists of parts, arguments of calls as objects or as JSON,
reasoning under one of three names. Which ones, a short conversation shows, once at the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from gcore_language import turns

from gcore_core.contract.errors import DataError

Message = Mapping[str, Any]

#: No template writes it of itself, and none changes it.
WORD = "gcorewashere"
#: Under these names templates look for what a model thought before it spoke.
REASONING = ("reasoning_content", "reasoning", "thinking")
ASKED: Message = {"role": "user", "content": "asked"}
_SHOWN = 300


class RefusedByTemplate(Exception):
    """A chat template raised; the text says what."""


class Template:
    """Writes conversations with one tokenizer.

    tokenizer: of transformers, with a chat template.
    variables: what the template gets besides the messages.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self.source = _source_of(tokenizer)

    def write(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, opens: bool = True
    ) -> str:
        """Returns a conversation as the template writes it.

        opens: whether it goes on to where the assistant begins to speak.

        Raises RefusedByTemplate where the template raises.
        """
        formed = [self._formed(message) for message in messages]
        if self._parts_alone:
            formed = turns.in_parts(formed)
        return self._apply(formed, tools, opens)

    def _formed(self, message: Message) -> dict[str, Any]:
        formed = {key: value for key, value in message.items() if value is not None}
        formed["content"] = turns.text_of(message.get("content"))
        if not formed.get("tool_calls", True):
            del formed["tool_calls"]
        if "tool_calls" in formed:
            form = self._form_of_calls
            if form is None:
                calls = formed.pop("tool_calls")
                formed["content"] = "\n".join([formed["content"], *map(_as_text, calls)]).lstrip()
            else:
                formed = turns.called_with([formed], objects=form[0])[0]
                formed["content"] = formed["content"] or form[1]
        thought = next((formed[key] for key in REASONING if formed.get(key)), None)
        for key in REASONING:
            formed.pop(key, None)
            if thought is not None and key in self.source:
                formed[key] = thought
        return formed

    @cached_property
    def _parts_alone(self) -> bool:
        """Whether the template writes a content only where it is a list of parts."""
        text = {"role": "user", "content": WORD}
        parts = {"role": "user", "content": [{"type": "text", "text": WORD}]}
        return not self._writes([text]) and self._writes([parts])

    @cached_property
    def _form_of_calls(self) -> tuple[bool, str | None] | None:
        """How the template takes calls: arguments as objects or as JSON, no content as "" or null.

        None: it writes no calls, so they become part of what was said. Some write them only where
        the content is null.
        """
        for objects, nothing in ((True, ""), (True, None), (False, ""), (False, None)):
            arguments: Any = {WORD: "word"} if objects else f'{{"{WORD}": "word"}}'
            calls = [call("f", arguments)]
            said = {"role": "assistant", "content": nothing, "tool_calls": calls}
            if self._writes([ASKED, said], foreign=(f"{{'{WORD}'", f'\\"{WORD}', "None")):
                return objects, nothing
        return None

    def _writes(self, messages: Sequence[Message], foreign: Sequence[str] = ("[{",)) -> bool:
        """Whether the template writes ``WORD`` of these messages, and no foreign text."""
        try:
            text = self._apply(messages, (), False)
        except RefusedByTemplate:
            return False
        return WORD in text and not any(each in text for each in foreign)

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any], opens: bool) -> str:
        try:
            written = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=opens,
                tokenize=False,
                **self._variables,
            )
        except Exception as error:  # isolation point: a program of the model's author
            said = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
            raise RefusedByTemplate(said) from error
        return str(written)


def _as_text(each: Any) -> str:
    """Returns a call as Hermes writes it, for a template that knows no calls."""
    function = each.get("function", each)
    arguments = function.get("arguments")
    said = json.dumps(function.get("name"), ensure_ascii=False)
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {said}, "arguments": {arguments}}}\n</tool_call>'


def call(name: str, arguments: Any, id: str = "call00000") -> dict[str, Any]:
    """Returns a call of a tool as messages hold it.

    id: some templates take nothing but nine letters and digits.
    """
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages in which each answer of a tool has the name of what was called.

    Raises DataError for a message that is none.
    """
    named: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                "it is no message: a message is an object with a role and a content.",
                where=f"messages[{place}]",
            )
        has_calls = isinstance(message.get("tool_calls"), list) and message["tool_calls"]
        content = message.get("content")
        if content is None and not has_calls:
            content = ""
        if problem := turns.problem_of([{**message, "content": content}]):
            raise DataError(
                f"the message cannot be written: {problem.split(': ', 1)[-1]}.",
                where=f"messages[{place}] ({message['role']})",
            )
        if turns.shows_images([{**message, "content": content}]):
            raise DataError(
                "the message shows an image, and an environment's messages are texts.",
                where=f"messages[{place}] ({message['role']})",
                todo="Say in words what it shows.",
            )
        copied = {**message, "content": content}
        for each in message.get("tool_calls") or ():
            if isinstance(each, Mapping) and isinstance(each.get("function", each), Mapping):
                names[each.get("id")] = each.get("function", each).get("name", "")
        name = names.get(message.get("tool_call_id"))
        if message["role"] == "tool" and name and not message.get("name"):
            copied["name"] = name
        named.append(copied)
    return named


def _source_of(tokenizer: Any) -> str:
    """Returns the text of a tokenizer's chat templates."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, Mapping) else str(template)
