"""What the engine has to draw for episodes: one request by ids for each turn of the policy.

The core's requests and those of episodes share an engine. Turns are told from the others by their
ordinals, which the core never sees; what is no turn passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcore_core.contract.generator import Finished, Generator, SampleRequest
from gcore_core.contract.order import FIRST_TURN
from gcore_core.contract.records import Prompt
from gcore_environments.questions import Asked

Key = tuple[int, int]

_MASK = (1 << 63) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn that the engine draws.

    key: (ordinal, sample) of its episode.
    sequence: the sequence of the episode's book that it goes on with.
    ids: int32[P], all of that sequence.
    seed: of its sampling.
    most: most actions.
    greedy: as of the episode.
    stop: texts that end it.
    player: who speaks.
    tools: that it may call.
    asked: the request of an agent, which hears what was said; None: an environment's host does.
    """

    key: Key
    sequence: int
    ids: np.ndarray
    seed: int
    most: int
    greedy: bool = False
    stop: tuple[str, ...] = ()
    player: str = ""
    tools: Sequence[dict[str, Any]] = ()
    asked: Asked | None = None


def seed_of_turn(seed: int, place: int) -> int:
    """Returns the seed of a sample's turn: its own for the first one, then mixed with the place.

    A draw repeats with the sample's seed, and no two turns share their random numbers.
    """
    return seed ^ (_GOLDEN * place & _MASK)


class Turns:
    """The turns and questions that the engine draws.

    Turns wait until the next step, and go to the engine in the order of their episodes, so that it
    does not matter which environment was quick.
    """

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self._waiting: list[Turn] = []
        self._running: dict[Key, Turn] = {}
        self._questions = set[Key]()
        self._next = FIRST_TURN

    def __bool__(self) -> bool:
        return bool(self._waiting or self._running or self._questions)

    def ask(self, questions: Sequence[SampleRequest]) -> None:
        """Hands over what is no episode."""
        self._questions.update((one.ordinal, one.sample) for one in questions)
        self._engine.submit(questions)

    def draw(self, turn: Turn) -> None:
        """Has a turn drawn, from the next step on."""
        self._waiting.append(turn)

    def step(self) -> tuple[list[tuple[Turn, Finished]], list[Finished]]:
        """Advances the engine. Returns the turns that ended, and the answers to questions."""
        self._submit()
        if not (self._running or self._questions):
            return [], []
        return self._sorted(self._engine.step())

    def end(self, key: Key) -> list[tuple[Turn, Finished]]:
        """Ends the turns of an episode; returns those that the engine has, as far as they came."""
        self._waiting = [turn for turn in self._waiting if turn.key != key]
        running = [name for name, turn in self._running.items() if turn.key == key]
        return self._sorted(self._engine.abort(running))[0] if running else []

    def end_questions(self, keys: Sequence[Key]) -> list[Finished]:
        """Ends questions; keys of others are ignored."""
        asked = [key for key in keys if key in self._questions]
        return self._sorted(self._engine.abort(asked))[1] if asked else []

    def _submit(self) -> None:
        turns = sorted(self._waiting, key=lambda turn: (turn.key, turn.sequence))
        self._waiting = []
        requests = []
        for turn in turns:
            request = SampleRequest(
                ordinal=self._next,
                sample=0,
                seed=turn.seed,
                prompt=Prompt(row=0, text=""),
                greedy=turn.greedy,
                ids=turn.ids,
                most=turn.most,
                stop=turn.stop,
            )
            self._next += 1
            self._running[request.ordinal, 0] = turn
            requests.append(request)
        if requests:
            self._engine.submit(requests)

    def _sorted(
        self, finished: Sequence[Finished]
    ) -> tuple[list[tuple[Turn, Finished]], list[Finished]]:
        turns, answers = [], []
        for one in finished:
            key = one.request.ordinal, one.request.sample
            if key in self._questions:
                self._questions.discard(key)
                answers.append(one)
            elif key in self._running:
                turns.append((self._running.pop(key), one))
        return turns, answers
