"""Losses and gradients equal numpy written from the papers alone, in float64.

References go over pairs and records in plain loops, with gradients derived by hand. They sum in
another order than the objectives, and 1e-10 is a thousand times what that rounds to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gcore_algorithms.offline.config import BradleyTerryConfig, DpoConfig, ScalarConfig, SftConfig
from gcore_algorithms.offline.objectives import BradleyTerry, Dpo, Scalar, Sft

from gcore_core.contract.errors import ConfigError, DataError

TOLERANCE = 1e-10
#: Lengths of the answers of five pairs; the last one is of one token each.
LENGTHS = (4, 7, 1, 3, 9, 2, 6, 5, 1, 1)


@pytest.fixture
def columns() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    record = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    mask = draw.random(len(record)) < 0.7
    mask[np.r_[0, np.flatnonzero(np.diff(record)) + 1]] = True  # one trained token an answer
    end = np.r_[np.diff(record) != 0, True]
    return {
        "record": record,
        "group": record // 2,
        "sample": record % 2,
        "mask": mask,
        "end": end,
        "label": draw.normal(size=len(LENGTHS))[record] ** 2,
        "rollout_logp": np.zeros(len(record)),
        "ref_logp": draw.normal(-2.0, 1.0, len(record)),
        "logp": draw.normal(-2.0, 1.5, len(record)),
        "values": draw.normal(0.0, 2.0, len(record)),
    }


def of_torch(
    objective: Any, columns: dict[str, np.ndarray], output: str
) -> tuple[float, np.ndarray]:
    """Returns loss_sum / weight_sum and its gradient by the output, float64[A]."""
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    leaf = tensors.pop(output).clone().requires_grad_()
    total, weight, _ = objective.loss(tensors, {output: leaf})
    assert float(objective.weight(tensors)) == float(weight)
    (total / weight).backward()
    assert leaf.grad is not None
    return float((total / weight).detach()), leaf.grad.numpy()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


# -- supervised fine-tuning ------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", ["token", "record"])
def test_sft_is_the_mean_negative_logprob_of_trained_tokens(
    columns: dict[str, np.ndarray], normalise: Any
) -> None:
    value, gradient = of_torch(Sft(SftConfig(normalise=normalise)), columns, "logp")
    total, slopes = 0.0, np.zeros(len(gradient))
    trained_tokens = columns["mask"].sum()
    for record in range(len(LENGTHS)):
        places = np.flatnonzero((columns["record"] == record) & columns["mask"])
        share = 1 / trained_tokens if normalise == "token" else 1 / len(places) / len(LENGTHS)
        for place in places:
            total -= share * columns["logp"][place]
            slopes[place] = -share
    assert value == pytest.approx(total, abs=TOLERANCE)
    np.testing.assert_allclose(gradient, slopes, atol=TOLERANCE, rtol=0)


# -- direct preference optimisation ----------------------------------------------------------------


def dpo_in_numpy(
    columns: dict[str, np.ndarray], of_ratio: Callable[[float], tuple[float, float]], average: bool
) -> tuple[float, np.ndarray]:
    """Returns mean loss and gradient; ``of_ratio`` gives a pair's loss and its derivative by h."""
    pairs = len(LENGTHS) // 2
    total, slopes = 0.0, np.zeros(len(columns["logp"]))
    for pair in range(pairs):
        ratio = 0.0
        for answer, sign in ((0, 1.0), (1, -1.0)):
            places = np.flatnonzero((columns["record"] == 2 * pair + answer) & columns["mask"])
            scale = sign / (len(places) if average else 1)
            for place in places:
                ratio += scale * (columns["logp"][place] - columns["ref_logp"][place])
                slopes[place] = scale
        loss, slope = of_ratio(ratio)
        total += loss / pairs
        slopes[columns["group"] == pair] *= slope / pairs
    return total, slopes


def dpo_of(variant: str, beta: float, smoothing: float) -> Callable[[float], tuple[float, float]]:
    def of_ratio(h: float) -> tuple[float, float]:
        z = beta * h
        if variant == "hinge":
            return max(0.0, 1 - z), (-beta if z < 1 else 0.0)
        if variant == "ipo":
            return (h - 1 / (2 * beta)) ** 2, 2 * (h - 1 / (2 * beta))
        loss = (1 - smoothing) * softplus(-z) + smoothing * softplus(z)
        return loss, beta * (-(1 - smoothing) * sigmoid(-z) + smoothing * sigmoid(z))

    return of_ratio


@pytest.mark.parametrize("average", [False, True], ids=["summed", "length-normalised"])
@pytest.mark.parametrize(
    ("variant", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)]
)
@pytest.mark.parametrize("beta", [0.1, 1.5])
def test_dpo_is_the_papers_loss_of_each_pair(
    columns: dict[str, np.ndarray], variant: Any, smoothing: float, beta: float, average: bool
) -> None:
    config = DpoConfig(
        variant=variant, beta=beta, label_smoothing=smoothing, length_normalised=average
    )
    value, gradient = of_torch(Dpo(config), columns, "logp")
    expected = dpo_in_numpy(columns, dpo_of(variant, beta, smoothing), average)
    assert value == pytest.approx(expected[0], abs=TOLERANCE)
    np.testing.assert_allclose(gradient, expected[1], atol=TOLERANCE, rtol=0)
    assert np.abs(gradient).max() > 1e-3


