"""The adaptive entropy coefficient follows the rule of Skywork-OR1, enters the loss, and survives a
checkpoint.

Tolerance 1e-10 in float64: sums of the same changes in another order.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gcore_algorithms.config import EntropyTargetConfig, PpoClipConfig
from gcore_algorithms.entropy import EntropyCoefficient
from gcore_algorithms.objectives import PpoClip

from gcore_core.contract.errors import ConfigError

TARGET = EntropyTargetConfig(target=0.2, change=0.003, smallest=0.001, largest=0.02)


def of_the_paper(entropies: np.ndarray, first: float, settings: EntropyTargetConfig) -> np.ndarray:
    """The coefficient that each step applies, c x 1{e < target}, e being that of the step before;
    the first applies its c.
    """
    c = first
    applied = [first]
    for e in entropies:
        c = c + settings.change if e < settings.target else c - settings.change
        c = min(max(c, settings.smallest), settings.largest)
        applied.append(c * float(e < settings.target))
    return np.array(applied)


@pytest.mark.parametrize("seed", range(5))
def test_the_coefficient_follows_the_rule_of_the_paper(seed: int) -> None:
    entropies = np.random.default_rng(seed).uniform(0.0, 0.4, 60)
    coefficient = EntropyCoefficient(0.005, TARGET)
    applied = [coefficient.applied]
    for entropy in entropies:
        coefficient.observe(float(entropy))
        applied.append(coefficient.applied)
    expected = of_the_paper(entropies, 0.005, TARGET)
    np.testing.assert_allclose(applied, expected, rtol=0, atol=1e-10)


def test_below_the_target_the_coefficient_rises_to_its_largest_and_above_it_is_not_applied() -> (
    None
):
    coefficient = EntropyCoefficient(0.001, TARGET)
    for _ in range(20):
        coefficient.observe(0.1)
    assert coefficient.applied == 0.02
    coefficient.observe(0.3)
    assert coefficient.applied == 0.0
    coefficient.observe(0.1)
    assert coefficient.applied == pytest.approx(0.02, abs=1e-12)


def test_without_a_target_the_coefficient_stays() -> None:
    coefficient = EntropyCoefficient(0.01, EntropyTargetConfig())
    coefficient.observe(0.0)
    assert coefficient.applied == 0.01
    assert coefficient.state() == {}


def test_a_restored_coefficient_goes_on_as_if_never_stopped() -> None:
    entropies = np.random.default_rng(9).uniform(0.0, 0.4, 40).tolist()
    whole = EntropyCoefficient(0.005, TARGET)
    for entropy in entropies:
        whole.observe(entropy)
    first = EntropyCoefficient(0.005, TARGET)
    for entropy in entropies[:17]:
        first.observe(entropy)
    resumed = EntropyCoefficient(0.005, TARGET)
    resumed.restore(json.loads(json.dumps(first.state())))
    for entropy in entropies[17:]:
        resumed.observe(entropy)
    assert resumed.state() == whole.state()


def test_a_run_that_no_longer_has_a_target_keeps_its_own_coefficient() -> None:
    adaptive = EntropyCoefficient(0.005, TARGET)
    adaptive.observe(0.1)
    fixed = EntropyCoefficient(0.01, EntropyTargetConfig())
    fixed.restore(adaptive.state())
    assert fixed.applied == 0.01


def loss_and_gradient(objective: PpoClip) -> tuple[float, list[float], dict]:
    """Of two actions of advantage 0, so that nothing but the entropy is left."""
    zeros = torch.zeros(2, dtype=torch.float64)
    columns = {
        "record": torch.zeros(2, dtype=torch.int64),
        "mask": torch.ones(2, dtype=torch.bool),
        "advantage": zeros,
        "rollout_logp": zeros,
    }
    entropy = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    logp = zeros.clone().requires_grad_()
    loss, weight, metrics = objective.loss(columns, {"logp": logp, "entropy": entropy})
    (loss / weight).backward()
    gradient = [0.0, 0.0] if entropy.grad is None else entropy.grad.tolist()
    return float((loss / weight).detach()), gradient, metrics


def test_the_loss_has_the_coefficient_of_the_present_step() -> None:
    objective = PpoClip(PpoClipConfig(entropy_coefficient=0.005, entropy=TARGET))
    assert objective.requires == {"entropy"}
    for coefficient, entropy in ((0.005, 0.1), (0.008, 0.3), (0.0, 0.1), (0.008, 0.1)):
        value, gradient, metrics = loss_and_gradient(objective)
        assert value == pytest.approx(-2.0 * coefficient, abs=1e-10)
        np.testing.assert_allclose(gradient, [-coefficient / 2] * 2, rtol=0, atol=1e-10)
        total, count = metrics["entropy_coefficient"]
        assert float(total / count) == pytest.approx(coefficient, abs=1e-10)
        objective.observe({"entropy": entropy})


def test_an_objective_says_whether_it_adapts() -> None:
    assert PpoClipConfig(entropy=EntropyTargetConfig(target=0.2)).adapts
    assert not PpoClipConfig(entropy_coefficient=0.01).adapts


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"target": 0.0}, "is not above 0"),
        ({"target": float("nan")}, "is not above 0"),
        ({"change": 0.0}, "is not above 0"),
        ({"smallest": -1.0}, "is no range of coefficients"),
        ({"smallest": 0.1, "largest": 0.05}, "is no range of coefficients"),
    ],
)
def test_a_target_that_cannot_be_followed_is_refused(
    fields: dict[str, float], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        EntropyTargetConfig(**fields)


def test_a_coefficient_that_begins_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0.5 is not in \[0.0, 0.005\]"):
        PpoClipConfig(entropy_coefficient=0.5, entropy=EntropyTargetConfig(target=0.2))
