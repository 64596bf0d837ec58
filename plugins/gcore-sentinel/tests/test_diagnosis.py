"""Each planted fault is told as what it is, from the records of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gcore_sentinel.diagnosis import diagnose
from gcore_sentinel.evidence import Table
from gcore_sentinel.synthetic import records, table_of

from gcore_core.contract.sentinel import Compared

Records = list[Compared]


def named(found: Records, healthy: Table | None = None) -> tuple[str, str]:
    """The cause with the highest score, and its sentence."""
    best = max(diagnose(found, None, healthy), key=lambda finding: finding.score)
    return best.cause, best.text


def changed(found: Records, change: Callable[[np.ndarray], np.ndarray]) -> Records:
    return [replace(r, rollout_logp=change(r.rollout_logp.copy())) for r in found]


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def healthy() -> Table:
    """The table of the gaps that ``records`` have without a fault."""
    drawn = [record for seed in range(90, 94) for record in records(np.random.default_rng(seed))]
    trainer = np.concatenate([record.trainer_logp for record in drawn])
    rollout = np.concatenate([record.rollout_logp for record in drawn])
    gaps = rollout.astype(np.float64) - trainer
    return table_of(trainer.reshape(-1, 64), gaps.reshape(-1, 64))


def other_weights(
    generator: np.random.Generator, logits: np.ndarray, actions: np.ndarray
) -> np.ndarray:
    """Log-probs of slightly other weights, under which the action was as likely sampled."""
    other = logits + 0.15 * generator.standard_normal(logits.shape)
    logps = other - np.log(np.exp(other).sum(axis=1, keepdims=True))
    logp: np.ndarray = logps[np.arange(len(actions)), actions]
    return logp


def tempered(temperature: float) -> Callable[..., np.ndarray]:
    def fault(
        generator: np.random.Generator, logits: np.ndarray, actions: np.ndarray
    ) -> np.ndarray:
        other = logits / temperature
        logps = other - np.log(np.exp(other).sum(axis=1, keepdims=True))
        logp: np.ndarray = logps[np.arange(len(actions)), actions]
        return logp

    return fault


def test_log_probs_that_are_shifted_by_one(generator: np.random.Generator) -> None:
    found = changed(records(generator), lambda logp: np.roll(logp, 1))
    assert named(found)[0] == "shifted" and "the action before" in named(found)[1]
    found = changed(records(generator), lambda logp: np.roll(logp, -1))
    assert named(found)[0] == "shifted" and "the action after" in named(found)[1]


@pytest.mark.parametrize(
    ("value", "words"), [(lambda logp: 0.0, "is 0"), (lambda logp: logp[-2], "the action before")]
)
def test_a_last_action_that_is_wrong(
    generator: np.random.Generator, value: Callable[[np.ndarray], float], words: str
) -> None:
    def last(logp: np.ndarray) -> np.ndarray:
        logp[-1] = value(logp)
        return logp

    cause, text = named(changed(records(generator), last))
    assert cause == "last" and words in text


@pytest.mark.parametrize("temperature", [0.9, 0.97, 1.03, 1.2])
@pytest.mark.parametrize("entropies", [True, False])
def test_another_temperature_with_its_size(
    generator: np.random.Generator, temperature: float, entropies: bool
) -> None:
    found = records(generator, noise=0.3, fault=tempered(temperature))
    if not entropies:
        found = [replace(record, entropy=None) for record in found]
    cause, text = named(found)
    assert cause == "temperature"
    if entropies:
        assert float(text.split(" at ")[1].split()[0]) == pytest.approx(temperature, abs=0.05)


@pytest.mark.parametrize("temperature", [0.98, 0.99, 1.01])
def test_another_temperature_is_told_below_the_noise_of_low_precision(
    generator: np.random.Generator, healthy: Table, temperature: float
) -> None:
    found = records(generator, 64, noise=0.5, fault=tempered(temperature))
    half = [r if r.ordinal % 2 else replace(r, entropy=None) for r in found]  # one minibatch of two
    cause, text = named(half, healthy)
    assert cause == "temperature"
    assert float(text.split(" at ")[1].split()[0]) == pytest.approx(temperature, abs=0.004)


@pytest.mark.parametrize("size", [0.05, 0.15])
def test_other_weights_are_no_temperature_in_low_precision(
    generator: np.random.Generator, healthy: Table, size: float
) -> None:
    def fault(draw: np.random.Generator, logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return tempered(1.0)(draw, logits + size * draw.standard_normal(logits.shape), actions)

    assert named(records(generator, 64, fault=fault), healthy)[0] == "weights"


@pytest.mark.parametrize("table", [True, False])
def test_log_probs_that_have_nothing_to_do_with_the_trainers_are_no_temperature(
    generator: np.random.Generator, healthy: Table, table: bool
) -> None:
    def fault(draw: np.random.Generator, logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return tempered(1.0)(draw, 0.3 * draw.standard_normal(logits.shape), actions)

    found = records(generator, fault=fault)
    assert named(found, healthy if table else None)[0] == "weights"


def test_one_large_gap_at_an_end_is_no_last_action_in_low_precision(
    generator: np.random.Generator, healthy: Table
) -> None:
    """Healthy gaps are as large now and then; old weights must not be told as wrong ends for it."""

    def slightly_other(draw: np.random.Generator, logits: np.ndarray, actions: np.ndarray) -> Any:
        return tempered(1.0)(draw, logits + 0.05 * draw.standard_normal(logits.shape), actions)

    found = records(generator, 16, fault=slightly_other)
    outlier = found[0].rollout_logp.copy()
    outlier[-1] -= np.float32(3.9)
    found[0] = replace(found[0], rollout_logp=outlier)
    assert named(found, healthy)[0] == "weights"


def test_last_actions_that_are_wrong_are_told_below_the_noise_of_low_precision(
    generator: np.random.Generator, healthy: Table
) -> None:
    def last(logp: np.ndarray) -> np.ndarray:
        logp[-1] = logp[-2]
        return logp

    cause, text = named(changed(records(generator, 64), last), healthy)
    assert cause == "last" and "the action before" in text


@pytest.mark.parametrize("seed", range(8))
def test_heavy_tails_are_no_cached_prompts(healthy: Table, seed: int) -> None:
    found = records(np.random.default_rng(seed), 16)
    outlier = found[0].rollout_logp.copy()
    outlier[3] += np.float32(1.0)  # healthy runs have such gaps
    found[0] = replace(found[0], rollout_logp=outlier)
    assert named(found, healthy)[0] == "weights"


def test_other_weights_are_what_is_left(generator: np.random.Generator) -> None:
    cause, text = named(records(generator, fault=other_weights))
    assert cause == "weights" and "old, or not loaded whole" in text


def test_healthy_noise_is_given_no_special_cause(generator: np.random.Generator) -> None:
    assert named(records(generator))[0] == "weights"


def test_log_probs_that_are_rounded(generator: np.random.Generator) -> None:
    def rounded(logp: np.ndarray) -> np.ndarray:
        return (logp.view(np.uint32) & 0xFFFF0000).view(np.float32)

    cause, text = named(changed(records(generator, noise=0.0), rounded))
    assert cause == "rounded" and "bfloat16" in text
    half = changed(
        records(generator, noise=0.0), lambda logp: logp.astype(np.float16).astype(np.float32)
    )
    assert "float16" in named(half)[1]


def test_a_prefix_cache_that_outlived_a_push(
    generator: np.random.Generator, healthy: Table
) -> None:
    clean = records(generator, noise=0.0)
    stale = records(np.random.default_rng(0), noise=0.0, fault=other_weights)
    some = [s if s.ordinal % 2 else c for c, s in zip(clean, stale, strict=True)]
    assert named(some)[0] == "prompts" and "outlived a push" in named(some)[1]
    noisy, old = records(generator), records(np.random.default_rng(0), fault=other_weights)
    some = [s if s.ordinal % 2 else c for c, s in zip(noisy, old, strict=True)]
    assert named(some, healthy)[0] == "prompts"
    later = [s if s.sample else c for c, s in zip(clean, stale, strict=True)]
    assert named(later)[0] == "prompts" and "first sample" in named(later)[1]


def test_masked_actions_are_never_read(generator: np.random.Generator) -> None:
    found = []
    for record in records(generator, fault=tempered(1.1)):
        rollout = record.rollout_logp.copy()
        mask = record.mask.copy()
        rollout[2], mask[2] = np.nan, False
        found.append(replace(record, rollout_logp=rollout, mask=mask))
    assert named(found)[0] == "temperature"
    assert all(np.isfinite(finding.score) for finding in diagnose(found))


def test_nothing_to_explain_gives_no_finding(generator: np.random.Generator) -> None:
    assert diagnose([]) == []
    assert diagnose(changed(records(generator, noise=0.0), lambda logp: logp)) == []
