"""Losses and gradients equal numpy, float64, written from the papers alone.

The tolerance of 1e-10 is that of two orders of the same float64 operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gcore_algorithms.teacher.config import (
    TOP_IDS,
    TOP_LOGP,
    DistillationConfig,
    JensenShannonConfig,
    NoRewardConfig,
    ReverseKlConfig,
)
from gcore_algorithms.teacher.conformance import distilled_batch
from gcore_algorithms.teacher.objectives import JensenShannon, ReverseKl

from gcore_core.contract.errors import ConfigError

TOLERANCE = 1e-10
FLOOR = 1e-6
LIVE = f"logp@{TOP_IDS}"

Arrays = Mapping[str, np.ndarray]


def computed(objective: Any, batch: Mapping[str, Any]) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns (loss, gradient by logp, gradient by the top k's log-probs) of the objective."""
    logp = batch["logp"].clone().requires_grad_()
    top = batch[LIVE].clone().requires_grad_()
    loss, weight, _ = objective.loss(batch, {"logp": logp, LIVE: top})
    value = loss / weight
    value.backward()
    gradients = (
        (torch.zeros_like(one) if one.grad is None else one.grad).numpy() for one in (logp, top)
    )
    return float(value.detach()), *gradients


def shares(batch: Arrays, normalise: str) -> np.ndarray:
    """Returns how much each action counts, float64[A]: 0 for masked ones, 1 in all."""
    mask = batch["mask"].astype(np.float64)
    if normalise == "token":
        return mask / mask.sum()
    lengths = np.bincount(batch["record"], weights=mask)
    own = lengths[batch["record"]]
    return mask / np.where(own > 0, own, 1) / (lengths > 0).sum()


