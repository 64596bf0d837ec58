"""Encodes what a chat template writes, so that no content becomes a special token.

A tokenizer reads the text of a special token as that token, whoever wrote it. So the answer of a
tool could end a turn and begin another one. This is prevented in three steps:

1. Each such text in a content gets a mark in front of it and a mark behind it.
2. The template writes the marked contents.
3. What stands between two marks is encoded as plain text. All else is encoded as usual.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gcore_core.contract.errors import DataError

from .templates import Message, RefusedByTemplate

#: Writes messages and tools; None where it cannot tell.
Writer = Callable[[Sequence[Message], Sequence[Any]], str | None]

_TODO = "Take the text of the special token out of it, or a model whose template keeps contents."


class ContentEncoder:
    """Encodes texts with one tokenizer.

    tokenizer: of transformers.
    source: of the chat template. Tokens that are added to a vocabulary without being special, as
        <think> often is, are kept from contents where the template writes them.
    """

    def __init__(self, tokenizer: Any, source: str = "") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {token.content: id for id, token in added.items() if token.special}
        for text in tokenizer.all_special_tokens:
            special.setdefault(text, tokenizer.convert_tokens_to_ids(text))
        structural = {
            token.content: id
            for id, token in added.items()
            if not token.special and token.content.strip() and token.content in source
        }
        #: Text of each special token -> its id.
        self.special: dict[str, int] = {text: id for text, id in special.items() if text.strip()}
        #: The same, with tokens that are added without being special.
        self.single: dict[str, int] = self.special | structural
        #: For contents of everybody, and for those of the assistant, who writes calls and thoughts.
        self._of_all = _Finder(self.single)
        self._of_assistant = _Finder(self.special)
        self._forbidden = frozenset(self.single.values())
        self._added = _Finder([token.content for token in added.values()]).pattern
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if tokenizer.is_fast else None
        self._normalizer = getattr(self._backend, "normalizer", None)
        self._plain: Any = None
        self._harmless: list[Any] = []

    def encode(
        self,
        write: Writer,
        messages: Sequence[Message],
        tools: Sequence[Any],
        behind: str = "",
    ) -> list[int] | None:
        """Returns the ids of what is written of messages and tools; None where nothing is.

        behind: text of the token that stands in front of it, "" for none.

        Raises DataError where the template changes a content that has the text of a special token.
        It raises what ``write`` raises, too.
        """
        text = write(messages, tools)
        if text is None:
            return None
        marks = _Marks(text, messages, tools)
        marked = [self._marked_message(message, marks) for message in messages]
        marked_tools = self._marked_tools(tools, marks)
        if not marks.count:
            return self.ids(text, behind)
        written = _written(write, marked, marked_tools)
        if written is None or marks.removed(written) != text:
            raise self._changed(write, messages, tools)
        ids: list[int] = []
        for place, segment in enumerate(marks.split(written)):
            if place % 2:
                ids += self.as_text(segment)
            elif place:
                ids += self._behind_text(segment)
            elif segment:
                ids += self.ids(segment, behind)
        return ids

    def _behind_text(self, text: str) -> list[int]:
        """Returns the ids of a text that goes on behind other text, not at a beginning.

        A tokenizer that puts a space in front of a text must put none here.
        """
        token = self._added.search(text)
        head = text[: token.start()] if token else text
        return self.as_text(head) + (self._ids(text[len(head) :]) if token else [])

    def ids(self, text: str, behind: str = "") -> list[int]:
        """Returns the ids of a text in which the texts of special tokens are those tokens.

        behind: text of the token that stands in front of it. A tokenizer may begin a text with a
            space, and may take the spaces behind a token away.
        """
        if behind:
            whole = self._ids(behind + text)
            if whole and whole[0] == self._tokenizer.convert_tokens_to_ids(behind):
                return whole[1:]
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        backend = self._backend
        if backend is not None and backend.truncation is None and backend.padding is None:
            # the same in a sixth of the time
            (encoded,) = backend.encode_batch_fast([text], add_special_tokens=False)
            return list(encoded.ids)
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return list(encoded.input_ids)

    def as_text(self, text: str) -> list[int]:
        """Returns the ids of a text in which nothing is a special token.

        Raises DataError where the tokenizer has no other ids for it.
        """
        if not text:
            return []
        if self._backend is not None:
            if self._plain is None:
                self._plain = _without_added_tokens(self._backend)
            ids = list(self._plain.encode(text, add_special_tokens=False).ids)
            if self._forbidden.isdisjoint(ids):
                return ids
        ids = [id for part in self._of_all.broken(text) for id in self._ids(part)]
        if self._forbidden.isdisjoint(ids):
            return ids
        raise DataError(
            f"the tokenizer has no ids for {text[:40]!r} but those of a special token.",
            where="content",
            todo="Take the text of the special token out of the content.",
        )

    def texts_as_text(self, texts: Sequence[str], behind: str = "") -> list[int]:
        """Returns the ids of texts one behind the other, in which nothing is a special token."""
        messages = [{"role": "user", "content": text} for text in texts]
        ids = self.encode(lambda given, _: _joined(given), messages, (), behind)
        return ids or []

    def _marked_tools(self, tools: Sequence[Any], marks: _Marks) -> Sequence[Any]:
        """Returns tools with marks; the same tools in turn after turn are looked at once."""
        if list(tools) == self._harmless:
            return tools
        before = marks.count
        marked = [self._marked(tool, self._of_all, marks) for tool in tools]
        if marks.count == before:
            self._harmless = copy.deepcopy(list(tools))
            return tools
        return marked

    def _marked_message(self, message: Message, marks: _Marks) -> dict[str, Any]:
        """Returns a message with marks around what must stay text."""
        marked = {}
        for key, value in message.items():
            said = message.get("role") == "assistant" and key != "tool_calls"
            marked[key] = self._marked(value, self._of_assistant if said else self._of_all, marks)
        return marked

    def _marked(self, value: Any, finder: _Finder, marks: _Marks) -> Any:
        if isinstance(value, str):
            spans = list(finder.spans(value))
            if not spans and self._is_hidden(value, finder):
                start = len(value) - len(value.lstrip())
                spans = [(start, start + len(value.strip()))]
            return marks.around(value, spans) if spans else value
        if isinstance(value, Mapping):
            return {
                self._marked(key, finder, marks): self._marked(each, finder, marks)
                for key, each in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._marked(each, finder, marks) for each in value]
        return value

    def _is_hidden(self, value: str, finder: _Finder) -> bool:
        """Whether the tokenizer makes the text of a special token out of another, as ＜ is <."""
        if self._normalizer is None:
            return False
        return finder.pattern.search(self._normalizer.normalize_str(value)) is not None

    def _changed(
        self, write: Writer, messages: Sequence[Message], tools: Sequence[Any]
    ) -> DataError:
        """Makes the error for a content that the template changes."""
        where = "messages"
        for place, message in enumerate(messages):
            text = write(messages, tools) or ""
            marks = _Marks(text, messages, tools)
            marked = [*messages]
            marked[place] = self._marked_message(message, marks)
            written = _written(write, marked, tools) if marks.count else text
            if written is None or marks.removed(written) != text:
                where = f"messages[{place}] ({message.get('role')})"
                break
        else:
            where = "tools"
        return DataError(
            "the chat template changes a content that holds the text of a special token, so it "
            "cannot be given as text.",
            where=where,
            todo=_TODO,
        )


class _Finder:
    """Finds the texts of tokens, and at the ends of a text pieces that a neighbour may complete."""

    def __init__(self, texts: Sequence[str] | Mapping[str, int]) -> None:
        ordered = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        #: Last character of a text's beginning -> such beginnings, the longest first.
        self._heads: dict[str, list[str]] = {}
        #: First character of a text's end -> such ends, the longest first.
        self._tails: dict[str, list[str]] = {}
        for text in ordered:
            for cut in range(1, len(text)):
                self._heads.setdefault(text[cut - 1], []).append(text[:cut])
                self._tails.setdefault(text[cut], []).append(text[cut:])
        for pieces in (*self._heads.values(), *self._tails.values()):
            pieces.sort(key=len, reverse=True)

    def spans(self, value: str) -> Iterator[tuple[int, int]]:
        """Yields the places of what must be encoded as text, in order."""
        core = value.strip()
        if not core:
            return
        found = [match.span() for match in self.pattern.finditer(value)]
        begin = value.index(core)
        end = begin + len(core)
        first = found[0][0] if found else end
        for tail in self._tails.get(core[0], ()):
            if len(tail) <= first - begin and core.startswith(tail):
                yield begin, begin + len(tail)
                begin += len(tail)
                break
        yield from found
        last = found[-1][1] if found else begin
        for head in self._heads.get(core[-1], ()):
            if len(head) <= end - last and core.endswith(head):
                yield end - len(head), end
                break

    def broken(self, text: str) -> Iterator[str]:
        """Yields a text in pieces of which none holds the text of a token."""
        at = 0
        for match in self.pattern.finditer(text):
            yield text[at : match.start() + 1]
            at = match.start() + 1
        yield text[at:]


class _Marks:
    """Marks of one conversation: words that stand in no text of it."""

    def __init__(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        self.count = 0
        self._texts = (text, messages, tools)
        self._word = ""
        self._pattern: re.Pattern[str] | None = None

    def around(self, value: str, spans: Sequence[tuple[int, int]]) -> str:
        """Returns a text with a mark in front of each span, and another behind it."""
        if not self._word:
            text, messages, tools = self._texts
            said = text + repr((messages, tools))
            words = (f"Zq{number}q" for number in itertools.count(7))
            self._word = next(word for word in words if word not in said)
            self._pattern = re.compile(self._word + r"(\d+)([be])")
        parts, at = [], 0
        for begin, end in spans:
            number = self.count
            self.count += 1
            parts += [value[at:begin], f"{self._word}{number}b", value[begin:end]]
            parts.append(f"{self._word}{number}e")
            at = end
        return "".join([*parts, value[at:]])

    def removed(self, text: str) -> str | None:
        """Returns a text without the marks; None where they do not come in pairs."""
        if self._pattern is None:
            return text
        open_number = None
        for match in self._pattern.finditer(text):
            number, kind = match.groups()
            if kind == "b":
                if open_number is not None:
                    return None
                open_number = number
            else:
                if open_number != number:
                    return None
                open_number = None
        return None if open_number is not None else self._pattern.sub("", text)

    def split(self, text: str) -> list[str]:
        """Returns the segments of a text, by turns outside of marks and between two."""
        assert self._pattern is not None
        return self._pattern.split(text)[::3]


def _written(write: Writer, messages: Sequence[Message], tools: Sequence[Any]) -> str | None:
    """Returns what is written of marked messages; None where the marks are refused."""
    try:
        return write(messages, tools)
    except RefusedByTemplate:
        return None


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


def _without_added_tokens(backend: Any) -> Any:
    """Returns a copy of a tokenizer that knows no added token, and puts nothing around a text."""
    described = json.loads(backend.to_str())
    described["added_tokens"] = []
    described["post_processor"] = described["truncation"] = described["padding"] = None
    for part in _parts_of(described):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
        if part.get("type") == "Prepend":
            part["prepend"] = ""
    return type(backend).from_str(json.dumps(described))


def _parts_of(described: Any) -> Iterator[dict[str, Any]]:
    """Yields all descriptions of a tokenizer's normalizer and pre-tokenizer."""
    for section in ("normalizer", "pre_tokenizer"):
        stack = [described.get(section)]
        while stack:
            part = stack.pop()
            if isinstance(part, dict):
                yield part
                stack += part.get("normalizers", []) + part.get("pretokenizers", [])
