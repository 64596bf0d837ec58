"""Has the engine draw the turns of episodes: one request by ids for each turn of the policy.

Turns share the engine with the core's questions, which pass through unchanged. A turn's request has
an ordinal from ``FIRST_TURN`` on, by which it is known; the core never sees such an ordinal.
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
    """One turn of the policy, which the engine is to draw.

    key: (ordinal, sample) of its episode.
    sequence: number of the sequence in the episode's book to which its answer is appended.
    ids: int32[P], the prompt: all ids of that sequence.
    seed: of its sampling.
    most: the most actions that it may have, at least 1.
    greedy: whether the likeliest token is taken each time; as of the episode.
    stop: texts that end it.
    player: name of the player that speaks; "" where there is one.
    tools: that the player may call, in the form of chat completions.
    asked: the agent's request that it answers; None: an environment's host hears what was said.
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
    """Returns the seed of one turn of a sample.

    The first turn has the sample's own seed; those behind it have that seed mixed with their place.
    So an episode that is drawn again has the same seeds, and no two of its turns have the same.

    seed: of the sample.
    place: number of the turn in its episode, from 0.
    """
    return seed ^ (_GOLDEN * place & _MASK)


class Turns:
    """Holds the turns and questions that the engine draws.

    Turns wait until the next step, and go to the engine in the order of their episodes: which
    environment was quick does not matter. It is false where nothing is to be drawn.
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
        """Hands requests that belong to no episode to the engine."""
        self._questions.update((one.ordinal, one.sample) for one in questions)
        self._engine.submit(questions)

    def draw(self, turn: Turn) -> None:
        """Has a turn drawn. The engine gets it at the next step."""
        self._waiting.append(turn)

    def step(self) -> tuple[list[tuple[Turn, Finished]], list[Finished]]:
        """Advances the engine. Returns the turns that ended, and the answers to questions."""
        self._submit()
        if not (self._running or self._questions):
            return [], []
        return self._sorted(self._engine.step())

    def end(self, key: Key) -> list[tuple[Turn, Finished]]:
        """Ends the turns of an episode now.

        Returns those that the engine was drawing, as far as they have come.
        """
        self._waiting = [turn for turn in self._waiting if turn.key != key]
        running = [name for name, turn in self._running.items() if turn.key == key]
        return self._sorted(self._engine.abort(running))[0] if running else []

    def end_questions(self, keys: Sequence[Key]) -> list[Finished]:
        """Ends questions now, and returns their answers. Keys of no question are ignored."""
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
