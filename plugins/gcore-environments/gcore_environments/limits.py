"""Says how much an episode may still have: turns, tokens, and room in the model's context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds the turns of every episode.

    turns: most turns, at least 1.
    turn_tokens: most actions of a turn; 0: no limit of its own.
    tokens: most actions of all turns together, at least 1.
    context_length: most ids that the model reads and says in one sequence; 0: unknown.
    """

    turns: int
    turn_tokens: int
    tokens: int
    context_length: int

    def next_turn(self, *, turns: int, tokens: int, read: int, most: int = 0) -> tuple[int, str]:
        """Returns (most actions of the next turn, ""), or (0, the limit that is reached).

        turns, tokens: how many turns and actions the episode has had.
        read: how many ids stand before the turn.
        most: the limit that the agent's request itself has; 0: none.
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
        own_limits = [limit for limit in (self.turn_tokens, most) if limit]
        return min([left, *own_limits]), ""
