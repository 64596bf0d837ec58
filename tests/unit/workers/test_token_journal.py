"""What is written of the tokens of a step: a few records of some steps, and never more."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_core.contract.run_files import TOKENS, read_tokens
from gcore_core.contract.sentinel import Compared
from gcore_core.run.directory import go_back
from gcore_core.workers import run_journals
from gcore_core.workers.run_journals import TokenJournal


def compared(ordinal: int, sample: int, actions: int = 4, **changes: Any) -> Compared:
    own: dict[str, Any] = {
        "rollout_logp": np.full(actions, -1.0, np.float32),
        "trainer_logp": np.full(actions, -1.25, np.float32),
        "mask": np.arange(actions) != 2,
        "prompt_ids": np.arange(300, dtype=np.int32),
        "action_ids": np.arange(actions, dtype=np.int32),
    }
    return Compared(
        ordinal=ordinal, sample=sample, step=0, replica=1, version=3, **{**own, **changes}
    )


def test_two_records_of_two_prompts_are_written_every_tenth_step(tmp_path: Path) -> None:
    records = [compared(ordinal, sample) for ordinal in range(5) for sample in range(4)]
    advantage_of = {(r.ordinal, r.sample): r.ordinal + r.sample / 10 for r in records}
    journal = TokenJournal(tmp_path)
    for step in range(21):
        journal.write(step, records, advantage_of)
    rows = list(read_tokens(tmp_path))
    assert [(row.step, row.ordinal, row.sample) for row in rows] == [
        (step, ordinal, sample) for step in (0, 10, 20) for ordinal in (0, 1) for sample in (0, 1)
    ]
    row = rows[3]
    assert (row.advantage, row.replica, row.version) == (1.1, 1, 3)
    assert row.rollout_logp == [-1.0] * 4 and row.trainer_logp == [-1.25] * 4
    assert row.masked == [2] and row.entropy == []
    assert row.prompt_ids == list(range(300 - run_journals.PROMPT_TOKENS, 300))


def test_of_a_long_record_the_beginning_is_written(tmp_path: Path) -> None:
    TokenJournal(tmp_path).write(0, [compared(0, 0, 5000)], {(0, 0): 1.0})
    (row,) = read_tokens(tmp_path)
    assert row.actions == 5000
    lengths = {len(row.action_ids), len(row.rollout_logp), len(row.trainer_logp)}
    assert lengths == {run_journals.ACTIONS}


def test_a_log_prob_that_is_no_number_is_read_as_nan(tmp_path: Path) -> None:
    """JSON has neither NaN nor infinities: they are null there. The record is read all the same."""
    trainer = np.array([-1.0, math.nan, -math.inf, -2.0], np.float32)
    record = compared(0, 0, trainer_logp=trainer, entropy=trainer)
    TokenJournal(tmp_path).write(0, [record, compared(0, 1)], {(0, 0): 1.0, (0, 1): 1.0})
    first, second = read_tokens(tmp_path)
    assert (first.sample, second.sample) == (0, 1)
    for values in (first.trainer_logp, first.entropy):
        assert values == pytest.approx([-1.0, math.nan, math.nan, -2.0], nan_ok=True)
    assert first.rollout_logp == [-1.0] * 4
    with (tmp_path / TOKENS).open("ab") as file:
        file.write(b'{"step":null,"ordinal":1}\n[]\n{"step":3,"ord')
    assert len(list(read_tokens(tmp_path))) == 2


def test_records_whose_actions_are_no_tokens_are_left_out(tmp_path: Path) -> None:
    pictures = compared(0, 0, action_ids=None, prompt_ids=None)
    TokenJournal(tmp_path).write(0, [pictures, compared(1, 0)], {(0, 0): 1.0, (1, 0): 1.0})
    assert [row.ordinal for row in read_tokens(tmp_path)] == [1]


def test_a_disk_that_takes_nothing_ends_no_step(tmp_path: Path) -> None:
    journal = TokenJournal(tmp_path / "gone")
    journal.write(0, [compared(0, 0)], {(0, 0): 1.0})
    (tmp_path / "gone").mkdir()
    journal.write(10, [compared(0, 0)], {(0, 0): 1.0})
    assert list(read_tokens(tmp_path / "gone")) == []


def test_steps_that_are_made_again_are_taken_out(tmp_path: Path) -> None:
    journal = TokenJournal(tmp_path)
    for step in (0, 10):
        journal.write(step, [compared(0, 0)], {(0, 0): 1.0})
    go_back(tmp_path, 10, print)
    assert [row.step for row in read_tokens(tmp_path)] == [0]
    assert (tmp_path / "tokens.undone.jsonl").read_bytes().count(b"\n") == 1
    assert TOKENS == "tokens.jsonl"
