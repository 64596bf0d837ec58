"""A policy that says what a script tells it, behind a real endpoint: it takes what agents ask from
the queue, on a thread of its own, and keeps the book as an episode does.
"""

from __future__ import annotations

import itertools
import json
import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from gcore_environments.book import Book
from gcore_environments.endpoint import Asked, Drawn, EndpointServer, Refused
from gcore_environments.matching import answered, place, place_ids
from gcore_environments.questions import IDS
from gcore_environments.rendering import Bridge, Said, make_renderer
from gcore_environments.testing import byte_tokenizer, letter_by_letter, tokenizer_of

END = 1
_CALL = re.compile(r"<call>(.*?)</call>", re.DOTALL)


class Letters:
    """A chat template whose tokens are letters: ``[role]words`` with an end behind each.

    declines: whether it tells no bridge.
    """

    def __init__(self, declines: bool = False) -> None:
        self.declines = declines

    def start(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        names = " ".join(tool["function"]["name"] for tool in tools)
        said = [one for message in messages for one in [*_letters(_turn(message)), END]]
        return [*_letters(f"[tools]{names}" if names else ""), *said, *_letters("[assistant]")]

    def bridge(
        self,
        ids: list[int],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
    ) -> Bridge | None:
        if self.declines:
            return None
        closed = [] if ids[-1] == END else [END]
        return Bridge([*closed, *self.start(messages)])

    def reply(self, ids: list[int], tools: Sequence[dict[str, Any]] = ()) -> Said:
        return self.read(text_of(ids), tools)

    def read(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Said:
        calls = []
        for place_, body in enumerate(_CALL.findall(text)):
            name, arguments = json.loads(body)
            function = {"name": name, "arguments": json.dumps(arguments)}
            calls.append({"id": f"call_{place_}", "type": "function", "function": function})
        return Said(text=_CALL.sub("", text).strip(), reasoning="", calls=calls, unparsed=0)


def _turn(message: dict[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    said = "".join(f"<call>{[one['name'], one['arguments']]}</call>" for one in calls)
    return f"[{message['role']}]{message['content']}{said}"


def _letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def text_of(ids: list[int]) -> str:
    return "".join(chr(one) for one in ids if one != END)


class ScriptedPolicy:
    """Says ``texts`` one after the other, from the first again, in each episode.

    say: called in place of answering, where a test wants another fate for a request.
    """

    def __init__(
        self,
        *texts: str,
        drift: str = "fork",
        renderer: Any = None,
        encode: Callable[[str], list[int]] = _letters,
        end: int = END,
        say: Callable[[Asked], None] | None = None,
        **about: Any,
    ) -> None:
        self.texts = texts or ("yes",)
        self.drift = drift
        self.renderer = renderer or Letters()
        self.encode, self.end, self.say = encode, end, say
        self.books: dict[tuple[int, int], Book] = defaultdict(Book)
        self.said: dict[tuple[int, int], itertools.count[int]] = defaultdict(itertools.count)
        self.seen: list[Asked] = []
        self.queue: queue.Queue[Asked] = queue.Queue()
        self.endpoint = EndpointServer(self.queue, **about)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def __enter__(self) -> ScriptedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.queue.put(Asked(key=(0, 0), kind="end"))
        self.thread.join()
        self.endpoint.close()

    def _run(self) -> None:
        while (asked := self.queue.get()).kind != "end":
            self.seen.append(asked)
            if self.say is not None:
                self.say(asked)
                continue
            try:
                asked.reply(self._drawn(asked))
            except Refused as refused:
                asked.refuse(refused)

    def _drawn(self, asked: Asked) -> Drawn:
        book = self.books[asked.key]
        if asked.kind == IDS:
            number = place_ids(book, asked.ids, self.drift)
        else:
            number = place(book, self.renderer, asked.messages, asked.tools, self.drift)
        text = self.texts[next(self.said[asked.key]) % len(self.texts)]
        for stop in asked.stop:
            if stop in text:
                text = text[: text.index(stop) + len(stop)]
        ids = [*self.encode(text), self.end]
        cut = ids[: asked.most] if asked.most else ids
        prompt = list(book.sequences[number].ids)
        logp = [-0.25] * len(cut)
        book.sampled(number, cut, logp, [0] * len(cut))
        said = self.renderer.reply(cut, asked.tools)
        if asked.kind != IDS:
            answered(book, number, asked.messages, asked.tools, said, asked.stop)
        status = "finished" if len(cut) == len(ids) else "truncated"
        return Drawn(prompt_ids=prompt, ids=cut, logp=logp, said=said, status=status)


def of_family(family: str, *texts: str, **about: Any) -> ScriptedPolicy:
    """The same with a chat template of a family and its real renderer. It samples letter by letter,
    as no tokenizer would cut its words.
    """
    tokenizer, ends = tokenizer_of(family)
    return of_tokenizer(tokenizer, ends, *texts, **about)


def of_tokenizer(tokenizer: Any, ends: list[int], *texts: str, **about: Any) -> ScriptedPolicy:
    def encode(text: str) -> list[int]:
        return letter_by_letter(tokenizer, text)

    renderer = make_renderer(tokenizer, ends)
    return ScriptedPolicy(*texts, renderer=renderer, encode=encode, end=ends[0], **about)


def qwen_tokenizer(template: str) -> Any:
    """A tokenizer of bytes with Qwen's special tokens: others' renderers of Qwen take it."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names = ("tool_call", "tool_response", "think")
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]
    return byte_tokenizer(template, special, tags)
