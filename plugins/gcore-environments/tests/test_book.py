"""Tests that nothing that an episode has read or said is lost or rewritten."""

from __future__ import annotations

import random

import pytest
from gcore_environments.book import Book

from gcore_core.contract.errors import ContractError


def say(book: Book, number: int, *ids: int) -> None:
    book.sampled(number, list(ids), [-0.5] * len(ids), [0] * len(ids))


def test_a_turn_goes_on_behind_the_turn_before() -> None:
    book = Book()
    number = book.start([1, 2])
    say(book, number, 3)
    assert book.go_on(number, 3, [4]) == number
    say(book, number, 5)
    (one,) = book.sequences
    assert (one.ids, one.spans) == ([1, 2, 3, 4, 5], [(2, 3, 0, 0), (4, 5, 0, 0)])
    assert book.actions == 2
    assert not book.forks


def test_two_answers_from_one_point_are_two_sequences_before_either_has_come() -> None:
    book = Book()
    first = book.start([1, 2])
    second = book.go_on(first, 2, [])
    say(book, second, 7)
    say(book, first, 8)
    assert [one.ids for one in book.sequences] == [[1, 2, 8], [1, 2, 7]]
    assert (book.sequences[1].parent, book.sequences[1].shared) == (0, 2)
    assert book.forks == {"parallel": 1}


def test_an_answer_without_an_id_leaves_its_place_to_the_next() -> None:
    book = Book()
    number = book.start([1])
    book.sampled(number, [], [], [])
    assert book.go_on(number, 1, [2]) == number
    assert not book.sequences[0].spans


def test_what_is_rewritten_shares_all_ids_before_it() -> None:
    book = Book()
    say(book, book.start([1, 2]), 3, 4)
    number = book.start([1, 2, 3, 9, 9])
    assert (book.sequences[number].parent, book.sequences[number].shared) == (0, 3)
    assert book.forks == {"rewritten": 1}


def test_a_prompt_that_is_there_already_still_has_an_id_that_predicts() -> None:
    book = Book()
    say(book, book.start([1, 2]), 3)
    number = book.start([1, 2, 3])
    assert book.sequences[number].shared == 2


@pytest.mark.parametrize(
    ("ids", "number", "shared", "forks"),
    [
        ([1, 2, 3, 4, 6], 0, 0, {}),
        ([1, 2, 3, 4, 5, 6], 0, 0, {}),
        ([1, 2], 1, 2, {"parallel": 1}),
        ([1, 2, 3, 4], 1, 4, {"parallel": 1}),
        ([1, 2, 3, 9], 1, 3, {"rewritten": 1}),
        ([1, 9], 1, 1, {"parallel": 1}),
        ([9], 1, 0, {"rewritten": 1}),
    ],
)
def test_a_prompt_by_ids_goes_on_or_forks(
    ids: list[int], number: int, shared: int, forks: dict[str, int]
) -> None:
    book = Book()
    say(book, book.start([1, 2]), 3, 4)
    if ids[:5] == [1, 2, 3, 4, 5]:
        book.sampled(book.go_on(0, 4, [5]), [], [], [])
    expected = number if ids != [1, 2, 3, 4] else 0
    assert book.by_ids(ids) == expected
    assert book.sequences[expected].ids == ids
    if expected:
        assert book.sequences[expected].shared == shared
        assert book.forks == forks


def test_a_reward_is_that_of_the_turn_sampled_last() -> None:
    book = Book()
    book.reward(9.0)  # no turn yet
    first = book.start([1])
    say(book, first, 2)
    second = book.start([5])
    say(book, second, 6)
    book.reward(1.0)
    book.reward(0.5, first)
    assert [one.rewards for one in book.sequences] == [[0.5], [1.0]]


@pytest.mark.parametrize("length", [0, 3])
def test_a_length_that_the_sequence_has_not_is_refused(length: int) -> None:
    book = Book()
    book.start([1, 2])
    with pytest.raises(ContractError, match="which has 2: give a length of 1 to 2"):
        book.go_on(0, length, [])


def test_a_sequence_without_ids_is_refused() -> None:
    with pytest.raises(ContractError, match="without an id"):
        Book().start([])


def test_an_answer_with_too_few_log_probs_is_refused() -> None:
    book = Book()
    with pytest.raises(ContractError, match="2 ids, 1 log-probs and 2 versions"):
        book.sampled(book.start([1]), [1, 2], [-1.0], [0, 0])


def test_common_beginnings_are_found_at_every_length() -> None:
    draw = random.Random(0)
    for _ in range(300):
        same = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
        book = Book()
        book.start([*same, 7, *[draw.randrange(3) for _ in range(draw.randrange(9))]])
        number = book.start([*same, 8, 8])
        assert book.sequences[number].shared == len(same)
