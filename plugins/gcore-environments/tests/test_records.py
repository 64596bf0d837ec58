"""Tests that a record tells all of an episode's sequences, and that its rows are these."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from gcore_environments.book import Book
from gcore_environments.records import columns_of, cost_of
from gcore_language.sequences import cut, join, rows_of

from gcore_core.contract.errors import DataError


def random_book(seed: int) -> Book:
    """Returns a book of up to eight turns, which go on, go on from earlier, and begin anew."""
    draw = random.Random(seed)
    book = Book()
    for turn in range(draw.randint(1, 8)):
        new = [draw.randint(0, 3) for _ in range(draw.randint(1, 4))]
        if not book.sequences or draw.random() < 0.2:
            number = book.start(new)
        else:
            number = draw.randrange(len(book.sequences))
            one = book.sequences[number]
            lengths = [end for _, end, _, _ in one.spans] or [len(one.ids)]
            length = draw.choice(lengths) if draw.random() < 0.4 else len(one.ids)
            number = book.go_on(number, length, new if draw.random() < 0.8 else [])
        if draw.random() < 0.1:
            book.sampled(number, [], [], [])  # the request was lost
            continue
        said = [draw.randint(4, 9) for _ in range(draw.randint(1, 5))]
        versions = [turn + (place > 2) for place in range(len(said))]
        book.sampled(number, said, [-0.1 * token for token in said], versions, turn % 2)
        book.reward(float(turn + 1))
    return book


def record_of(book: Book) -> dict[str, Any]:
    return columns_of(book, temperature=1.0, text="", episode={})


@pytest.mark.parametrize("part", range(4))
def test_every_sequence_comes_back_from_the_record(part: int) -> None:
    """Over 2,000 random episodes: ids, masks, log-probs and versions of each row."""
    for seed in range(part * 500, part * 500 + 500):
        book = random_book(seed)
        record = record_of(book)
        rows = rows_of(record)
        assert len(rows) == len(book.sequences)
        for row, one in zip(rows, book.sequences, strict=True):
            assert [*row["prompt_ids"].tolist(), *row["action_ids"].tolist()] == one.ids
            trained = row["action_mask"] != 0
            mine = [begin >= one.shared for begin, _, _, _ in one.spans]
            assert all(mine), "a sequence shares no turn of its own"
            assert row["action_ids"][trained].tolist() == [
                token for begin, end, _, _ in one.spans for token in one.ids[begin:end]
            ]
            assert np.array_equal(row["logp"][trained], np.array(one.logp, np.float32))
            assert (row["logp"][~trained] == 0).all()
            if "version" in record:
                assert row["version"][trained].tolist() == one.versions
        assert int(record["action_mask"].sum()) == book.actions


def test_a_column_of_all_rows_joined_is_the_records() -> None:
    for seed in range(500):
        record = record_of(random_book(seed))
        rows = cut(record)
        for name in ("logp", "turn_reward", "action_mask"):
            joined = join(record, rows, [row.columns[name] for row in rows])
            assert np.array_equal(joined, record[name])
        wide = np.stack([record["logp"], record["turn_reward"]], 1)
        again = join(record, rows, [wide[row.begin : row.end] for row in rows])
        assert np.array_equal(again, wide)


def test_turns_tell_where_each_was_sampled_and_its_reward_is_at_its_last_action() -> None:
    for seed in range(200):
        book = random_book(seed)
        record = record_of(book)
        spans = [(one, span) for one in book.sequences for span in one.spans]
        rewards = [reward for one in book.sequences for reward in one.rewards]
        assert len(record["turns"]) == len(spans)
        for turn, (one, span), reward in zip(record["turns"], spans, rewards, strict=True):
            begin, end, version, player = turn.tolist()
            assert record["action_ids"][begin:end].tolist() == one.ids[span[0] : span[1]]
            assert record["action_mask"][begin:end].all()
            assert (version, player) == span[2:]
            assert record["turn_reward"][end - 1] == reward
        assert record["turn_reward"].sum() == sum(rewards)


def test_what_is_given_counts_to_the_version_of_the_turn_before() -> None:
    book = Book()
    number = book.start([1])
    book.sampled(number, [2], [-1.0], [3])
    book.sampled(book.go_on(number, 2, [8]), [4], [-1.0], [5])
    fork = book.go_on(number, 2, [9, 9])
    book.sampled(fork, [6], [-1.0], [4])
    assert record_of(book)["version"].tolist() == [3, 3, 5, 3, 3, 4]
    assert cost_of(book) == 2


def test_a_record_of_one_version_has_no_column_of_it() -> None:
    book = Book()
    book.sampled(book.start([1]), [2], [-1.0], [3])
    assert "version" not in record_of(book)


def test_an_episode_in_which_nothing_was_sampled_is_a_record() -> None:
    book = Book()
    book.start([1, 2])
    record = record_of(book)
    assert (record["prompt_ids"].tolist(), len(record["action_ids"])) == ([1, 2], 0)
    assert record["turns"].shape == (0, 4)


def test_the_episode_is_told_in_json() -> None:
    book = Book()
    book.start([1])
    told = {"rewards": {"won": 1.0}, "messages": [{"role": "user", "content": "é\ud800"}]}
    record = columns_of(book, temperature=0.5, text="ü", episode=told)
    assert json.loads(record["episode"].tobytes())["rewards"] == {"won": 1.0}
    assert record["text"].tobytes().decode() == "ü"
    assert record["temperature"] == np.float32(0.5)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ([[0, -1, 2], [9, 0, 1]], "begins"),
        ([[0, -1, 2], [2, 1, 1]], "begins with 1 ids of sequence 1"),
        ([[0, 0, 2], [2, 0, 1]], "sequence 0 begins with 2 ids of sequence 0"),
        ([[0, -1, 2], [2, 0, 9]], "begins with 9 ids of sequence 0"),
        ([[0, -1, 2], [2, -1, 0]], "its first id was sampled"),
        ([[0, -1], [2, 0]], r"shape \[2, 2\]"),
    ],
)
def test_a_table_that_cannot_be_is_refused(table: list[list[int]], problem: str) -> None:
    record = {
        "prompt_ids": np.array([1, 2], np.int32),
        "action_ids": np.array([3, 4, 5], np.int32),
        "action_mask": np.ones(3, np.uint8),
        "sequences": np.array(table, np.int32),
    }
    with pytest.raises(DataError, match=problem):
        cut(record)
