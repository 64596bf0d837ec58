"""Causes are weighed over ranks, and what generators hold says which of them is wrong."""

from __future__ import annotations

import re

import pytest
from gcore_sentinel.causes import held_otherwise, likeliest
from gcore_sentinel.check import with_canaries

from gcore_core.contract.sentinel import Finding
from gcore_core.contract.step_check import Held


def finding(cause: str, score: float, weight: float = 1.0) -> Finding:
    return Finding(cause=cause, score=score, weight=weight, text=f"it is {cause}")


def test_the_cause_that_explains_most_over_all_ranks_is_named() -> None:
    ranks = [finding("a", 0.9), finding("b", 0.6), finding("a", 0.1, 3.0), finding("b", 0.7, 3.0)]
    assert likeliest(ranks) == ("b", "likely cause: it is b")


@pytest.mark.parametrize("findings", [[], [finding("a", 0.3), finding("b", 0.2)]])
def test_no_cause_is_named_where_none_explains_enough(findings: list[Finding]) -> None:
    cause, sentence = likeliest(findings)
    assert cause == "" and "no single cause" in sentence


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (Held(4), ""),
        (Held(4, 4, True, [], 9), ""),
        (Held(3, 4), "rollout.1 is at version 3, version 4 was pushed to it"),
        (Held(4, 4, True, ["a", "b"], 9, 2, 3), "weights of version 3 in 2 of 9 tensors"),
        (Held(4, 4, True, ["q", "r"], 9, 1, 3), "other bytes .* in 2 of 9 tensors: q, r"),
        (Held(4, 4, True, list("abcdef"), 9), "a, b, c and 3 more"),
    ],
)
def test_what_a_generator_holds_tells_the_cause(held: Held, said: str) -> None:
    sentence = held_otherwise("rollout.1", held)
    assert bool(sentence) == bool(said)
    assert re.search(said, sentence)


def test_the_canaries_of_two_pushes_in_one_step_are_told_together() -> None:
    first = {"sentinel/canary_actions": 10.0, "logprob_gap_max": 0.5, "logprob_gap_mean": 0.1}
    second = {"sentinel/canary_actions": 30.0, "logprob_gap_max": 0.2, "logprob_gap_mean": 0.02}
    together = with_canaries({"loss": 1.0, **first}, second)
    assert together == {
        "loss": 1.0,
        "sentinel/canary_actions": 40.0,
        "logprob_gap_max": 0.5,
        "logprob_gap_mean": pytest.approx(0.04),
    }
    assert with_canaries({"loss": 1.0}, second) == {"loss": 1.0, **second}
    assert with_canaries(first, {}) == first