def test_a_policy_that_is_the_reference_has_no_margin(columns: dict[str, np.ndarray]) -> None:
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    tensors["ref_logp"] = tensors["logp"]
    total, weight, metrics = Dpo(DpoConfig()).loss(tensors, {"logp": tensors["logp"]})
    assert float(total / weight) == pytest.approx(math.log(2), abs=TOLERANCE)
    assert float(metrics["rewards/margin"][0]) == 0
    assert float(metrics["rewards/accuracy"][0]) == 0


def test_metrics_of_pairs_are_means_over_pairs(columns: dict[str, np.ndarray]) -> None:
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    metrics = Dpo(DpoConfig(beta=0.3)).loss(tensors, {"logp": tensors["logp"]})[2]
    rewards = np.zeros((len(LENGTHS) // 2, 2))
    for place in np.flatnonzero(columns["mask"]):
        advance = columns["logp"][place] - columns["ref_logp"][place]
        rewards[columns["group"][place], columns["sample"][place]] += 0.3 * advance
    expected = {
        "rewards/chosen": rewards[:, 0].mean(),
        "rewards/rejected": rewards[:, 1].mean(),
        "rewards/margin": (rewards[:, 0] - rewards[:, 1]).mean(),
        "rewards/accuracy": (rewards[:, 0] > rewards[:, 1]).mean(),
    }
    for name, mean in expected.items():
        value, weight = metrics[name]
        assert float(value / weight) == pytest.approx(mean, abs=TOLERANCE), name


# -- reward models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("centring", [0.0, 0.05])
@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_bradley_terry_is_the_papers_loss_of_each_pair(
    columns: dict[str, np.ndarray], margin: float, centring: float
) -> None:
    objective = BradleyTerry(BradleyTerryConfig(margin=margin, centring=centring))
    value, gradient = of_torch(objective, columns, "values")
    ends = np.flatnonzero(columns["end"])
    pairs = len(LENGTHS) // 2
    total, slopes = 0.0, np.zeros(len(gradient))
    for pair in range(pairs):
        chosen, rejected = ends[2 * pair], ends[2 * pair + 1]
        rewards = columns["values"][chosen], columns["values"][rejected]
        wanted = rewards[0] - rewards[1] - margin * columns["label"][chosen]
        total += (softplus(-wanted) + centring * sum(rewards) ** 2) / pairs
        slope = -sigmoid(-wanted)
        slopes[chosen] = (slope + 2 * centring * sum(rewards)) / pairs
        slopes[rejected] = (-slope + 2 * centring * sum(rewards)) / pairs
    assert value == pytest.approx(total, abs=TOLERANCE)
    np.testing.assert_allclose(gradient, slopes, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("loss", ["square", "logistic"])
@pytest.mark.parametrize("centring", [0.0, 0.05])
def test_a_scalar_reward_is_drawn_to_its_score(
    columns: dict[str, np.ndarray], loss: Any, centring: float
) -> None:
    columns["label"] = np.clip(columns["label"], 0, 1)
    value, gradient = of_torch(
        Scalar(ScalarConfig(loss=loss, centring=centring)), columns, "values"
    )
    total, slopes = 0.0, np.zeros(len(gradient))
    for end in np.flatnonzero(columns["end"]):
        reward, score = columns["values"][end], columns["label"][end]
        if loss == "square":
            term, slope = (reward - score) ** 2 / 2, reward - score
        else:
            term = score * softplus(-reward) + (1 - score) * softplus(reward)
            slope = sigmoid(reward) - score
        total += (term + centring * reward**2) / len(LENGTHS)
        slopes[end] = (slope + 2 * centring * reward) / len(LENGTHS)
    assert value == pytest.approx(total, abs=TOLERANCE)
    np.testing.assert_allclose(gradient, slopes, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("score", [-0.5, 5.0])
def test_a_score_that_is_no_probability_is_refused_by_the_logistic_loss(
    columns: dict[str, np.ndarray], score: float
) -> None:
    """It would have no least value, and rewards would grow without limit."""
    columns["label"] = np.full(len(columns["label"]), score)
    with pytest.raises(DataError, match=f"the score {score:g} of a row is no probability"):
        of_torch(Scalar(ScalarConfig(loss="logistic")), columns, "values")


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta: must be positive"),
        ({"beta": math.inf}, "beta: must be positive"),
        ({"label_smoothing": 0.5}, "label_smoothing: must be at least 0 and below 0.5"),
        ({"variant": "ipo", "label_smoothing": 0.1}, "no meaning for the variant ipo"),
    ],
)
def test_settings_of_dpo_that_mean_nothing_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DpoConfig(**settings)


def test_a_negative_margin_or_centring_is_refused() -> None:
    with pytest.raises(ConfigError, match="margin"):
        BradleyTerryConfig(margin=-1.0)
    with pytest.raises(ConfigError, match="centring"):
        ScalarConfig(centring=-0.1)
