"""A record that goes out as a TrainingTrace, and comes back, is the same episode."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gcore_environments.book import Book
from gcore_environments.traces import columns_of_trace, trace_of
from gcore_language.sequences import rows_of

from gcore_core.contract.errors import DataError
from tests.support.random_episodes import FAULTS, random_book, record_of


def taught(columns: dict[str, np.ndarray]) -> list[tuple[Any, ...]]:
    """What a trainer learns of a record: each sampled id with all that was read before it."""
    found = []
    for row in rows_of(columns):
        whole = [*row["prompt_ids"].tolist(), *row["action_ids"].tolist()]
        begin = len(row["prompt_ids"])
        values = ("logp", "turn_reward")
        for at in np.flatnonzero(row["action_mask"]).tolist():
            own = tuple(float(row[name][at]) for name in values)
            version = int(row["version"][at]) if "version" in row else 0
            found.append((tuple(whole[: begin + at + 1]), *own, version))
    return sorted(found)


def test_a_thousand_random_episodes_come_back() -> None:
    forks = 0
    for seed in range(1000):
        book = random_book(seed)
        columns = record_of(book)
        trace = json.loads(json.dumps(trace_of(columns)))
        again = columns_of_trace(trace)
        assert [one[:3] for one in taught(again)] == [one[:3] for one in taught(columns)], seed
        if "version" in columns:
            assert taught(again) == taught(columns), seed
        for name in ("temperature", "text", "episode"):
            assert again[name].tobytes() == columns[name].tobytes(), seed
        assert sorted(again["turns"][:, 3]) == sorted(columns["turns"][:, 3])
        forks += sum(book.forks.values())
    assert forks > 500


def test_each_turn_of_a_trace_reads_what_the_policy_read() -> None:
    book = Book()
    number = book.start([1, 2])
    book.sampled(number, [5, 6], [-1.0, -2.0], [3, 3])
    number = book.go_on(number, 4, [7])
    book.sampled(number, [8], [-0.5], [4])
    number = book.go_on(0, 4, [9], "parallel")
    book.sampled(number, [5], [-0.25], [4])
    turns = trace_of(record_of(book))["turns"]
    read = [one["prompt_token_ids"] for one in turns]
    assert read == [[1, 2], [1, 2, 5, 6, 7], [1, 2, 5, 6, 9]]
    assert [one["completion_token_ids"] for one in turns] == [[5, 6], [8], [5]]
    assert [one["loss_mask"] for one in turns] == [[0, 0, 1, 1], [0] * 5 + [1], [0] * 5 + [1]]
    assert [one["metadata"]["g_core"]["version"] for one in turns] == [3, 4, 4]
    assert len({one["node_id"] for one in turns}) == 3


def test_a_record_of_no_environment_is_one_turn() -> None:
    columns = record_of(random_book(3))
    for name in ("turns", "sequences", "episode", "turn_reward"):
        del columns[name]
    (turn,) = trace_of(columns)["turns"]
    assert turn["completion_token_ids"] == columns["action_ids"].tolist()


def test_what_a_mask_hides_is_given_and_never_sampled() -> None:
    turn = {
        "node_id": "0",
        "prompt_token_ids": [1],
        "completion_token_ids": [2, 3, 4],
        "per_token_logps": [-1.0, -2.0, -3.0],
        "loss_mask": [0, 1, 0, 1],
    }
    columns = columns_of_trace({"schema_version": 1, "turns": [turn]})
    assert columns["action_ids"].tolist() == [2, 3, 4]
    assert columns["action_mask"].tolist() == [1, 0, 1]
    assert columns["logp"].tolist() == [-1.0, 0.0, -3.0]
    hidden = {**turn, "loss_mask": [0, 0, 0, 0]}
    assert columns_of_trace({"turns": [hidden, turn]})["action_mask"].sum() == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_told(fault: str) -> None:
    trace = trace_of(record_of(random_book(7)))
    FAULTS[fault](trace)
    with pytest.raises(DataError, match=r"turns\[0\]"):
        columns_of_trace(trace)


@pytest.mark.parametrize("trace", [{"schema_version": 2, "turns": []}, {"turns": []}, {}])
def test_what_is_no_trace_is_refused(trace: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        columns_of_trace(trace)
