"""Defines how rewards and environments ask a model of the run: their questions to a generator
role, and the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from gcore_core.contract.records import Prompt, Ref


@dataclass(frozen=True, kw_only=True)
class Question:
    """Holds a prompt that a reward, or an environment, has a generator role answer.

    prompt: what is asked; its ``row`` means nothing.
    seed: of the sampling.
    samples: how many answers are wanted.
    greedy: whether the likeliest token is taken each time.
    about: (ordinal, sample) of the record it is asked for, so that the work can be planned; by
        default it is asked for none.
    images: media that it shows, of ``ScoredRecord.refs``, behind the images of the prompt; they
        travel by reference.
    """

    prompt: Prompt
    seed: int
    samples: int = 1
    greedy: bool = False
    about: tuple[int, int] = (-1, -1)
    images: Sequence[Ref] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds one completion of a question.

    text: the completion.
    status: how it ended, as of a record.
    reason: why it ended so, as of a record; "" where that is a matter of course.
    n_prompt: length of the prompt, in tokens.
    n_actions: length of the completion, in tokens.
    """

    text: str
    status: str
    reason: str = ""
    n_prompt: int = 0
    n_actions: int = 0


class Sampler(Protocol):
    """Lets rewards ask the generator role that they name.

    Its replicas that are awake share the work.
    """

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        """Returns the answers to each question, in the order of the questions.

        A question that a lost replica had not answered goes to another one.
        """


class Speaker(Protocol):
    """Lets an environment ask the generator role that speaks for a player.

    role: its name in the job.
    """

    role: str

    def ask(self, question: Question) -> Future[Answer]:
        """Asks for one answer, and returns at once.

        Its replicas that are awake share the work, and what a lost one owes another one gets.

        The future has the answer later, or what was raised; its callbacks run in another thread
        than the environment, or while that is not called. Nobody may wait for it in a call: where
        one process has all roles, none answers meanwhile. One that is cancelled is not waited for.
        """
