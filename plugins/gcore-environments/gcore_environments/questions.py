"""Holds the requests of agents and what answers them, the same for every API that is spoken."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gcore_environments.rendering import Said

CHAT, IDS = "chat", "ids"


class Refused(Exception):
    """Raised where an agent's request is refused.

    status: the status of HTTP that the agent gets.
    text: what a person reads.
    code: a word for programs; "": one that goes with the status is taken.
    """

    def __init__(self, status: int, text: str, code: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One turn of the policy or of a role, as the answer to a request.

    prompt_ids: all that the policy read. This and the next two are empty where a role speaks.
    ids: what it sampled, with the end token.
    logp: of each sampled id, in order: its log-prob.
    said: what the sampled ids say, as text, thoughts and calls.
    status: "finished", or "truncated" where a limit cut the turn.
    counted: of a role, how many tokens it has read, and said.
    """

    prompt_ids: list[int]
    ids: list[int]
    logp: list[float]
    said: Said
    status: str
    counted: tuple[int, int] = (0, 0)

    @property
    def lengths(self) -> tuple[int, int]:
        """How many tokens were read, and said."""
        return (len(self.prompt_ids), len(self.ids)) if self.prompt_ids else self.counted


@dataclass(kw_only=True, eq=False)
class Asked:
    """One request of an agent, which waits until ``answer`` is set.

    key: (ordinal, sample) of the episode.
    kind: ``CHAT``: messages and tools are set. ``IDS``: ids are set, a whole prompt, of which
        nothing is trained on.
    most: the most actions of the answer; 0: as many as the policy may have.
    stop: texts that end the answer.
    role: the role of the run that is asked; "": the policy.
    """

    key: tuple[int, int]
    kind: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: tuple[dict[str, Any], ...] = ()
    ids: list[int] = field(default_factory=list)
    most: int = 0
    stop: tuple[str, ...] = ()
    role: str = ""
    answer: concurrent.futures.Future[Drawn] = field(default_factory=concurrent.futures.Future)

    def reply(self, drawn: Drawn) -> None:
        """Answers the request, unless it was refused meanwhile because its episode has ended."""
        self._settle(self.answer.set_result, drawn)

    def refuse(self, refused: Refused) -> None:
        """Refuses the request, unless it was answered or refused before."""
        self._settle(self.answer.set_exception, refused)

    @staticmethod
    def _settle(settle: Callable[[Any], None], value: Drawn | Refused) -> None:
        with suppress(concurrent.futures.InvalidStateError):
            settle(value)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What agents may know of the policy, or of a role. A request for other sampling values is
    refused.

    is_role: whether it is a role of the run: how that samples is known to its own settings alone.
    top_k: 0: all tokens.
    context_length: the most ids of a prompt and its answer; 0: unknown.
    vocabulary: ids are below this number; 0: unknown.
    """

    model: str = "policy"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    context_length: int = 0
    vocabulary: int = 0
    is_role: bool = False


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the body of a request asks for, read and checked; the fields are those of ``Asked``.

    stream: whether the answer is to come as a stream.
    ignored: names of fields that have no effect.
    body: fields that the dialect needs when it writes the answer.
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
