"""What an episode gave is scored again by other rewards, in another process, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_environments.rewards import EnvironmentReward
from gcore_environments.settings import EnvironmentRewardConfig
from gcore_environments.stored import FOLDER, stored_episodes

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord
from tests.support.random_episodes import random_book, record_of


def reward(directory: Path, **config: Any) -> EnvironmentReward:
    context = WorkerContext(role="scorer", rank=2, directory=str(directory))
    return EnvironmentReward(EnvironmentRewardConfig(**config), context)


def records(count: int = 200, *, first: int = 0) -> list[ScoredRecord]:
    made = []
    for seed in range(count):
        columns = record_of(random_book(seed))
        prompt = Prompt(row=seed, messages=[{"role": "user", "content": "é"}], fields={"a": [seed]})
        text = columns["text"].tobytes().decode()
        status = "finished" if seed % 3 else "truncated"
        made.append(
            ScoredRecord(
                ordinal=seed + first,
                sample=1,
                prompt=prompt,
                text=text,
                status=status,
                columns=columns,
            )
        )
    return made


def test_kept_episodes_are_scored_again_as_they_were(tmp_path: Path) -> None:
    given = records()
    first = reward(tmp_path, name="win", keep=True)
    scores = first.score(given[:120]) + first.score(given[120:])
    again = list(stored_episodes(tmp_path / FOLDER / "scorer-2.jsonl"))
    assert reward(tmp_path, name="win").score(again) == scores
    assert len(again) == len(given)
    for one, other in zip(given, again, strict=True):
        for name in ("ordinal", "sample", "prompt", "text", "status"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("prompt_ids", "episode", "text", "temperature"):
            np.testing.assert_array_equal(one.columns[name], other.columns[name])
        mask = [record.columns["action_mask"].sum() for record in (one, other)]
        assert mask[0] == mask[1]


def test_episodes_of_an_evaluation_lie_apart(tmp_path: Path) -> None:
    """Who trains on the kept ones trains on none of the held-out rows."""
    reward(tmp_path, keep=True).score(records(9, first=-4))
    kept, evaluated = [
        [one.ordinal for one in stored_episodes(tmp_path / FOLDER / folder / "scorer-2.jsonl")]
        for folder in ("", "evaluation")
    ]
    assert kept == [0, 1, 2, 3, 4] and evaluated == [-4, -3, -2, -1]


def test_nothing_is_written_where_nobody_asks_for_it(tmp_path: Path) -> None:
    reward(tmp_path).score(records(3))
    assert not list(tmp_path.iterdir())


def test_a_line_that_is_no_episode_is_named(tmp_path: Path) -> None:
    reward(tmp_path, keep=True).score(records(3))
    file = tmp_path / FOLDER / "scorer-2.jsonl"
    file.write_text(file.read_text()[:-40])
    with pytest.raises(DataError, match="line 3"):
        list(stored_episodes(file))


def test_a_line_cut_within_a_character_and_one_of_another_version_are_named(tmp_path: Path) -> None:
    reward(tmp_path, keep=True).score(records(2))
    file = tmp_path / FOLDER / "scorer-2.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[:40] + "é".encode()[:1])
    with pytest.raises(DataError, match="line 2: the line is no episode"):
        list(stored_episodes(file))
    file.write_bytes(first + second.replace(b'"schema_version": 1', b'"schema_version": 2'))
    with pytest.raises(DataError, match="line 2: schema_version: is 2, not 1"):
        list(stored_episodes(file))
