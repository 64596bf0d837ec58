"""The critic's loss against numpy in float64, written from the papers alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gcore_algorithms.critic.config import ValueLossConfig
from gcore_algorithms.critic.loss import ValueLoss

from gcore_core.contract.errors import ConfigError

#: float64 sums of a few terms in another order.
EXACT = 1e-10


def states(seed: int = 0, records: int = 5) -> dict[str, np.ndarray]:
    """Makes the states of records of 0 to 4 actions; each record's last state is masked."""
    draw = np.random.default_rng(seed)
    lengths = np.arange(records) + 1
    record = np.repeat(np.arange(records), lengths)
    end = np.append(record[1:] != record[:-1], True)
    mask = ~end & (draw.random(len(record)) < 0.8)
    returns = np.where(mask, draw.normal(size=len(record)), 0.0)
    old = draw.normal(size=len(record))
    return {"record": record, "end": end, "mask": mask, "returns": returns, "old_values": old}


def defined(
    columns: dict[str, np.ndarray], values: np.ndarray, clip: float
) -> tuple[float, float, np.ndarray, float]:
    """(loss_sum, weight_sum, gradient of the mean, share beyond the clip), state by state.

    The derivative of max(a, b) is that of the larger one, and that of the clipped value is 0 once
    it is clipped.
    """
    loss = beyond = 0.0
    slopes = np.zeros(len(values))
    trained = [t for t, is_trained in enumerate(columns["mask"]) if is_trained]
    for t in trained:
        value, target = float(values[t]), float(columns["returns"][t])
        plain = (value - target) ** 2 / 2
        slope = value - target
        terms = plain
        if clip:
            old = float(columns["old_values"][t])
            clipped = min(max(value, old - clip), old + clip)
            beyond += abs(value - old) > clip
            if (clipped - target) ** 2 / 2 > plain:
                terms = (clipped - target) ** 2 / 2
                slope = 0.0
        loss += terms
        slopes[t] = slope
    return loss, float(len(trained)), slopes / len(trained), beyond / len(trained)


@pytest.mark.parametrize("clip", [0.0, 0.2, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_definition(clip: float, seed: int) -> None:
    columns = states(seed)
    draw = np.random.default_rng(10 + seed)
    values = columns["old_values"] + draw.normal(scale=0.4, size=len(columns["mask"]))
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    current = torch.from_numpy(values).requires_grad_()
    made = ValueLoss(ValueLossConfig(clip=clip))
    loss, weight, metrics = made.loss(tensors, {"values": current})
    (loss / weight).backward()
    expected, count, slopes, share = defined(columns, values, clip)
    assert current.grad is not None
    assert loss.item() == pytest.approx(expected, rel=EXACT, abs=EXACT)
    assert weight.item() == made.weight(tensors).item() == count
    np.testing.assert_allclose(current.grad.numpy(), slopes, rtol=EXACT, atol=EXACT)
    assert (slopes == 0).sum() < len(slopes)
    unclipped = defined(columns, values, 0.0)[0]
    assert metrics["value_loss"][0].item() == pytest.approx(unclipped, rel=EXACT)
    clipped, actions = metrics["value_clip_share"]
    assert clipped.item() / actions.item() == pytest.approx(share)


def test_states_that_are_not_trained_have_no_influence() -> None:
    columns = {name: torch.from_numpy(column) for name, column in states().items()}
    made = ValueLoss(ValueLossConfig())
    values = torch.linspace(-1, 1, len(columns["mask"]), dtype=torch.float64)
    wild = torch.where(columns["mask"], values, math.inf)
    one, other = (made.loss(columns, {"values": v})[0].item() for v in (values, wild))
    assert one == other


def test_a_micro_batch_without_a_trained_state_weighs_nothing() -> None:
    columns = {name: torch.from_numpy(column) for name, column in states(records=1).items()}
    values = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    loss, weight, _ = ValueLoss(ValueLossConfig()).loss(columns, {"values": values})
    assert (loss.item(), weight.item()) == (0.0, 0.0)
    assert loss.requires_grad


@pytest.mark.parametrize("clip", [-0.1, math.inf, math.nan])
def test_a_clip_that_is_no_distance_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="is no distance"):
        ValueLossConfig(clip=clip)
