"""A record's content and rewards are held to its name, wherever they are joined."""

from __future__ import annotations

import numpy as np
import pytest

from gcore_core.contract import lineage
from gcore_core.contract.columns import Columns
from gcore_core.contract.errors import RecordMismatch
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FINISHED, Header, Prompt, RecordScore
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.workers import drawn_records


def columns(**changed: np.ndarray) -> Columns:
    made: Columns = {
        "prompt_ids": np.array([1, 5], np.int32),
        "action_ids": np.array([3, 4, 2], np.int32),
        "logp": np.array([-1, -2, -3], np.float32),
        "action_mask": np.ones(3, np.uint8),
    }
    return made | changed


def header_of(ordinal: int = 3, sample: int = 1) -> Header:
    prompt = Prompt(row=2, text="1+2=")
    request = SampleRequest(ordinal=ordinal, sample=sample, seed=7, prompt=prompt)
    record = Finished(request=request, status=FINISHED, versions=(0, 0), columns=columns())
    return drawn_records._header(record)


def check(header: Header, content: Columns) -> None:
    lineage.check_seal(header.seal, *header.key, header.prompt_digest, content, "opening")


def test_what_was_sampled_passes_in_any_order_of_columns() -> None:
    header = header_of()
    check(header, columns())
    check(header, dict(reversed(columns().items())))


@pytest.mark.parametrize(
    "changed",
    [
        {"action_ids": np.array([3, 4, 5], np.int32)},
        {"action_mask": np.array([1, 1, 0], np.uint8)},
        {"logp": np.array([-1, -2, 0], np.float32)},
        {"logp": np.array([-1, -2, -3], np.float64)},
        {"prompt_ids": np.array([1, 1, 5], np.int32)},
        {"extra": np.zeros(1)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_column_is_refused_and_the_record_is_named(changed: Columns) -> None:
    with pytest.raises(RecordMismatch, match="record 3/1 is not what") as caught:
        check(header_of(), columns(**changed))
    assert (caught.value.facts["ordinal"], caught.value.facts["sample"]) == (3, 1)


def test_equal_content_under_another_name_is_refused() -> None:
    header = header_of(3, 1)
    with pytest.raises(RecordMismatch):
        lineage.check_seal(header.seal, 3, 2, header.prompt_digest, columns(), "opening")
    with pytest.raises(RecordMismatch):
        lineage.check_seal(header.seal, 3, 1, header.prompt_digest + 1, columns(), "opening")


def test_a_record_without_a_seal_passes() -> None:
    lineage.check_seal(lineage.UNSEALED, 3, 1, 0, columns(), "opening")
    lineage.check_receipt(5, lineage.UNSEALED, 3, 1, {"exact": 1.0}, "advantages")


def scored(header: Header, *scores: dict[str, float]) -> Header:
    """The record after its scores came, each from a scorer of its own."""
    ledger = Ledger(shard=0, shards=1, rows=1, seed=0, samples=1)
    ledger.lease(range(4))
    header = Header(
        ordinal=header.ordinal, sample=0, row=0, seed=0, seal=header.seal, status=FINISHED
    )
    ledger.finished(header)
    for values in scores:
        receipt = lineage.receipt_of(header.seal, values)
        statuses = dict.fromkeys(values, "ok")
        ledger.scored(RecordScore(header.ordinal, 0, values, statuses, receipt=receipt), set())
    return header


def check_rewards(header: Header) -> None:
    lineage.check_receipt(header.receipt, header.seal, *header.key, header.rewards, "advantages")


def test_rewards_of_several_scorers_pass_in_any_order() -> None:
    first, second = {"exact": 1.0}, {"worked": 0.5, "length": 3.0}
    check_rewards(scored(header_of(), first, second))
    check_rewards(scored(header_of(), second, first))


def test_a_score_that_comes_twice_is_refused() -> None:
    """Nothing is scored again, so a second value is a fault."""
    header = scored(header_of(), {"exact": 1.0, "worked": 0.5}, {"exact": 0.25})
    with pytest.raises(RecordMismatch, match="rewards that no scorer gave it"):
        check_rewards(header)


@pytest.mark.parametrize(
    "rewards", [{"exact": 0.0}, {}, {"worked": 1.0}, {"exact": 1.0, "worked": 0.0}], ids=str
)
def test_rewards_that_no_scorer_gave_are_refused(rewards: dict[str, float]) -> None:
    header = scored(header_of(), {"exact": 1.0})
    header.rewards = rewards
    with pytest.raises(RecordMismatch, match="record 3/0 has rewards that no scorer gave it"):
        check_rewards(header)


def test_two_records_that_trade_different_rewards_are_refused() -> None:
    one, other = scored(header_of(2), {"exact": 1.0}), scored(header_of(3), {"exact": 0.0})
    one.rewards, other.rewards = other.rewards, one.rewards
    for header in (one, other):
        with pytest.raises(RecordMismatch):
            check_rewards(header)
