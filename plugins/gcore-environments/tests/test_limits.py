"""How much an episode may still have: the smallest limit counts, and each has a name."""

from __future__ import annotations

import pytest
from gcore_environments.limits import Limits

LIMITS = Limits(turns=3, turn_tokens=10, tokens=25, context_length=100)


@pytest.mark.parametrize(
    ("had", "most", "why"),
    [
        ({"turns": 0, "tokens": 0, "read": 5}, 10, ""),  # a turn's own limit
        ({"turns": 1, "tokens": 20, "read": 30}, 5, ""),  # what the episode has left
        ({"turns": 1, "tokens": 0, "read": 93}, 7, ""),  # the room in the context
        ({"turns": 1, "tokens": 0, "read": 5, "most": 4}, 4, ""),  # what an agent asks for
        ({"turns": 1, "tokens": 0, "read": 5, "most": 40}, 10, ""),  # it gets no more by asking
        ({"turns": 3, "tokens": 0, "read": 5}, 0, "turns"),
        ({"turns": 1, "tokens": 25, "read": 5}, 0, "length"),
        ({"turns": 1, "tokens": 0, "read": 100}, 0, "context"),
    ],
)
def test_the_smallest_limit_counts(had: dict[str, int], most: int, why: str) -> None:
    assert LIMITS.next_turn(**had) == (most, why)


def test_limits_of_zero_do_not_limit() -> None:
    limits = Limits(turns=1, turn_tokens=0, tokens=25, context_length=0)
    assert limits.next_turn(turns=0, tokens=0, read=10**6) == (25, "")
