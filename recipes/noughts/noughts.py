"""Noughts and crosses for two: each in turn reads the board and says the number of a square.

    reads     0x2o45678=     its own marks as 'x', the other's as 'o', an empty square as its number
    says      4

Whoever has three in a row, a column or a diagonal wins. Whoever names no empty square loses; where
player "1" begins so, a lot moves for it, as a game without a turn of player "0" teaches nothing.
Player "0" begins in every second game, by the row's ``number``.

The reward ``0/win`` is 1 where player "0" has won, ``1/win`` where the other has. A draw is won by
nobody.

This file runs in processes of its own. It needs the standard library alone.
"""

from __future__ import annotations

import random
from typing import Any

from gcore_environments import Observation, Reply

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


class Noughts:
    """One game, of player "0" against player "1"."""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._owner: dict[str, str] = {}  # square -> the player whose mark it has
        self._player = str(row["number"] % 2)
        self._random = random.Random(seed)
        return self._ask()

    async def step(self, reply: Reply) -> Observation:
        me, square, empty = self._player, reply.text, free(self._owner)
        if square not in empty and me == "1" and not self._owner:
            square = self._random.choice(empty)
        if square not in empty:
            return self._end(winner=other(me), reason="no empty square")
        self._owner[square] = me
        if has_line(self._owner, me):
            return self._end(winner=me, reason="a line")
        if not free(self._owner):
            return self._end(winner="", reason="a draw")
        self._player = other(me)
        return self._ask()

    async def close(self) -> None:
        pass

    def _ask(self) -> Observation:
        board = board_of(self._owner, self._player)
        message = {"role": "user", "content": board}
        return Observation(messages=[message], player=self._player)

    def _end(self, winner: str, reason: str) -> Observation:
        rewards = {f"{player}/win": float(player == winner) for player in "01"}
        return Observation(rewards=rewards, done=True, reason=reason)


def other(player: str) -> str:
    return "1" if player == "0" else "0"


def free(owner: dict[str, str]) -> list[str]:
    """Returns the empty squares."""
    return [square for square in "012345678" if square not in owner]


def has_line(owner: dict[str, str], player: str) -> bool:
    return any(all(owner.get(square) == player for square in line) for line in LINES)


def board_of(owner: dict[str, str], player: str) -> str:
    """Returns the board as a player reads it."""
    marks = {player: "x", other(player): "o"}
    return "".join(marks.get(owner.get(square, ""), square) for square in "012345678") + "="
