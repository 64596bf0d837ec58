"""How a reward asks a model: questions to a generator role, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gcore_core.contract.records import Prompt, Ref


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt that a reward has a generator role answer ``samples`` times; its ``row`` means
    nothing.

    about: (ordinal, sample) of the record it is asked for, so that the work can be planned. images:
    media that it shows, of ``ScoredRecord.refs``, behind the images of the prompt; they travel by
    reference.
    """

    prompt: Prompt
    seed: int
    samples: int = 1
    greedy: bool = False
    about: tuple[int, int] = (-1, -1)
    images: Sequence[Ref] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One completion as text; ``status`` and ``reason`` as of a record."""

    text: str
    status: str
    reason: str = ""
    n_prompt: int = 0
    n_actions: int = 0


class Sampler(Protocol):
    """A generator role as the rewards that name it see it: its replicas that are awake share the
    work.
    """

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        """The answers to each question, in order. What a lost replica had not answered goes to
        another one.
        """
