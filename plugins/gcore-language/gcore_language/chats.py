"""Writes chats by the template that lies with a model's tokenizer.

Nobody else calls a template: it is a program of the model's author, which may raise anything, and
may write what no row has or leave out what one has. Templates know the contents of turns in one of
two forms, or in both:

    texts   they write a content as it is; given a list of parts, they write Python's form of it
    parts   they go through the parts of a content; given a text, they may write nothing

Which one it is, a short chat shows (vLLM finds it out in the template's syntax tree).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from gcore_language import turns as of_turns
from gcore_language.turns import Turns

#: A chat template that gets nothing besides the messages.
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
#: No template writes it of itself, and none changes it.
_WORD = "gcorewasherefirst"
#: How a list of parts begins where it is written as it is.
_RAW = ("{'type': 'text'", "{'type': 'image'", '{"type": "text"', '{"type": "image"')
_SHOWN = 300


class Unreadable(Exception):
    """A prompt cannot be turned into tokens; its text says why, and what to do."""


class Chats:
    """Writes chats with one tokenizer.

    tokenizer: of transformers.
    variables: what the template gets besides the turns.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] = NO_VARIABLES) -> None:
        self._tokenizer = tokenizer
        self._variables = variables
        self._omitted: dict[Hashable, str] = {}

    def asked(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """Returns a chat up to where the assistant begins to speak.

        Raises Unreadable for a chat that cannot be written, or that ends with an answer.
        """
        self._require(turns, sampled=True)
        text = self._write(turns, opens=True)
        if str(turns[-1].get("role")).lower() not in of_turns.ASKS and self._answers(turns):
            raise Unreadable(
                f"it ends with a turn of {turns[-1].get('role')!r}, whom the template has answer; "
                "take it off the rows"
            )
        return text

    def written(self, turns: Sequence[Mapping[str, Any]], *, opens: bool = False) -> str:
        """Returns a chat, whoever has the last turn.

        opens: whether it goes on to where the assistant begins to speak.

        Raises Unreadable for a chat that cannot be written.
        """
        self._require(turns, sampled=False)
        return self._write(turns, opens=opens)

    def marked(self, turns: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        """Returns the tokens of a chat, and 1 for those that the template marks as an answer's.

        Raises Unreadable for a chat that cannot be written.
        """
        self._require(turns, sampled=False)
        form, _ = self._chosen(turns, opens=False)
        answer = self._applied(
            form,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return list(answer["input_ids"]), list(answer["assistant_masks"])

    def _require(self, turns: Sequence[Mapping[str, Any]], *, sampled: bool) -> None:
        if problem := of_turns.problem_of(turns, sampled=sampled):
            raise Unreadable(problem)

    def _answers(self, turns: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the last turn begins as the template has the assistant begin."""
        before = turns[:-1]
        if not before:
            return False
        try:
            opened = self._write(before, opens=True)
            closed = self._write(before, opens=False)
            whole = self._write(turns, opens=False)
        except Unreadable:
            return False
        return len(opened) > len(closed) and whole.startswith(opened)

    def _write(self, turns: Sequence[Mapping[str, Any]], *, opens: bool) -> str:
        return self._chosen(turns, opens=opens)[1]

    def _chosen(self, turns: Sequence[Mapping[str, Any]], *, opens: bool) -> tuple[Turns, str]:
        """Returns turns in the form that the template takes, and what it writes of them.

        Raises Unreadable where it takes none, or leaves a turn out.
        """
        chosen = self._formed(turns, opens)
        pattern = of_turns.pattern_of(turns)
        if pattern not in self._omitted:
            self._omitted[pattern] = self._left_out(turns, opens)
        if missing := self._omitted[pattern]:
            raise Unreadable(f"the chat template leaves out {missing}")
        return chosen

    def _formed(self, turns: Sequence[Mapping[str, Any]], opens: bool) -> tuple[Turns, str]:
        """Returns what ``_chosen`` does, whether or not a turn is left out."""
        form, text = self._with_calls(self._shape(turns), opens)
        if _is_raw(text, turns):  # one role's parts are known, and another's are not
            form, text = self._with_calls(self._in_texts(turns), opens)
        if _is_raw(text, turns):
            raise Unreadable("the chat template writes a list of parts as it is")
        return form, text

    def _left_out(self, turns: Sequence[Mapping[str, Any]], opens: bool) -> str:
        """Returns which of the turns the template does not write; "": it writes every one."""
        changed, words = of_turns.with_words(turns, _WORD)
        try:
            return _not_in(self._formed(changed, opens)[1], words)
        except Unreadable:
            pass  # it does not take a text that is changed, such as one in JSON: so each alone
        for word in words:
            changed, alone = of_turns.with_words(turns, _WORD, only=word)
            try:
                missing = _not_in(self._formed(changed, opens)[1], alone)
            except Unreadable:
                continue  # it has read the text
            if missing:
                return missing
        return ""

    def _with_calls(self, turns: Turns, opens: bool) -> tuple[Turns, str]:
        """Writes a chat, in which tools may be called; returns its form, too.

        Templates differ in whether they take arguments as objects or as texts, and null for no
        content. The first form counts of which none raises, and nothing of Python's gets into the
        text.
        """
        if not any(turn.get("tool_calls") for turn in turns):
            return turns, self._rendered(turns, opens)
        errors = []
        best: tuple[int, Turns, str] | None = None
        for form in _forms_of_calls(turns):
            try:
                text = self._rendered(form, opens)
            except Unreadable as error:
                errors.append(error)
                continue
            foreign = text.count("None") + sum(map(text.count, _python_texts(form)))
            if best is None or foreign < best[0]:
                best = foreign, form, text
        if best is None:
            raise errors[0]
        return best[1:]

    @cached_property
    def _shape(self) -> Callable[[Sequence[Mapping[str, Any]]], Turns]:
        """What brings turns into the form that the template knows."""
        writes_text = self._writes([{"role": "user", "content": _WORD}])
        part = {"type": "text", "text": _WORD}
        if self._writes([{"role": "user", "content": [part]}]):
            return of_turns.as_they_are if writes_text else of_turns.in_parts
        return self._in_texts

    def _writes(self, turns: Turns) -> bool:
        """Whether the template writes the text of these turns, and nothing of Python's."""
        try:
            text = self._rendered(turns, opens=False)
        except Unreadable:
            return False
        return _WORD in text and not _is_raw(text, [])

    def _in_texts(self, turns: Sequence[Mapping[str, Any]]) -> Turns:
        if of_turns.shows_images(turns):
            raise Unreadable("it shows images, and the chat template knows none")
        return of_turns.in_texts(turns)

    def _rendered(self, turns: Turns, opens: bool) -> str:
        """Returns what the template makes of turns as they are."""
        return str(self._applied(turns, add_generation_prompt=opens, tokenize=False))

    def _applied(self, turns: Turns, **options: Any) -> Any:
        if not self._tokenizer.chat_template:
            raise Unreadable(
                "it is a chat, and the tokenizer has no chat template; take a model with one, or "
                "rows with texts"
            )
        try:
            return self._tokenizer.apply_chat_template(turns, **options, **self._variables)
        except Exception as error:  # isolation point: a program of the model's author
            said = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
            raise Unreadable(f"the chat template refuses it: {said}") from error


def _not_in(text: str, words: Mapping[str, str]) -> str:
    """Returns what the first word stands behind that is not in a text; "": all are there."""
    lower = text.lower()  # of a template that writes all in capitals, too
    return next((what for word, what in words.items() if word not in lower), "")


def _is_raw(text: str, turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text has a list of parts in Python's or JSON's form that no turn says."""
    said = [of_turns.text_of(turn.get("content")) for turn in turns]
    return any(mark in text and not any(mark in one for one in said) for mark in _RAW)


def _forms_of_calls(turns: Turns) -> Iterator[Turns]:
    """Yields turns with the ways in which templates take calls of tools."""
    for objects in (True, False):
        called = of_turns.called_with(turns, objects=objects)
        yield called
        yield [{**turn, "content": turn.get("content") or ""} for turn in called]


def _python_texts(turns: Turns) -> Iterator[str]:
    """Yields what Python would write of the arguments of calls that are objects."""
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            called = call.get("function", call) if isinstance(call, Mapping) else {}
            arguments = called.get("arguments") if isinstance(called, Mapping) else None
            if isinstance(arguments, Mapping) and arguments:
                yield str(arguments)
