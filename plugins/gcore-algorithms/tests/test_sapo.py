"""SAPO equals numpy loops written from its paper, values and gradients; its gate is the paper's.

Tolerance 1e-10 in float64: the gradients are written out by hand, in another order of operations.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gcore_algorithms.config import SapoConfig
from gcore_algorithms.objectives import Sapo

from gcore_core.contract.errors import ConfigError

LENGTHS = (4, 1, 6, 3)


def batch(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    record = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    logp = draw.normal(-2.0, 1.0, len(record))
    return {
        "record": record,
        "mask": draw.random(len(record)) < 0.8,
        "advantage": draw.normal(0.0, 1.0, len(LENGTHS))[record],
        "logp": logp,
        "rollout_logp": logp + draw.normal(0.0, 0.7, len(record)),
    }


def call(config: SapoConfig, data: dict[str, np.ndarray]) -> tuple[float, np.ndarray, dict]:
    columns = {name: torch.from_numpy(values) for name, values in data.items() if name != "logp"}
    logp = torch.from_numpy(data["logp"]).requires_grad_()
    loss, weight, metrics = Sapo(config).loss(columns, {"logp": logp})
    (loss / weight).backward()
    gradient = logp.grad
    assert gradient is not None
    return float((loss / weight).detach()), gradient.numpy(), metrics


def of_the_paper(
    data: dict[str, np.ndarray], positive: float, negative: float
) -> tuple[float, np.ndarray]:
    """The loss, the mean over records of the mean over actions, and its gradient by log-probs."""
    records = [r for r in range(len(LENGTHS)) if data["mask"][data["record"] == r].any()]
    value = 0.0
    gradient = np.zeros(len(data["record"]))
    for r in records:
        places = [t for t in np.flatnonzero(data["record"] == r) if data["mask"][t]]
        for t in places:
            share = 1.0 / (len(records) * len(places))
            ratio = math.exp(data["logp"][t] - data["rollout_logp"][t])
            advantage = data["advantage"][t]
            tau = positive if advantage > 0 else negative
            p = 1.0 / (1.0 + math.exp(-tau * (ratio - 1.0)))
            value -= share * 4.0 / tau * p * advantage
            # d/dlogp of 4 / tau x sigmoid(tau (r - 1)) is 4 p (1 - p) r
            gradient[t] = -share * 4.0 * p * (1.0 - p) * ratio * advantage
    return value, gradient


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (0.5, 3.0)])
def test_sapo_equals_the_papers_formula_and_its_gradient(
    seed: int, positive: float, negative: float
) -> None:
    data = batch(seed)
    config = SapoConfig(temperature_positive=positive, temperature_negative=negative)
    value, gradient, _ = call(config, data)
    expected, expected_gradient = of_the_paper(data, positive, negative)
    np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-10, atol=1e-10)


def test_the_defaults_are_the_papers() -> None:
    config = SapoConfig()
    assert (config.temperature_positive, config.temperature_negative) == (1.0, 1.05)
    assert config.normalise == "sequence"


def gradient_at(ratio: float, advantage: float, config: SapoConfig) -> float:
    """By how much a step raises the log-prob of the only action."""
    data = {
        "record": np.zeros(1, np.int64),
        "mask": np.ones(1, bool),
        "advantage": np.array([advantage]),
        "logp": np.array([math.log(ratio)]),
        "rollout_logp": np.zeros(1),
    }
    return -float(call(config, data)[1][0])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("tau", [0.3, 1.0, 7.0])
def test_on_policy_the_gradient_is_the_policy_gradient_at_any_temperature(
    advantage: float, tau: float
) -> None:
    config = SapoConfig(temperature_positive=tau, temperature_negative=tau)
    assert gradient_at(1.0, advantage, config) == pytest.approx(advantage, abs=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gradient_fades_as_the_ratio_grows_and_is_nowhere_cut_off(advantage: float) -> None:
    config = SapoConfig(temperature_positive=4.0, temperature_negative=4.0)
    sizes = [abs(gradient_at(ratio, advantage, config)) for ratio in (1.0, 1.5, 2.0, 3.0, 5.0)]
    assert all(later < earlier for earlier, later in zip(sizes, sizes[1:], strict=False))
    assert sizes[-1] > 0


def test_the_hotter_negative_gate_closes_faster() -> None:
    config = SapoConfig(temperature_positive=1.0, temperature_negative=3.0)
    assert abs(gradient_at(2.0, -1.0, config)) < abs(gradient_at(2.0, 1.0, config))


def test_the_gate_metric_is_the_mean_share_of_the_gradient_that_is_let_through() -> None:
    data = batch(0)
    _, _, metrics = call(SapoConfig(), data)
    kept = [t for t in range(len(data["mask"])) if data["mask"][t]]
    gates = []
    for t in kept:
        tau = 1.0 if data["advantage"][t] > 0 else 1.05
        p = 1.0 / (1.0 + math.exp(-tau * (math.exp(data["logp"][t] - data["rollout_logp"][t]) - 1)))
        gates.append(4 * p * (1 - p))
    total, count = metrics["gate"]
    assert float(total / count) == pytest.approx(np.mean(gates), abs=1e-10)


@pytest.mark.parametrize("name", ["temperature_positive", "temperature_negative"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="is not above 0"):
        SapoConfig(**{name: value})
