"""Each planted fault is told as what it is, from the records of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from gcore_sentinel.diagnosis import diagnose
from gcore_sentinel.synthetic import records

from gcore_core.contract.sentinel import Compared

Records = list[Compared]


def named(found: Records) -> tuple[str, str]:
    """The cause with the highest score, and its sentence."""
    best = max(diagnose(found), key=lambda finding: finding.score)
    return best.cause, best.text


def changed(found: Records, change: Callable[[np.ndarray], np.ndarray]) -> Records:
    return [replace(r, rollout_logp=change(r.rollout_logp.copy())) for r in found]


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def other_weights(
    generator: np.random.Generator, logits: np.ndarray, actions: np.ndarray
) -> np.ndarray:
    """Log-probs of slightly other weights, under which the action was as likely sampled."""
    other = logits + 0.15 * generator.standard_normal(logits.shape)
    logps = other - np.log(np.exp(other).sum(axis=1, keepdims=True))
    return logps[np.arange(len(actions)), actions]


def tempered(temperature: float) -> Callable[..., np.ndarray]:
    def fault(
        generator: np.random.Generator, logits: np.ndarray, actions: np.ndarray
    ) -> np.ndarray:
        other = logits / temperature
        logps = other - np.log(np.exp(other).sum(axis=1, keepdims=True))
        return logps[np.arange(len(actions)), actions]

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


def test_a_prefix_cache_that_outlived_a_push(generator: np.random.Generator) -> None:
    clean = records(generator, noise=0.0)
    stale = records(np.random.default_rng(0), noise=0.0, fault=other_weights)
    some = [s if s.ordinal % 2 else c for c, s in zip(clean, stale, strict=True)]
    assert named(some)[0] == "prompts" and "outlived a push" in named(some)[1]
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
