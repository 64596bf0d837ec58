"""What an advantage, a filter or a balancer gets wrong names its provider, its line and its
contract, and never a line of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from gcore_core.contract.algorithms import GroupScalars, Work
from gcore_core.contract.errors import ContractError, DataError
from gcore_core.controllers.algorithm_answers import (
    advantage_code,
    advantages_of,
    balancer_code,
    costs_of,
    filter_code,
    keeps,
    split_of,
    statistics_of,
)

GROUPS = [
    GroupScalars(rewards=np.array([1.0, 0.0]), lengths=np.array([3, 4])),
    GroupScalars(rewards=np.array([0.0, 2.0]), lengths=np.array([5, 6])),
]
WORK = Work(
    group=np.array([0, 0, 1]),
    prompt=np.array([2, 2, 2]),
    actions=np.array([3, 4, 5]),
    extra=np.zeros(3),
)


class Algorithm:
    """An advantage, a filter and a balancer whose every answer is the same."""

    group_size = 2
    requires: frozenset[str] = frozenset()

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def statistics(self, groups: Sequence[GroupScalars]) -> Any:
        return self._answer()

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> Any:
        return self._answer()

    def keep(self, group: GroupScalars) -> Any:
        return self._answer()

    def split(self, work: Work, bins: int) -> Any:
        return self._answer()

    def costs(self, work: Work) -> Any:
        return self._answer()


def ask(word: str, answer: Callable[[], Any]) -> Any:
    made = Algorithm(answer)
    advantage = advantage_code(made, "mine/default")
    balancer = balancer_code(made, "mine/default")
    ways: dict[str, Callable[[], Any]] = {
        "statistics": lambda: statistics_of(advantage, made, GROUPS),
        "of": lambda: advantages_of(advantage, made, GROUPS, np.zeros(0)),
        "keep": lambda: keeps(filter_code(made, "mine/default"), made, GROUPS[0]),
        "split": lambda: split_of(balancer, made, WORK, 2),
        "costs": lambda: costs_of(balancer, made, WORK),
    }
    return ways[word]()


KIND = {
    "statistics": ("advantage", "AdvantageContract"),
    "of": ("advantage", "AdvantageContract"),
    "keep": ("filter", "FilterContract"),
    "split": ("balancer", "BalancerContract"),
    "costs": ("balancer", "BalancerContract"),
}


@pytest.mark.parametrize(
    ("word", "answer", "problem"),
    [
        ("statistics", None, "statistics() gave a NoneType, not float64[K]"),
        ("statistics", np.zeros((2, 2)), "gave an array of shape (2, 2), not float64[K]"),
        ("of", None, "of() gave a NoneType for 2 groups"),
        ("of", [np.zeros(2)], "of() gave 1 rows for 2 groups"),
        ("of", [np.zeros(2), np.zeros(3)], "gave an array of shape (3,) for a group of 2 records"),
        ("of", [[0.0, 1.0], 0.5], "of() gave a float for a group of 2 records"),
        ("of", [np.zeros(2), [0.0, np.nan]], "gave [0.0, nan] for the rewards [0.0, 2.0]"),
        ("of", [np.zeros(2), [0.0, 1e39]], "gave [0.0, 1e+39] for the rewards [0.0, 2.0]"),
        ("keep", True, "keep() gave True, not (whether it teaches, the reason)"),
        ("keep", ("yes", ""), "keep() gave ('yes', ''), not"),
        ("split", [[0, 1]], "did not put each of 3 records on one of 2 ranks"),
        ("split", [[0, 1], [1]], "did not put each of 3 records on one of 2 ranks"),
        ("split", None, "did not put each of 3 records on one of 2 ranks"),
        ("split", [0, 1], "did not put each of 3 records on one of 2 ranks"),
        ("costs", np.zeros(2), "costs() gave an array of shape (2,) for 3 records"),
        ("costs", np.array([1.0, -1.0, 1.0]), "costs() gave one that is negative or not finite"),
    ],
)
def test_a_wrong_answer_names_provider_line_and_contract(
    word: str, answer: Any, problem: str
) -> None:
    with pytest.raises(ContractError) as raised:
        ask(word, lambda: answer)
    kind, contract = KIND[word]
    written = getattr(Algorithm, word).__code__.co_firstlineno
    head, place, todo = str(raised.value).splitlines()
    assert f"{kind} mine/default: " in head and problem in head
    assert place == f"  at {__file__}:{written}"
    assert todo == f"  ask its author; its contract is gcore_testing.{contract}"


@pytest.mark.parametrize("word", list(KIND))
def test_an_exception_names_the_innermost_line_of_the_plugin(word: str) -> None:
    def stacks_nothing() -> np.ndarray:
        return np.stack([])

    with pytest.raises(ContractError) as raised:
        ask(word, stacks_nothing)
    line = stacks_nothing.__code__.co_firstlineno + 1
    assert "mine/default: raised ValueError: need at least one array" in str(raised.value)
    assert raised.value.why == f"at {__file__}:{line}", "not a line of numpy"


def test_a_gcore_error_of_an_algorithm_passes_unchanged() -> None:
    def refuse() -> None:
        raise DataError("row 3 has no answer")

    with pytest.raises(DataError, match="row 3 has no answer"):
        ask("of", refuse)


def test_right_answers_pass_as_numbers() -> None:
    assert ask("keep", lambda: (np.bool_(False), "equal")) == (False, "equal")
    assert [row.tolist() for row in ask("of", lambda: [[1, -1], (0.5, 0)])] == [[1, -1], [0.5, 0]]
    assert ask("split", lambda: [[2], [0, 1]]) == [[2], [0, 1]]
