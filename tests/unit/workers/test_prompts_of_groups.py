"""Records of one ordinal answer one prompt; episodes begin as their own seeds have it."""

from __future__ import annotations

import numpy as np
import pytest

from gcore_core.contract.columns import SEQUENCES, Columns
from gcore_core.contract.errors import RecordMismatch
from gcore_core.contract.trainer import TrainRecord
from gcore_core.workers.opened_records import check_prompts


def record(sample: int, *prompt: int, **columns: np.ndarray) -> TrainRecord:
    content: Columns = {"prompt_ids": np.array(prompt, np.int32), **columns}
    return TrainRecord(ordinal=4, sample=sample, minibatch=0, columns=content)


def episode(sample: int, *prompt: int) -> TrainRecord:
    return record(sample, *prompt, **{SEQUENCES: np.array([[0, -1, 0]], np.int32)})


def test_a_record_of_another_prompt_than_its_group_is_refused() -> None:
    check_prompts([record(0, 1, 2), record(1, 1, 2)], "opening")
    with pytest.raises(RecordMismatch, match="record 4/1 has another prompt than 4/0"):
        check_prompts([record(0, 1, 2), record(1, 1, 3)], "opening")


def test_episodes_of_one_ordinal_may_begin_differently() -> None:
    check_prompts([episode(0, 1, 2), episode(1, 1, 3)], "opening")
