"""Makes a table of judgements for agreement, and says what their places on the page did."""

from __future__ import annotations

from collections.abc import Sequence

from gcore_rewards.human.judgements import Judgement, Label


def table_of(said: Sequence[Judgement | Label]) -> dict[str, dict[str, str]]:
    """Returns unit -> rater -> category; of a rater who was shown a pair twice, the first time.

    Skipped ones are left out.
    """
    table: dict[str, dict[str, str]] = {}
    for each in said:
        if each.category != "skip":
            table.setdefault(each.key, {}).setdefault(each.rater, each.category)
    return table


def places(said: Sequence[Judgement | Label]) -> dict[str, float]:
    """Returns what the order on the page did, where it can be told.

    left_preferred: share of preferences that were for the answer on the left; 0.5 without a habit.
    equal_in_both_orders: share of pairs that a rater judged alike in both orders.
    """
    judgements = [each for each in said if isinstance(each, Judgement)]
    preferred = [each for each in judgements if each.verdict == "better"]
    shares = {}
    if preferred:
        left = sum(each.chosen == each.answers[0] for each in preferred)
        shares["left_preferred"] = left / len(preferred)
    by_rater: dict[tuple[str, str], list[str]] = {}
    for each in judgements:
        if each.verdict != "skip":
            by_rater.setdefault((each.rater, each.pair), []).append(each.category)
    twice = [categories for categories in by_rater.values() if len(categories) == 2]
    if twice:
        equal = sum(first == second for first, second in twice)
        shares["equal_in_both_orders"] = equal / len(twice)
    return shares
