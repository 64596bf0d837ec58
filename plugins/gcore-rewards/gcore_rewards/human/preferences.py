"""Makes preference data of judgements: one chosen and one rejected answer to a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from gcore_rewards.human.judgements import Judgement

By = Literal["majority", "all", "each"]
Ties = Literal["leave-out", "both"]


def preferences(
    judgements: Iterable[Judgement], by: By = "majority", ties: Ties = "leave-out"
) -> Iterator[dict[str, Any]]:
    """Yields rows of preference data: prompt, chosen, rejected, and votes.

    A text prompt has texts as answers, a chat has lists of one turn of the assistant. ``votes``
    counts raters: chosen, rejected, tie (which both-bad is, too).

    by: "majority": one row of a pair where more than half of its raters prefer one answer; "all":
        where all of them do; "each": one row for each rater. A rater who was shown a pair in both
        orders and preferred either has one vote, for a tie.
    ties: "both": a pair that is equally good by the same rule gives two rows, one in each
        direction; pairs that are both bad, and those without a result, give none.
    """
    by_pair: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        if judgement.verdict != "skip":
            by_pair.setdefault(judgement.pair, []).append(judgement)
    for of_pair in by_pair.values():
        votes = list(votes_of(of_pair).values())
        for some in [[vote] for vote in votes] if by == "each" else [votes]:
            yield from _rows(of_pair[0], some, 1.0 if by == "all" else 0.5, ties)


def votes_of(judgements: Iterable[Judgement]) -> dict[str, str]:
    """Returns rater -> "first", "second", "tie" or "bad", of one pair's judgements."""
    said: dict[str, set[str]] = {}
    for judgement in judgements:
        said.setdefault(judgement.rater, set()).add(judgement.category)
    return {
        rater: next(iter(categories)) if len(categories) == 1 else "tie"
        for rater, categories in said.items()
    }


def _rows(pair: Judgement, votes: list[str], share: float, ties: Ties) -> Iterator[dict[str, Any]]:
    counts = Counter(votes)
    first, second = sorted(pair.answers)

    def holds(category: str) -> bool:
        of = counts[category] / len(votes)
        return of == 1.0 if share == 1.0 else of > share

    if holds("first"):
        yield _row(pair, first, second, counts["first"], counts["second"], len(votes))
    elif holds("second"):
        yield _row(pair, second, first, counts["second"], counts["first"], len(votes))
    elif holds("tie") and ties == "both":
        yield _row(pair, first, second, counts["first"], counts["second"], len(votes))
        yield _row(pair, second, first, counts["second"], counts["first"], len(votes))


def _row(
    pair: Judgement, chosen: str, rejected: str, n_chosen: int, n_rejected: int, n_votes: int
) -> dict[str, Any]:
    is_text = isinstance(pair.prompt, str)
    return {
        "prompt": pair.prompt,
        "chosen": chosen if is_text else [{"role": "assistant", "content": chosen}],
        "rejected": rejected if is_text else [{"role": "assistant", "content": rejected}],
        "votes": {
            "chosen": n_chosen,
            "rejected": n_rejected,
            "tie": n_votes - n_chosen - n_rejected,
        },
    }
