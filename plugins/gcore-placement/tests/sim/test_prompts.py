from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from gcore_placement.sim.config import (
    KINDS,
    CrowdConfig,
    EngineProfile,
    GeneratorConfig,
    JudgeConfig,
    Payload,
    PromptsConfig,
    Skew,
    TrainerConfig,
)
from gcore_placement.sim.prompts import AnswerLengths, SimPrompts, answer_lengths

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.order import row_of, sample_seed

NONE = AnswerLengths(1.0, 0.0, 1 << 30)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_follow_the_workload(kind: str) -> None:
    """Over prompts and samples together; 4,000 draws of 1,000 prompts: 10% are three standard
    errors of a median.
    """
    rows = SimPrompts(PromptsConfig(kind=kind, rows=1000))
    prompt, median, sigma, limit = KINDS[kind]
    told = [rows[row].fields for row in range(1000)]
    drawn = [
        answer_lengths(told[n % 1000], NONE).draw(sample_seed(0, n, 0, 0)) for n in range(4000)
    ]
    assert np.median(drawn) == pytest.approx(median, rel=0.1)
    assert np.log(drawn).std() == pytest.approx(sigma, rel=0.05)
    assert np.median([fields["prompt_tokens"] for fields in told]) == pytest.approx(prompt, rel=0.1)
    assert {fields["answer_limit"] for fields in told} == {limit}


def test_samples_of_a_prompt_are_alike() -> None:
    """Half of the variance is the prompt's, as the default says."""
    rows = SimPrompts(PromptsConfig(rows=400))
    logs = np.log(
        [
            [answer_lengths(rows[r].fields, NONE).draw(sample_seed(0, r, 0, s)) for s in range(16)]
            for r in range(400)
        ]
    )
    between = logs.mean(axis=1).var() - logs.var(axis=1).mean() / 16
    assert between / logs.var() == pytest.approx(0.5, abs=0.08)


def test_given_lengths_are_assigned_to_rows_in_turn() -> None:
    rows = SimPrompts(PromptsConfig(rows=5, prompt_tokens=[3, 40], answer_tokens=[7]))
    assert [rows[row].fields["prompt_tokens"] for row in range(5)] == [3, 40, 3, 40, 3]
    assert {
        answer_lengths(rows[row].fields, NONE).draw(seed) for row in range(5) for seed in range(9)
    } == {7}


@pytest.mark.parametrize("shard", [0, 5])
def test_one_controllers_prompts_are_longer_by_the_factor(shard: int) -> None:
    plain = SimPrompts(PromptsConfig(rows=100, prompt_tokens=[10]))
    skew = Skew(shards=8, shard=shard, factor=4.0, seed=11)
    skewed = SimPrompts(PromptsConfig(rows=100, prompt_tokens=[10], skew=skew))
    for ordinal in range(100):
        row = row_of(ordinal, 100, 11)[1]
        factor = skewed[row].fields["prompt_tokens"] / plain[row].fields["prompt_tokens"]
        assert factor == (4 if ordinal % 8 == shard else 1)
        assert skewed[row].fields["answer_median"] == plain[row].fields["answer_median"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (lambda: EngineProfile(cached_s=-1e-9), "cached_s: must not be negative, is -1e-09"),
        (lambda: Payload(nbytes=-1), "nbytes: must not be negative, is -1"),
        (lambda: GeneratorConfig(tick_s=0.0), "tick_s: must be positive, is 0.0"),
        (lambda: TrainerConfig(time_scale=-1.0), "time_scale: must not be negative, is -1.0"),
        (lambda: TrainerConfig(micro_batch=-1), "micro_batch: must not be negative, is -1"),
        (lambda: JudgeConfig(replicas=0), "replicas: must be at least 1, is 0"),
        (lambda: JudgeConfig(decided=1.5), "decided: must be from 0 to 1, is 1.5"),
        (lambda: PromptsConfig(answer_tokens=[5, 0]), "answer_tokens: each must be at least 1"),
        (
            lambda: PromptsConfig(skew=Skew(shards=8, shard=8)),
            "skew.shard: there is no shard 8 of 8",
        ),
        (lambda: CrowdConfig(processes=0), "processes: must be at least 1, is 0"),
    ],
)
def test_an_invalid_setting_is_refused(settings: Callable[[], object], what: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(what)}$"):
        settings()
