"""A game of two: each says one thing a round, and the first wins."""

from __future__ import annotations

from gcore_environments import Observation, Reply


class Seats:
    """Ends after ``rounds``. What is told names the one whom it is told to."""

    def __init__(self, rounds: int = 2) -> None:
        self._left = 2 * rounds

    async def reset(self, row: dict, seed: int) -> Observation:
        return Observation(messages=[{"role": "user", "content": "1+"}], player="1")

    async def step(self, reply: Reply) -> Observation:
        self._left -= 1
        if not self._left:
            return Observation(rewards={"1/game": 1.0, "2/game": -1.0, "polite": 0.5}, done=True)
        player = "2" if reply.player == "1" else "1"
        return Observation(messages=[{"role": "user", "content": f"{player}+"}], player=player)

    async def close(self) -> None:
        pass
