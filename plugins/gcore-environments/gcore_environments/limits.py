"""Says how much an episode may still have: turns, tokens, and room in the model's context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds the turns of every episode; 0: without a bound.

    turns: most turns.
    turn_tokens: most actions of a turn.
    tokens: most actions of all turns together.
    context_length: most ids that the model reads and says in one sequence.
    """

    turns: int
    turn_tokens: int
    tokens: int
    context_length: int

    def next_turn(self, *, turns: int, tokens: int, read: int, most: int = 0) -> tuple[int, str]:
        """Returns how many actions the next turn may have, and where that is none, why.

        turns, tokens: what the episode has had.
        read: ids that stand before the turn.
        most: the limit that an agent asks for itself; 0: none.
        """
        if turns >= self.turns:
            return 0, "turns"
        left = self.tokens - tokens
        if left <= 0:
            return 0, "length"
        if self.context_length:
            room = self.context_length - read
            if room <= 0:
                return 0, "context"
            left = min(left, room)
        return min(left, *(limit for limit in (self.turn_tokens, most) if limit), left), ""
