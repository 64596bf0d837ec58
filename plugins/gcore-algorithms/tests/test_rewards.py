"""The penalty of long completions is DAPO's; that of repetitions counts n-grams."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gcore_algorithms.config import OverlongConfig, RepetitionConfig
from gcore_algorithms.rewards import Overlong, Repetition

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import FINISHED, OK, REWARD_FAILED, Prompt
from gcore_core.contract.scorer import ScoredRecord


def record_of(actions: int) -> ScoredRecord:
    return ScoredRecord(
        ordinal=0,
        sample=0,
        prompt=Prompt(row=0, text="a question"),
        text="",
        status=FINISHED,
        columns={"logp": np.zeros(actions, np.float32), "action_mask": np.ones(actions, np.uint8)},
    )


def equation_13(length: int, longest: int, cache: int) -> float:
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "cache"), [(20, 5), (20, 20), (7, 1)])
def test_the_penalty_is_equation_13_of_the_paper(longest: int, cache: int) -> None:
    config = OverlongConfig(max_actions=longest, soft_actions=cache)
    lengths = range(longest + 3)
    scores = Overlong(config, WorkerContext(role="scorer")).score([record_of(n) for n in lengths])
    assert {score.status for score in scores} == {OK}
    assert [score.value for score in scores] == [equation_13(n, longest, cache) for n in lengths]


def test_what_the_policy_was_given_does_not_make_its_answer_longer() -> None:
    record = record_of(20)
    record.columns["action_mask"][:18] = 0  # type: ignore[index]
    config = OverlongConfig(max_actions=20, soft_actions=5)
    (score,) = Overlong(config, WorkerContext(role="scorer")).score([record])
    assert score.value == 0


@pytest.mark.parametrize("soft_actions", [0, -1, 21])
def test_a_slope_longer_than_the_completion_is_refused(soft_actions: int) -> None:
    with pytest.raises(ConfigError, match="is not between 1 and max_actions, 20"):
        OverlongConfig(max_actions=20, soft_actions=soft_actions)


def penalty_of(tokens: list[int], ngram: int, scale: float = 1.0) -> float | None:
    config = RepetitionConfig(ngram=ngram, scale=scale)
    record = record_of(len(tokens))
    record = replace(record, columns={**record.columns, "action_ids": np.array(tokens, np.int32)})
    (score,) = Repetition(config, WorkerContext(role="scorer")).score([record])
    return score.value


def repeated_share(tokens: list[int], ngram: int) -> float:
    """Share of n-grams that stood before, by a walk from left to right."""
    seen: set[tuple[int, ...]] = set()
    again = 0
    count = len(tokens) - ngram + 1
    for place in range(count):
        part = tuple(tokens[place : place + ngram])
        again += part in seen
        seen.add(part)
    return again / count if count > 0 else 0.0


@pytest.mark.parametrize("ngram", [1, 2, 3, 7])
def test_the_penalty_of_repetitions_is_the_share_of_ngrams_that_stood_before(ngram: int) -> None:
    draw = np.random.default_rng(0)
    for length in (0, 1, 2, 3, 6, 7, 8, 40):
        tokens = draw.integers(0, 4, length).tolist()
        expected = -0.5 * repeated_share(tokens, ngram)
        assert penalty_of(tokens, ngram, 0.5) == pytest.approx(expected, abs=1e-12)


def test_a_completion_that_repeats_nothing_is_not_punished() -> None:
    assert penalty_of(list(range(30)), 2) == 0.0


def test_one_token_repeated_for_ever_comes_close_to_the_whole_penalty() -> None:
    assert penalty_of([5] * 1000, 3) == pytest.approx(-1.0, abs=2e-3)


def test_a_record_without_tokens_has_no_penalty_of_repetitions() -> None:
    (score,) = Repetition(RepetitionConfig(), WorkerContext(role="scorer")).score([record_of(4)])
    assert score.value is None
    assert score.status == REWARD_FAILED


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"ngram": 0}, "is not a number of tokens"), ({"scale": 0.0}, "is not above 0")],
)
def test_a_penalty_of_no_ngrams_or_of_no_size_is_refused(fields, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RepetitionConfig(**fields)
