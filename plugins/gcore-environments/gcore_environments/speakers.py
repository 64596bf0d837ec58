"""Has other generator roles of the run speak for players: an opponent, a simulated user, a judge.

A role is asked by messages or a text, and not by ids: its model may have another tokenizer. Nothing
of what it says is trained on, so its ids and log-probs are not asked for.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gcore_core.contract.questions import Answer, Question, Speaker
from gcore_core.contract.records import Prompt
from gcore_environments.questions import Asked
from gcore_environments.turns import Key


@dataclass(frozen=True, kw_only=True, eq=False)
class RoleTurn:
    """One turn of a role, in an episode of the policy.

    key: (ordinal, sample) of the episode.
    role: the generator role that speaks.
    prompt: what it reads: all that its player was told and has said.
    seed: of its sampling. It samples by its own settings, also in a greedy episode.
    player: name of the player that it speaks for.
    tools: that the player may call, in the form of chat completions. The role is not told of them.
    asked: the agent's request that it answers; None: an environment's host hears what was said.
    """

    key: Key
    role: str
    prompt: Prompt
    seed: int
    player: str = ""
    tools: Sequence[dict[str, Any]] = ()
    asked: Asked | None = None


@dataclass(frozen=True, kw_only=True)
class RoleSpoke:
    """Says that a role has answered, or has failed."""

    turn: RoleTurn
    answer: Future[Answer]


class RoleTurns:
    """Holds the turns that roles owe. It is false where they owe none.

    speakers: player -> the role that speaks for it.
    inbox: gets a ``RoleSpoke`` for each turn, whenever and on whichever thread its answer comes.
    """

    def __init__(self, speakers: Mapping[str, Speaker], inbox: queue.Queue[Any]) -> None:
        self._speakers = {speaker.role: speaker for speaker in speakers.values()}
        self._inbox = inbox
        self._owed: dict[RoleTurn, Future[Answer]] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    def ask(self, turn: RoleTurn) -> None:
        """Has a role speak. It returns at once."""
        answer = self._speakers[turn.role].ask(Question(prompt=turn.prompt, seed=turn.seed))
        self._owed[turn] = answer
        answer.add_done_callback(lambda done: self._inbox.put(RoleSpoke(turn=turn, answer=done)))

    def take(self, turn: RoleTurn) -> bool:
        """Whether the turn was owed; from here on it is not."""
        return self._owed.pop(turn, None) is not None

    def end(self, key: Key) -> None:
        """Gives up the turns of an episode."""
        for turn in [turn for turn in self._owed if turn.key == key]:
            self._owed.pop(turn).cancel()

    def close(self) -> None:
        """Gives up all turns."""
        for key in {turn.key for turn in self._owed}:
            self.end(key)
