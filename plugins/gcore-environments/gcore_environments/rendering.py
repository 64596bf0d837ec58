"""Turns messages into ids: once for the first prompt, and then only the messages that are new.

What a policy sampled is never encoded again from its text. Most texts can be cut into tokens in
several ways, and a model must be trained on the tokens that it took. So the ids that follow a turn
are found without the turn itself. A short conversation stands for the real one: a question, and a
made-up answer, the *stand-in* for the policy's turn. The chat template writes it twice:

    before  = the question and the stand-in
    after   = the same, then the new messages, up to where the policy begins to speak again
    new ids = the ids of what ``after`` has behind the end of the stand-in

Some templates write an old turn differently once new messages follow it; most of these drop its
thoughts. Then ``after`` does not begin with ``before``. With ``history: strict`` the method
``bridge`` returns None, and the caller begins another sequence. With ``history: keep`` the policy
goes on reading what it said.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from gcore_language.prompts import added_tokens
from gcore_language.turns import text_of

from gcore_core.contract.errors import ConfigError, DataError

from .contents import ContentEncoder
from .moulds import Moulds, looks_of
from .parsers import Read, ToolParser, choose_parser
from .templates import ASKED, Message, RefusedByTemplate, Template, call, checked

log = logging.getLogger(__name__)

History = Literal["strict", "keep"]

#: Stands for what the policy said, and for what it thought.
_SAID = "gcoresaid"
_THOUGHT = "gcorethought"
_NEXT: Message = {"role": "user", "content": "next"}
_NO_VARIABLES: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Bridge:
    """The ids between a turn of the policy and its next one.

    ids: to append.
    drop: how many ids at the end of the sequence must be left out first, 0 or 1. It is 1 where the
        policy has ended its turn by another token than the template writes there. That token stays
        where it was sampled, so the conversation goes on in another sequence.
    """

    ids: list[int]
    drop: int = 0


@dataclass(frozen=True)
class Said:
    """What a policy said in one turn.

    text: without thoughts, calls and the end token.
    reasoning: its thoughts; "" without any.
    calls: of tools, in the form of chat completions: arguments are a text. One that could not be
        read has no name, or arguments that are no object in JSON.
    unparsed: how many of the calls could not be read.
    """

    text: str
    reasoning: str
    calls: list[dict[str, Any]]
    unparsed: int


class Renderer(Protocol):
    """Turns messages into ids, and ids into what was said."""

    def start(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Returns the ids of a conversation up to where the policy begins to speak.

        Raises DataError for messages that cannot be written.
        """

    def bridge(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> Bridge | None:
        """Returns the ids that follow a turn of the policy when new messages come.

        It is None where they cannot be known without writing old turns again. The caller then
        begins another sequence.

        ids: all ids of the sequence; the last ones are what the policy sampled.
        messages: the new ones alone.

        Raises DataError for messages that cannot be written.
        """

    def reply(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Said:
        """Returns what the sampled ids of one turn say. Never raises.

        A call that cannot be read is counted in ``unparsed``.
        """

    def read(self, text: str, tools: Sequence[Any] = ()) -> Said:
        """Returns what a text says that another model has written. It has no end token."""


def make_renderer(
    tokenizer: Any,
    end_ids: Collection[int],
    *,
    history: History = "strict",
    parser: str = "auto",
    template_kwargs: Mapping[str, Any] = _NO_VARIABLES,
) -> Renderer:
    """Makes a renderer for a model, and logs what a job should know of its chat template.

    tokenizer: of transformers.
    end_ids: the tokens that end a turn of the policy.
    history: strict: the policy reads what the template writes of the whole conversation, with its
        own turns as it sampled them. keep: it goes on reading what it said, even where the template
        would now write that differently.
    parser: how calls are read; "auto": by the text of the chat template.
    template_kwargs: variables of the chat template.

    Raises ConfigError for an unknown parser or history.
    """
    if history not in ("strict", "keep"):
        raise ConfigError(
            f"must be strict or keep, is {history!r}.", where="history", todo="Take one of them."
        )
    if not tokenizer.chat_template:
        return PlainRenderer(tokenizer, end_ids, None if parser == "auto" else parser)
    renderer = TemplateRenderer(
        tokenizer, end_ids, history=history, parser=parser, template_kwargs=template_kwargs
    )
    for warning in renderer.warnings():
        log.warning("%s", warning)
    return renderer


def warnings_of(renderer: Renderer) -> list[str]:
    """Returns what a job should know of a renderer before it starts, one sentence each.

    Where no turn has a bridge, so that each begins another sequence, that alone is said.
    """
    return renderer.warnings() if isinstance(renderer, TemplateRenderer) else []


def digest(messages: Sequence[Message], tools: Sequence[Any] = ()) -> bytes:
    """Returns 16 bytes that name a history, the same when an agent posts it again.

    Agents write the arguments of calls in another order, cut spaces off contents, and leave out
    thoughts. So only roles, contents without spaces around them, and names and arguments of calls
    count, and the tools.
    """
    plain = [
        [
            message.get("role"),
            text_of(message.get("content")).strip(),
            [_called(each) for each in message.get("tool_calls") or ()],
        ]
        for message in messages
    ]
    said = json.dumps([plain, list(tools)], sort_keys=True, default=repr)
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _called(each: Any) -> Any:
    """Returns name and arguments of a call, as an object where they are one."""
    function = each.get("function", each) if isinstance(each, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]


class _Reader:
    """Reads ids of a turn with the parser of the model's family.

    parser: None: nothing is a call.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], parser: ToolParser | None) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_ids)
        self._parser = parser

    def text(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of a turn without the token that ended it."""
        if len(ids) and ids[-1] in self._ends:
            ids = ids[:-1]
        text: str = self._tokenizer.decode(
            [int(id) for id in ids],
            skip_special_tokens=skip_special,
            clean_up_tokenization_spaces=False,
        )
        return text

    def said(self, ids: Sequence[int], tools: Sequence[Any], begun: str = "") -> Said:
        """Returns what was said.

        begun: text with which the prompt has begun the turn.
        """
        if self._parser is None:
            return Said(self.text(ids, skip_special=True), "", [], 0)
        return self.read(begun + self.text(ids), tools, repr([int(id) for id in ids]))

    def read(self, text: str, tools: Sequence[Any], name: str = "") -> Said:
        """Returns what a text says.

        name: calls that have no id get one that follows from it; "": from the text.
        """
        if self._parser is None:
            return Said(text, "", [], 0)
        read = self._parser.read(text, tools)
        return Said(
            read.text,
            read.reasoning,
            list(_completions(read, name or text)),
            sum(not each.is_read for each in read.calls),
        )


def _completions(read: Read, name: str) -> Iterator[dict[str, Any]]:
    """Yields calls in the form of chat completions.

    A call that has no id gets one of nine letters and digits, since some templates take nothing
    else. It is the same whenever the name is.
    """
    named = hashlib.blake2b(name.encode(), digest_size=3).hexdigest()
    for number, each in enumerate(read.calls):
        yield call(each.name, each.arguments, each.id or f"c{named}{number % 100:02}")


class PlainRenderer:
    """Renders for a model without a chat template: contents one behind the other.

    parser: of calls, by its name; None: nothing is a call.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], parser: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_ids)
        self._contents = ContentEncoder(tokenizer)
        chosen = choose_parser(parser) if parser else None
        self._reader = _Reader(tokenizer, end_ids, chosen)
        added = added_tokens(tokenizer)
        whole = list(tokenizer("", add_special_tokens=True).input_ids)
        self._front = whole[: added.before]

    def start(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        return self._front + self._contents.texts_as_text(_texts_of(messages))

    def bridge(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> Bridge | None:
        ended = len(ids) and ids[-1] in self._ends
        behind = self._tokenizer.convert_ids_to_tokens(int(ids[-1])) if ended else ""
        return Bridge(self._contents.texts_as_text(_texts_of(messages), behind))

    def reply(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Said:
        return self._reader.said(ids, tools)

    def read(self, text: str, tools: Sequence[Any] = ()) -> Said:
        return self._reader.read(text, tools)


def _texts_of(messages: Sequence[Message]) -> list[str]:
    return [text_of(message["content"]) for message in checked(messages)]


class TemplateRenderer:
    """Renders by the chat template of the tokenizer; arguments as in ``make_renderer``."""

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Collection[int],
        *,
        history: History = "strict",
        parser: str = "auto",
        template_kwargs: Mapping[str, Any] = _NO_VARIABLES,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_ids)
        self._keeps = history == "keep"
        self._template = Template(tokenizer, template_kwargs)
        self._contents = ContentEncoder(tokenizer, self._template.source)
        self._parser = choose_parser(parser, self._template.source)
        self._reader = _Reader(tokenizer, end_ids, self._parser)
        self._look = TemplateLook(self._template, self._contents.special)
        ends = {tokenizer.convert_ids_to_tokens(id) for id in self._ends} | {self._look.end}
        self._end_texts = sorted(ends - {"", None}, key=len, reverse=True)
        self._opening = self._contents.ids(self._look.opening)
        self._looks_for = looks_of(self._template.source)
        self._written: list[tuple[Sequence[Any], str, Moulds]] = []

    def warnings(self) -> list[str]:
        """Returns what a job should know, each in one sentence."""
        look = self._look
        if look.problem:
            return [f"{look.problem}; no turn has a bridge, so each begins another sequence"]
        found = []
        ends = {self._tokenizer.convert_ids_to_tokens(id) for id in self._ends}
        if look.end and not look.is_role and look.end not in ends:
            known = ", ".join(sorted(ends)) or "nothing"
            found.append(
                f"the chat template ends a turn with {look.end}, which ends no answer of this "
                f"model; that does {known}"
            )
        if not self._keeps and not look.keeps_thoughts(for_tools=False):
            found.append(
                "the chat template drops old thoughts once the user speaks again, so an answer "
                "with thoughts begins another sequence then; history: keep goes on"
            )
        return found

    def start(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        try:
            ids = self._contents.encode(self._template.write, checked(messages), tools)
        except RefusedByTemplate as error:
            raise DataError(
                f"the chat template refuses the messages: {error}",
                where="messages",
                todo="Take roles and an order of them that the model's chat template knows.",
            ) from error
        return ids or []

    def reply(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Said:
        return self._reader.said(ids, tools, self._begun)

    def read(self, text: str, tools: Sequence[Any] = ()) -> Said:
        return self._reader.read(text, tools)

    def bridge(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> Bridge | None:
        messages = checked(messages)
        if self._look.problem or not len(ids) or self._lacks_names(messages):
            return None
        last = int(ids[-1]) if int(ids[-1]) in self._ends else None
        closing = self._closing(ids) if last is None else ""
        sampled = self._tokenizer.convert_ids_to_tokens(last) if last is not None else ""
        try:
            new = self._behind(ids, messages, tools)
            if new is None:
                return None
            stands = self._keeps and new.role not in self._end_texts
            is_left = bool(sampled) and (stands or sampled == new.boundary)

            def write(given: Sequence[Message], given_tools: Sequence[Any]) -> str | None:
                found = new if given is messages else self._behind(ids, given, given_tools)
                if found is None:
                    return None
                return found.after(sampled) if is_left else closing + found.end + found.text

            added = self._contents.encode(write, messages, tools, sampled if is_left else "")
        except RefusedByTemplate:
            return None
        drop = int(bool(sampled) and not is_left)
        return None if added is None else Bridge(added, drop)

    def _behind(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Any]
    ) -> _New | None:
        """Returns what the template writes behind the policy's words; None: it does not tell."""
        answers = _answers(messages)
        _, word, moulds = self._of_tools(tools)
        word = _unsaid(messages, word)
        forms = [_stand_in(answers, word)]
        keeps = self._look.keeps_thoughts(for_tools=bool(answers))
        if not self._keeps and not keeps and self._has_thoughts(ids):
            return None
        opened = moulds.write([ASKED])
        for form in forms:
            before = moulds.write([ASKED, form], opens=False)
            after = moulds.write([ASKED, form], messages)
            if after.startswith(opened) and after.startswith(before):
                new = self._by_difference(before, after[len(before) :], word)
                if new is not None:
                    return new
            elif self._keeps or self._is_as_said(ids, opened, before, after, word):
                return self._behind_the_word(after, word)
            if form is forms[0] and keeps and self._thinks(ids):
                forms.append(self._look.thoughtful(form))
        return self._behind_the_word(after, word) if self._keeps else None

    def _of_tools(self, tools: Sequence[Any]) -> tuple[Sequence[Any], str, Moulds]:
        """Returns tools, a word that they do not have, and what writes with them."""
        for of_tools in self._written:
            if list(of_tools[0]) == list(tools):
                return of_tools
        tools = copy.deepcopy(list(tools))
        of_tools = tools, _unsaid(tools), Moulds(self._template, self._looks_for, tools)
        self._written = [*self._written[-1:], of_tools]  # with marks in them, and without
        return of_tools

    def _is_as_said(
        self, ids: Sequence[int], opened: str, before: str, after: str, word: str
    ) -> bool:
        """Whether the policy spoke as the template writes a turn that others follow.

        Some begin the last turn otherwise, such as with an empty thought.
        """
        if not before.startswith(opened) or not after.startswith(opened):
            return False
        last = before[len(opened) : before.find(word, len(opened))]
        earlier = after[len(opened) : after.find(word, len(opened))]
        while last and earlier and last[-1] == earlier[-1]:
            last, earlier = last[:-1], earlier[:-1]
        said = self._turn(ids)[len(self._begun) :]
        return said.startswith(earlier) and (not last or not said.startswith(last))

    def _by_difference(self, before: str, rest: str, word: str) -> _New | None:
        """Returns what is new, where the template only goes on.

        rest: what it writes behind the stand-in.
        """
        at = before.rfind(word)
        if at < 0:
            return None
        tail = before[at + len(word) :]
        end = max((e for e in self._end_texts if e in tail), key=tail.rfind, default="")
        if not end:
            space = tail[len(tail.rstrip()) :]
            return _New("", space + rest, self._contents.special)
        separator = tail[tail.rfind(end) + len(end) :]
        return None if separator.strip() else _New(end, separator + rest, self._contents.special)

    def _behind_the_word(self, after: str, word: str) -> _New | None:
        """Returns what stands behind the stand-in's last word, however its turn was written."""
        at = after.rfind(word)
        tail = after[at + len(word) :] if at >= 0 else ""
        found = [(tail.find(end), -len(end), end) for end in self._end_texts if end in tail]
        if not found:
            return None
        place, _, end = min(found)
        if self._look.is_role:
            return _New("", tail[place:], self._contents.special)
        return _New(end, tail[place + len(end) :], self._contents.special)

    def _lacks_names(self, messages: Sequence[Message]) -> bool:
        """Whether the template would write the name of a tool that no message says."""
        return self._look.needs_names and any(
            message["role"] == "tool" and not message.get("name") for message in messages
        )

    def _has_thoughts(self, ids: Sequence[int]) -> bool:
        """Whether the policy has thought in one of its turns."""
        for opens, _ in self._parser.pairs[:1]:
            id = self._contents.single.get(opens)
            return id in ids if id is not None else opens in self._reader.text(ids)
        return False

    def _thinks(self, ids: Sequence[int]) -> bool:
        """Whether there is a thought in the last turn that says something."""
        for opens, closes in self._parser.pairs[:1]:
            _, opened, rest = self._turn(ids).partition(opens)
            return bool(opened and (rest.partition(closes)[0] if closes else rest).strip())
        return False

    def _closing(self, ids: Sequence[int]) -> str:
        """Returns what closes the thoughts and calls that a turn that was cut has left open."""
        closings = dict(self._parser.pairs)
        if not closings:
            return ""
        thinks = self._parser.pairs[0][1]
        missing: list[str] = []
        tags = sorted({*closings, *closings.values()} - {""}, key=len, reverse=True)
        for match in re.finditer("|".join(map(re.escape, tags)), self._turn(ids)):
            tag = match.group()
            if missing and tag == missing[-1]:
                missing.pop()
            elif tag in closings and thinks not in missing:
                missing.append(closings[tag])
        return "".join(reversed(missing))

    def _turn(self, ids: Sequence[int]) -> str:
        """Returns the text of the last turn, with what the prompt has begun of it."""
        begin = _place_behind(ids, self._opening)
        if begin is None:
            known = set(self._contents.special.values()) - self._tag_ids
            places = (at for at in range(len(ids) - 2, -1, -1) if ids[at] in known)
            begin = next(places, -1) + 1
        return self._begun + self._reader.text(ids[begin:])

    @cached_property
    def _begun(self) -> str:
        """What the prompt has begun of each turn: a thought that it has opened, or nothing."""
        for opens, closes in self._parser.pairs[:1]:
            _, opened, rest = self._look.opening.rpartition(opens)
            if opened and closes not in rest:
                return opened + rest
        return ""

    @cached_property
    def _tag_ids(self) -> set[int]:
        tags = {tag for pair in self._parser.pairs for tag in pair}
        return {id for text, id in self._contents.special.items() if text in tags}


@dataclass(frozen=True)
class _New:
    """What a template writes behind the policy's words.

    end: the token with which it ends the turn; "" where the next turn's role does that.
    text: what follows.
    special: texts of special tokens.
    """

    end: str
    text: str
    special: Collection[str] = field(repr=False)

    @property
    def role(self) -> str:
        """The token of the next turn's role, where nothing else ends the turn."""
        if self.end:
            return ""
        begun = self.text.lstrip()
        return max((t for t in self.special if begun.startswith(t)), key=len, default="")

    @property
    def boundary(self) -> str:
        return self.end or self.role

    def after(self, sampled: str) -> str:
        """Returns what follows the token that the policy has sampled at its end."""
        if self.role and self.role == sampled:
            return self.text.lstrip()[len(sampled) :]
        return self.text


class TemplateLook:
    """What a short conversation shows of a chat template.

    template: that is looked at.
    special: texts of the tokenizer's special tokens.
    """

    def __init__(self, template: Template, special: Collection[str]) -> None:
        self._template = template
        #: With what it has the assistant begin; "" where it writes nothing.
        self.opening = ""
        #: The token with which it ends an assistant's turn; "" where there is none.
        self.end = ""
        #: Whether that token is the one of the next turn's role.
        self.is_role = False
        #: Why no turn can be bridged; "" where one can.
        self.problem = ""
        self._kept: dict[bool, bool] = {}
        try:
            self._look(special)
        except RefusedByTemplate as error:
            self.problem = f"the chat template refuses a question and its answer: {error}"

    def _look(self, special: Collection[str]) -> None:
        said = {"role": "assistant", "content": _SAID}
        opened = self._template.write([ASKED])
        closed = self._template.write([ASKED], opens=False)
        alone = self._template.write([ASKED, said], opens=False)
        followed = self._template.write([ASKED, said, _NEXT])
        if opened.startswith(closed):
            self.opening = opened[len(closed) :]
        if _SAID not in alone or _SAID not in followed:
            self.problem = "the chat template leaves out what the assistant said"
            return
        header = alone[len(closed) : alone.index(_SAID)] if alone.startswith(closed) else ""
        if not self.opening and any(text in header for text in special):
            self.problem = (
                "the chat template ignores add_generation_prompt: it begins a turn of the "
                f"assistant with {header!r}, and a prompt ends without that"
            )
            return
        later = [ASKED, {"role": "assistant", "content": "answered"}, ASKED, said]
        if _behind_word(self._template.write([*later, _NEXT])) != _behind_word(followed):
            self.problem = "the chat template writes a turn otherwise according to its place"
            return
        tail = _behind_word(followed).lstrip()
        self.end = max((text for text in special if tail.startswith(text)), key=len, default="")
        ended = _behind_word(alone).lstrip()
        self.is_role = bool(self.end) and not any(ended.startswith(text) for text in special)

    @cached_property
    def needs_names(self) -> bool:
        """Whether the template writes the name of the tool in front of its answer."""
        written = set()
        for name in ("gcorefirst", "gcoresecond"):
            said = {"role": "assistant", "content": "", "tool_calls": [call(name, {"x": _SAID})]}
            answer = {"role": "tool", "content": "42", "name": name, "tool_call_id": "call00000"}
            try:
                written.add(_behind_word(self._template.write([ASKED, said, answer])))
            except RefusedByTemplate:
                return False
        return len(written) > 1

    def keeps_thoughts(self, *, for_tools: bool) -> bool:
        """Whether thoughts of a turn are still written once new messages follow it.

        for_tools: whether those are answers of tools.
        """
        if for_tools not in self._kept:
            self._kept[for_tools] = self._keeps_thoughts(for_tools)
        return self._kept[for_tools]

    def _keeps_thoughts(self, for_tools: bool) -> bool:
        new = _NEXT
        calls: dict[str, Any] = {}
        if for_tools:
            calls = {"tool_calls": [call("f", {"x": "y"})]}
            new = {"role": "tool", "content": "next", "name": "f", "tool_call_id": "call00000"}
        said = {"role": "assistant", "content": "" if for_tools else _SAID, **calls}
        try:
            return _THOUGHT in self._template.write([ASKED, self.thoughtful(said), new])
        except RefusedByTemplate:
            return False

    def thoughtful(self, form: Message) -> dict[str, Any]:
        """Returns a stand-in with a thought, where the template looks for one."""
        if self._knows_thoughts:
            return {**form, "reasoning_content": _THOUGHT}
        return {**form, "content": f"<think>\n{_THOUGHT}\n</think>\n\n{form['content']}"}

    @cached_property
    def _knows_thoughts(self) -> bool:
        """Whether the template writes thoughts that are not part of a content."""
        said = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT}
        try:
            return _THOUGHT in self._template.write([ASKED, said], opens=False)
        except RefusedByTemplate:
            return False


def _behind_word(text: str) -> str:
    """Returns what stands behind the policy's last word."""
    return text[text.rfind(_SAID) + len(_SAID) :]


def _answers(messages: Sequence[Message]) -> list[Message]:
    """Returns the answers of tools that begin new messages: those to the turn before."""
    return list(itertools.takewhile(lambda message: message["role"] == "tool", messages))


def _unsaid(said: Sequence[Any], word: str = _SAID) -> str:
    """Returns a word that stands nowhere in what was said."""
    text = repr(said)
    longer = (f"{word}{number}x" for number in itertools.count())
    return word if word not in text else next(each for each in longer if each not in text)


def _stand_in(answers: Sequence[Message], word: str) -> dict[str, Any]:
    """Returns a turn that stands for the policy's, with a call for each answer.

    word: its last.
    """
    calls = [
        call(each.get("name") or "f", {"x": word}, each.get("tool_call_id") or f"call{n:05}")
        for n, each in enumerate(answers)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": "" if calls else word}
    return {**said, "tool_calls": calls} if calls else said


def _place_behind(ids: Sequence[int], part: Sequence[int]) -> int | None:
    """Returns the place behind the last occurrence of a part; None where it does not occur."""
    if not part:
        return None
    for begin in range(len(ids) - len(part), -1, -1):
        if ids[begin] == part[0] and list(ids[begin : begin + len(part)]) == list(part):
            return begin + len(part)
    return None
