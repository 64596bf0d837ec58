"""Ranks' numbers are added up by group before they are weighed."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest

from gcore_core.builtin.band import Band
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.sentinel import Finding, SentinelContext, on_grid
from gcore_core.contract.trainer import StartLogprobs, TrainRecord
from gcore_core.controllers.watching import (
    evidence_of,
    summed,
    without_empty_gaps,
)
from gcore_core.runtime.messages import DiagnoseRequest, GroupNumbers, ScoreLast
from gcore_core.workers.compared_records import ComparedRecords


class Squares(Band):
    """Weighs by the square, so that it shows whether a group was weighed in parts."""

    def weigh(self, sums: np.ndarray) -> np.ndarray:
        return np.square(sums)

    def diagnose(self, records: Any) -> list[Finding]:
        return [Finding(cause="all", score=1.0, weight=len(records), text="-")]


@pytest.fixture
def sentinel() -> Squares:
    return Squares(None, SentinelContext())


def code(sentinel: Band) -> PluginCode:
    return PluginCode(made=sentinel, kind="sentinel", where="sentinel.use", contract="-")


def test_a_group_on_two_ranks_is_weighed_as_a_whole(sentinel: Squares) -> None:
    parts = [GroupNumbers(7, 1, 3, [1.0, 2.0]), GroupNumbers(7, 1, 3, [3.0, 4.0])]
    assert evidence_of(sentinel, code(sentinel), parts)[1, 3].tolist() == [16.0, 36.0]


def test_replicas_and_versions_are_kept_apart(sentinel: Squares) -> None:
    parts = [
        GroupNumbers(7, 0, 3, [1.0, 1.0]),
        GroupNumbers(7, 1, 3, [1.0, 1.0]),
        GroupNumbers(8, 1, 3, [2.0, 2.0]),
        GroupNumbers(9, 1, 4, [3.0, 3.0]),
    ]
    found = evidence_of(sentinel, code(sentinel), parts)
    assert {source: row[0] for source, row in found.items()} == {(0, 3): 1, (1, 3): 5, (1, 4): 9}
    assert evidence_of(sentinel, code(sentinel), []) == {}


def test_shards_without_groups_add_nothing() -> None:
    payloads = [msgspec.msgpack.encode(rows) for rows in ([(0, 3, [1.0])], [], [(0, 3, [2.5])])]
    assert {source: row.tolist() for source, row in summed(payloads).items()} == {(0, 3): [3.5]}


def test_a_gap_of_nothing_is_not_told_and_one_that_was_measured_is() -> None:
    nothing = {"logprob_gap_max": 0.0, "logprob_gap_mean": 0.0, "logprob_gap_share": 0.0, "kl": 1.0}
    assert without_empty_gaps(nothing) == {"kl": 1.0}
    measured = nothing | {"logprob_gap_max": 1e-6}
    assert without_empty_gaps(measured) == measured


def test_evidence_on_the_grid_never_claims_more() -> None:
    values = np.array([0.1, -0.1, 1e-12, 18.4])
    assert (on_grid(values) <= values).all() and np.abs(on_grid(values) - values).max() < 1e-9


class OwnLogprobs:
    """A trainer that computed the log-probs of all records but the last."""

    def __init__(self, records: list[TrainRecord]) -> None:
        self._records = records

    def start_logprobs(self) -> list[StartLogprobs | None]:
        own = [StartLogprobs(logp=record.columns["logp"] - 0.5) for record in self._records[:-1]]
        return [*own, None]


def record(ordinal: int, sample: int, *, fresh: bool = True, replica: int = 0) -> TrainRecord:
    columns = {
        "logp": np.full(3, -1.0, np.float32),
        "action_mask": np.array([1, 1, 0], np.uint8),
        "action_ids": np.arange(3, dtype=np.int32),
    }
    return TrainRecord(
        ordinal=ordinal,
        sample=sample,
        minibatch=0,
        columns=columns,
        fresh=fresh,
        replica=replica,
        version=4,
    )


def test_a_rank_measures_fresh_records_and_gives_each_shard_its_own_groups(
    sentinel: Squares,
) -> None:
    records = [
        record(1, 0),
        record(1, 1),
        record(2, 0, replica=1),
        record(3, 0, fresh=False),
        record(3, 1),
    ]
    kept = ComparedRecords(cast(Any, OwnLogprobs(records)), sentinel)
    kept.keep(4, records)
    shards = kept.by_shard([{2, 3}, {1}])
    assert shards == [[GroupNumbers(2, 1, 4, [2.0, 2.0])], [GroupNumbers(1, 0, 4, [4.0, 4.0])]]
    assert [f.weight for f in kept.diagnose(DiagnoseRequest(4, []))] == [3]
    assert [f.weight for f in kept.diagnose(DiagnoseRequest(4, [1]))] == [1]
    assert kept.diagnose(DiagnoseRequest(4, [9])) == [] == kept.diagnose(DiagnoseRequest(3, []))


def test_what_the_store_does_with_a_record_afterwards_does_not_matter(sentinel: Squares) -> None:
    records = [record(1, 0), record(1, 1)]
    kept = ComparedRecords(cast(Any, OwnLogprobs([record(1, 0), record(1, 1)])), sentinel)
    kept.keep(4, records)
    for used in records:
        used.columns["logp"][:] = 7.0
    assert kept.by_shard([{1}]) == [[GroupNumbers(1, 0, 4, [2.0, 2.0])]]


class Scores:
    """A trainer whose log-probs of an action are its number."""

    def logprobs(self, records: Any) -> list[np.ndarray]:
        return [record["action_ids"].astype(np.float32) for record in records]


def test_canaries_are_beginnings_of_records_one_of_each_prompt() -> None:
    def record(ordinal: int, sample: int, actions: int, **columns: Any) -> TrainRecord:
        own: dict[str, np.ndarray] = {
            "prompt_ids": np.arange(3, dtype=np.int32),
            "action_ids": np.arange(actions, dtype=np.int32),
            "logp": np.zeros(actions, np.float32),
            "temperature": np.array(0.5, np.float32),
        }
        return TrainRecord(
            ordinal=ordinal, sample=sample, minibatch=0, columns=own, fresh=False, **columns
        )

    kept = ComparedRecords(cast(Any, Scores()), Band(None, SentinelContext()))
    with_image = record(3, 0, 4, media={"pixels": np.zeros(1)})
    kept.keep(6, [record(1, 0, 600), record(1, 1, 5), record(2, 0, 0), with_image, record(4, 0, 2)])
    shown = kept.score_last(ScoreLast(7, 4, 1))
    assert [one.key for one in shown] == [(1, 0, 7, -1, 7), (4, 0, 7, -1, 7)]
    assert [len(one.ids[1]) for one in shown] == [512, 2]
    assert shown[1].logps == [[0.0, 1.0], [0.0, 1.0]] and shown[1].temperature == 0.5
    assert len(kept.score_last(ScoreLast(7, 1, 2))) == 1  # a rank's share of one
    kept.keep(7, [])  # a step without records: the last ones are asked about again
    assert len(kept.score_last(ScoreLast(8, 4, 1))) == 2
