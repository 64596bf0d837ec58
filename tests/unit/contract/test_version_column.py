"""The column that says which version of the weights sampled each action of a record."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from gcore_core.contract.columns import (
    VERSION,
    SampledBy,
    action_versions,
    column_of_versions,
    version_problem,
)
from gcore_core.contract.errors import ContractError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FINISHED, Lease, Prompt
from gcore_core.workers.drawn_records import DrawnRecords


def column(*versions: int) -> np.ndarray:
    return np.array(versions, np.int32)


def test_each_push_ends_the_part_of_the_version_before_it() -> None:
    sampled_by = SampledBy()
    sampled_by.pushed(2, 4)
    sampled_by.pushed(5, 6)
    assert sampled_by.first(9) == 4
    made = sampled_by.columns(7, 9)[VERSION]
    assert made.dtype == np.int32
    assert made.tolist() == [4, 4, 6, 6, 6, 9, 9]


@pytest.mark.parametrize("pushes", [[], [(0, 4)], [(0, 4), (0, 5)]], ids=["none", "one", "two"])
def test_a_push_before_the_first_action_leaves_nothing_of_the_old_version(
    pushes: list[tuple[int, int]],
) -> None:
    sampled_by = SampledBy()
    for actions, version in pushes:
        sampled_by.pushed(actions, version)
    assert sampled_by.first(9) == 9
    assert sampled_by.columns(3, 9) == {}


def test_of_pushes_between_the_same_two_actions_only_the_last_one_sampled_anything() -> None:
    sampled_by = SampledBy()
    sampled_by.pushed(2, 4)
    sampled_by.pushed(2, 5)
    assert sampled_by.columns(3, 6)[VERSION].tolist() == [4, 4, 6]


def test_a_sample_that_ends_at_a_push_has_one_version() -> None:
    """An engine aborts it, for example, before it has another action."""
    sampled_by = SampledBy()
    sampled_by.pushed(2, 4)
    assert sampled_by.columns(2, 5) == {}


def test_a_record_without_the_column_has_the_first_version_at_every_action() -> None:
    assert action_versions({}, 3, 7).tolist() == [7, 7, 7]
    assert action_versions({VERSION: column(7, 8)}, 2, 7).tolist() == [7, 8]
    assert column_of_versions(column(7, 7)) == {}
    assert column_of_versions(column()) == {}
    assert column_of_versions(column(7, 8))[VERSION].tolist() == [7, 8]


WRONG = [
    (np.array([4, 5], np.int64), "is int64[2], it must be int32[2]"),
    (column(4, 5, 5), "is int32[3], it must be int32[2]"),
    (column(5, 4), "falls"),
    (column(5, 5), "goes from 5 to 5, and the record says that versions 4 to 5 sampled it"),
    (column(4, 6), "goes from 4 to 6, and the record says that versions 4 to 5 sampled it"),
]


@pytest.mark.parametrize(("wrong", "problem"), WRONG)
async def test_a_column_that_cannot_be_right_is_named(wrong: np.ndarray, problem: str) -> None:
    assert problem in version_problem(wrong, 2, (4, 5))
    records = DrawnRecords(cast(Any, None), cast(Any, None), shards=1)
    records.begin(Lease(ordinal=7, row=0, epoch=0, samples=(1,)), 0)
    request = SampleRequest(ordinal=7, sample=1, seed=1, prompt=Prompt(row=0, text=""))
    columns = {
        "prompt_ids": column(1),
        "action_ids": column(1, 2),
        "logp": np.zeros(2, np.float32),
        "action_mask": np.ones(2, np.uint8),
        "temperature": np.ones((), np.float32),
        "text": np.zeros(0, np.uint8),
        VERSION: wrong,
    }
    record = Finished(request=request, status=FINISHED, versions=(4, 5), columns=columns)
    with pytest.raises(ContractError) as caught:
        await records.keep_finished([record])
    assert problem in str(caught.value)
    assert "7/1" in str(caught.value)


def test_a_column_that_can_be_right_is_no_problem() -> None:
    assert version_problem(column(4, 5), 2, (4, 5)) == ""
    assert version_problem(column(4, 5), 2, (4, 6)) == "", "aborted after a push, for example"


def test_versions_may_fall_where_another_sequence_of_the_record_begins_and_nowhere_else() -> None:
    assert version_problem(column(4, 5, 4), 3, (4, 5), [2]) == ""
    assert "falls" in version_problem(column(4, 5, 4), 3, (4, 5), [1])
    assert version_problem(column(5, 4), 2, (4, 5), [1]) == "", "the oldest need not be the first"