def surrogate(
    batch: Arrays, behaviour: str, advantage: np.ndarray, low: float, high: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns PPO's clipped loss of each action (arXiv:1707.06347, Eq. 7) and its slope by logp."""
    ratio = np.exp(batch["logp"] - batch[behaviour])
    plain, bounded = ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage
    return -np.minimum(plain, bounded), np.where(plain <= bounded, -ratio * advantage, 0.0)


@pytest.mark.parametrize("normalise", ["token", "sequence"])
@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
@pytest.mark.parametrize("reward_weight", [0.0, 0.7])
def test_sampled_reverse_kl_equals_numpy(
    normalise: Any, old_logprobs: Any, reward_weight: float
) -> None:
    config = ReverseKlConfig(
        normalise=normalise,
        old_logprobs=old_logprobs,
        teacher_weight=1.3,
        reward_weight=reward_weight,
        clip_low=0.1,
        clip_high=0.3,
        largest_gap=1.5,
    )
    batch = distilled_batch()
    arrays = {name: column.numpy() for name, column in batch.items()}
    behaviour = "old_logp" if old_logprobs == "recompute" else "rollout_logp"
    gap = np.clip(arrays["teacher_logp"] - arrays[behaviour], -1.5, 1.5)
    advantage = 1.3 * gap + reward_weight * arrays["advantage"]
    losses, slopes = surrogate(arrays, behaviour, advantage, 0.1, 0.3)
    share = shares(arrays, normalise)
    loss, by_logp, by_top = computed(ReverseKl(config), batch)
    assert loss == pytest.approx(float((share * losses).sum()), abs=TOLERANCE)
    np.testing.assert_allclose(by_logp, share * slopes, rtol=0, atol=TOLERANCE)
    assert not by_top.any()


def divergence(p: np.ndarray, q: np.ndarray, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns D(p, q) of each row (arXiv:2306.13649, Eq. 1) and its slope by each of q's numbers.

    The limits, over beta and over 1 - beta, are KL(p || q) and KL(q || p).
    """
    if beta == 0:
        return (p * np.log(p / q)).sum(1), -p / q
    if beta == 1:
        return (q * np.log(q / p)).sum(1), np.log(q / p) + 1
    m = beta * p + (1 - beta) * q
    value = beta * (p * np.log(p / m)).sum(1) + (1 - beta) * (q * np.log(q / m)).sum(1)
    return value, (1 - beta) * np.log(q / m)


def by_logits(
    teacher: np.ndarray, policy: np.ndarray, beta: float, tail: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns D of each row and its slopes by the k log-probs of the policy.

    teacher, policy: float64[A, k].
    """
    p, q = np.exp(teacher), np.exp(policy)
    if tail == "renormalise":
        p, q = (own / own.sum(1, keepdims=True) for own in (p, q))
        value, slope = divergence(p, q, beta)
        return value, q * (slope - (q * slope).sum(1, keepdims=True))
    p_rest, q_rest = (np.maximum(1 - own.sum(1, keepdims=True), FLOOR) for own in (p, q))
    value, slope = divergence(np.hstack([p, p_rest]), np.hstack([q, q_rest]), beta)
    through_rest = np.where(1 - q.sum(1, keepdims=True) > FLOOR, slope[:, -1:], 0.0)
    return value, q * (slope[:, :-1] - through_rest)


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("reward_weight", [0.0, 0.7])
def test_generalised_jensen_shannon_equals_numpy(
    beta: float, tail: Any, reward_weight: float
) -> None:
    config = JensenShannonConfig(
        beta=beta, tail=tail, teacher_weight=1.3, reward_weight=reward_weight, normalise="sequence"
    )
    batch = distilled_batch()
    arrays = {name: column.numpy() for name, column in batch.items()}
    values, slopes = by_logits(arrays[TOP_LOGP], arrays[LIVE], beta, tail)
    losses, rewarded = surrogate(arrays, "rollout_logp", arrays["advantage"], 0.2, 0.2)
    share = shares(arrays, "sequence")
    loss, by_logp, by_top = computed(JensenShannon(config), batch)
    expected = (share * (1.3 * values + reward_weight * losses)).sum()
    assert loss == pytest.approx(float(expected), abs=TOLERANCE)
    np.testing.assert_allclose(by_top, share[:, None] * 1.3 * slopes, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(by_logp, share * reward_weight * rewarded, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_the_limits_are_those_of_small_and_of_large_beta(limit: float) -> None:
    """D / b at b = 1e-7, and D / (1 - b) at 1 - 1e-7, are off by what is of first order in b."""
    batch = distilled_batch()

    def loss(beta: float) -> float:
        return computed(JensenShannon(JensenShannonConfig(beta=beta)), batch)[0]

    near = abs(limit - 1e-7)
    scale = near if limit == 0 else 1 - near
    assert loss(near) / scale == pytest.approx(loss(limit), rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_whole_vocabulary_is_exact_and_a_part_of_it_a_lower_bound(beta: float) -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 2, (2, 20, 12))
    teacher, policy = (own - np.log(np.exp(own).sum(1, keepdims=True)) for own in logits)
    exact = divergence(np.exp(teacher), np.exp(policy), beta)[0].mean()
    order = np.argsort(-teacher, axis=1)

    def loss(k: int) -> float:
        top = order[:, :k]
        zeros = torch.zeros(20, dtype=torch.float64)
        batch = {
            "record": torch.arange(20),
            "mask": torch.ones(20, dtype=torch.bool),
            "advantage": zeros,
            "rollout_logp": zeros,
            "logp": zeros,
            TOP_LOGP: torch.from_numpy(np.take_along_axis(teacher, top, 1)),
            LIVE: torch.from_numpy(np.take_along_axis(policy, top, 1)),
        }
        return computed(JensenShannon(JensenShannonConfig(beta=beta)), batch)[0]

    # the token of all others, which are none, has the probability FLOOR in both
    assert loss(12) == pytest.approx(exact, abs=TOLERANCE)
    bounds = [loss(k) for k in (1, 3, 6, 12)]
    assert bounds == sorted(bounds)


def test_the_advantages_of_reverse_kl_are_what_its_loss_follows() -> None:
    """Where no clip binds and the ratio is 1, a slope by a log-prob is minus the advantage."""
    batch = {**distilled_batch(), "mask": torch.ones(28, dtype=torch.bool)}
    batch["logp"] = batch["rollout_logp"]
    objective = ReverseKl(ReverseKlConfig(reward_weight=0.3))
    _, by_logp, _ = computed(objective, batch)
    np.testing.assert_allclose(by_logp * 28, -objective.advantages(batch), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("cls", "settings", "where"),
    [
        (ReverseKlConfig, {"teacher_weight": -1.0}, "teacher_weight"),
        (ReverseKlConfig, {"teacher_weight": 0.0}, "teacher_weight"),
        (ReverseKlConfig, {"reward_weight": -1.0}, "reward_weight"),
        (ReverseKlConfig, {"clip_low": 1.5}, "clip_low"),
        (ReverseKlConfig, {"clip_high": -0.1}, "clip_high"),
        (ReverseKlConfig, {"largest_gap": 0.0}, "largest_gap"),
        (JensenShannonConfig, {"beta": 1.1}, "beta"),
        (NoRewardConfig, {"group_size": 0}, "group_size"),
    ],
)
def test_settings_that_make_no_loss_are_refused(
    cls: type[DistillationConfig], settings: dict[str, Any], where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**settings)
    assert caught.value.where == where
