"""What an agent asks of its episode's policy, and what it gets back, whatever it speaks."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gcore_environments.rendering import Said

CHAT, IDS = "chat", "ids"


class Refused(Exception):
    """A request that gets no answer.

    status: of HTTP. code: a word for programs; empty, one that goes with the status is taken.
    """

    def __init__(self, status: int, text: str, code: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One turn of the policy.

    prompt_ids: all that it read. ids, logp: what it sampled, its end token with it.
    said: the same as text and calls. status: ``finished``, or ``truncated`` where a limit cut it.
    """

    prompt_ids: list[int]
    ids: list[int]
    logp: list[float]
    said: Said
    status: str


@dataclass(kw_only=True, eq=False)
class Asked:
    """One request of an agent, which waits until ``answer`` is set.

    kind: ``chat`` has messages and tools, ``ids`` has ids: a whole prompt, and nothing of it
    trains. most: actions at most; 0, as many as the policy may. stop: texts that end this answer.
    """

    key: tuple[int, int]
    kind: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: tuple[dict[str, Any], ...] = ()
    ids: list[int] = field(default_factory=list)
    most: int = 0
    stop: tuple[str, ...] = ()
    answer: concurrent.futures.Future[Drawn] = field(default_factory=concurrent.futures.Future)

    def reply(self, drawn: Drawn) -> None:
        """Answers. Who asked may have been refused meanwhile, since its episode has ended."""
        self._settle(self.answer.set_result, drawn)

    def refuse(self, refused: Refused) -> None:
        self._settle(self.answer.set_exception, refused)

    @staticmethod
    def _settle(settle: Callable[[Any], None], value: Drawn | Refused) -> None:
        with suppress(concurrent.futures.InvalidStateError):
            settle(value)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What agents are told of the policy, and may not ask otherwise.

    top_k: 0, all tokens. context_length, vocabulary: 0, unknown.
    """

    model: str = "policy"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    context_length: int = 0
    vocabulary: int = 0


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a body asks for, read and checked.

    ignored: names of its fields that have no effect here. body: fields that its dialect wants
    when it writes the answer.
    """

    kind: str = CHAT
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: tuple[dict[str, Any], ...] = ()
    ids: list[int] = field(default_factory=list)
    most: int = 0
    stop: tuple[str, ...] = ()
    stream: bool = False
    ignored: tuple[str, ...] = ()
    body: dict[str, Any] = field(default_factory=dict)
