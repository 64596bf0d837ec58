"""Losses over actions that older weights sampled equal loops in float64, written out here.

Tolerance 1e-12: the same sums in another order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gcore_algorithms import config as c
from gcore_algorithms.config import ObjectiveConfig
from gcore_algorithms.objectives import Cispo, Gspo, PolicyObjective, PpoClip, Sapo
from gcore_algorithms.proximal import interpolated_logp

from gcore_core.contract.traits import traits_of

KINDS: dict[str, tuple[type[PolicyObjective], type[ObjectiveConfig]]] = {
    "ppo_clip": (PpoClip, c.PpoClipConfig),
    "gspo": (Gspo, c.GspoConfig),
    "cispo": (Cispo, c.CispoConfig),
    "sapo": (Sapo, c.SapoConfig),
}
each_kind = pytest.mark.parametrize("kind", list(KINDS))
CLIP = (0.9, 1.15)
LENGTHS = (4, 1, 6, 3, 2, 5)
DECOUPLED: dict[str, Any] = {
    "old_logprobs": "interpolate",
    "correction": c.CorrectionConfig(kind="truncate", cap=1.1, floor=0.9),
}

Data = dict[str, torch.Tensor]
Loss = tuple[torch.Tensor, torch.Tensor]


def batch(seed: int = 0) -> Data:
    """Records whose actions get younger towards the end; some actions are masked, and all of one.

    The policy is up to a factor of 3 away from what sampled, and the trainer's before the step up
    to 2.
    """
    draw = torch.Generator().manual_seed(seed)
    record = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    actions = len(record)

    def noise(scale: float, count: int = actions) -> torch.Tensor:
        return scale * torch.randn(count, generator=draw, dtype=torch.float64)

    age = torch.cat(
        [
            torch.randint(0, 6, (length,), generator=draw).sort(descending=True).values
            for length in LENGTHS
        ]
    )
    mask = torch.rand(actions, generator=draw) < 0.8
    mask[record == 3] = False
    mask[:2] = True
    logp = noise(1.0) - 2.0
    old_logp = logp + noise(0.2)
    return {
        "record": record,
        "mask": mask,
        "advantage": noise(1.0, len(LENGTHS))[record],
        "age": age,
        "logp": logp,
        "old_logp": old_logp,
        "rollout_logp": old_logp + noise(0.3),
    }


def made(kind: str, **settings: Any) -> PolicyObjective:
    factory, config = KINDS[kind]
    return factory(config(**settings))


def called(objective: PolicyObjective, data: Data) -> tuple[Loss, dict[str, float]]:
    """Returns ((value, gradient by logp), means of the metrics) of a whole batch."""
    given = {"record", "mask", "advantage", "rollout_logp"} | objective.requires
    logp = data["logp"].clone().requires_grad_()
    columns = {name: data[name] for name in given}
    loss, weight, metrics = objective.loss(columns, {"logp": logp})
    assert float(objective.weight(columns)) == float(weight)
    value = loss / weight
    (gradient,) = torch.autograd.grad(value, logp)
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    return (value.detach(), gradient), means


def places_of(data: Data) -> list[list[int]]:
    """Returns the trained actions of each record that has any."""
    records = range(int(data["record"].max()) + 1)
    places = [
        [t for t in range(len(data["mask"])) if data["record"][t] == i and data["mask"][t]]
        for i in records
    ]
    return [one for one in places if one]


def proximal(data: Data, logp: Sequence[float]) -> list[float]:
    """Returns the log-prob of the proximal policy of each action, as in A-3PO."""
    found = []
    for t, now in enumerate(logp):
        age = int(data["age"][t])
        share = 1.0 if age == 0 else 1.0 / age
        found.append(share * float(data["rollout_logp"][t]) + (1.0 - share) * now)
    return found


def decoupled(data: Data, masks: Sequence[bool] = ()) -> Loss:
    """Returns the value and gradient of decoupled, clipped PPO, as a mean over actions.

    -min(r A, [r] A) w of each action, where r = policy / proximal policy and w = proximal policy /
    rollout, which is truncated.

    masks: of each action, whether it has weight 0 and still counts.
    """
    logp = data["logp"].clone().requires_grad_()
    before = proximal(data, logp.detach().tolist())
    losses = []
    for places in places_of(data):
        for t in places:
            ratio = torch.exp(logp[t] - before[t])
            weight = min(max(math.exp(before[t] - float(data["rollout_logp"][t])), 0.9), 1.1)
            if masks and masks[t]:
                weight = 0.0
            advantage = data["advantage"][t]
            clipped = torch.clamp(ratio, *CLIP)
            losses.append(-weight * torch.minimum(ratio * advantage, clipped * advantage))
    value = sum(losses, torch.zeros((), dtype=torch.float64)) / len(losses)
    (gradient,) = torch.autograd.grad(value, logp)
    return value.detach(), gradient


def assert_same(actual: Loss, expected: Loss) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


CLIPPED = {"clip_low": 1 - CLIP[0], "clip_high": CLIP[1] - 1}

# -- interpolated ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_an_interpolated_loss_is_that_of_decoupled_ppo(seed: int) -> None:
    data = batch(seed)
    actual, metrics = called(made("ppo_clip", **CLIPPED, **DECOUPLED), data)
    assert_same(actual, decoupled(data))
    assert 0 < metrics["clip_share"] < 1, "no clip binds"
    assert 0 < metrics["correction_share"] < 1, "no weight is truncated"


def test_the_proximal_policy_is_a_step_from_the_policy_and_the_others_from_the_rollout() -> None:
    """Of age d the way from the rollout to the policy has d steps; all but one are taken."""
    age = torch.tensor([0, 1, 2, 4, 10])
    rollout = torch.full((5,), -3.0, dtype=torch.float64)
    policy = torch.full((5,), -1.0, dtype=torch.float64)
    found = interpolated_logp(age, rollout, policy)
    expected = torch.tensor([-3.0, -3.0, -2.0, -1.5, -1.2], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)
    assert not found.requires_grad


@each_kind
def test_nothing_flows_back_through_what_is_interpolated(kind: str) -> None:
    """The gradient is that of a loss whose proximal log-probs and weights are given numbers."""
    data = batch(1)
    settings = {"normalise": "token", "correction": DECOUPLED["correction"]}
    actual, _ = called(made(kind, **settings, old_logprobs="interpolate"), data)
    before = torch.tensor(proximal(data, data["logp"].tolist()), dtype=torch.float64)
    given = {**data, "old_logp": before}
    expected, _ = called(made(kind, **settings, old_logprobs="recompute"), given)
    assert_same(actual, expected)


def test_the_gradient_is_that_of_differences_where_the_proximal_policy_stays() -> None:
    """In float64, by central differences of the loss of each action's log-prob."""
    data = batch(2)
    before = torch.tensor(proximal(data, data["logp"].tolist()), dtype=torch.float64)
    settings = {**CLIPPED, "correction": DECOUPLED["correction"]}
    fixed = made("ppo_clip", **settings, old_logprobs="recompute")
    (_, gradient), _ = called(made("ppo_clip", **CLIPPED, **DECOUPLED), data)
    step = 1e-6
    for t in range(len(data["logp"])):
        values = []
        for sign in (1.0, -1.0):
            moved = data["logp"].clone()
            moved[t] += sign * step
            values.append(float(called(fixed, {**data, "logp": moved, "old_logp": before})[0][0]))
        assert float(gradient[t]) == pytest.approx((values[0] - values[1]) / 2 / step, abs=1e-8)


@each_kind
@pytest.mark.parametrize("age", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_actions_of_age_0_and_1_are_those_of_rollout_to_the_last_bit(
    kind: str, age: int, dtype: torch.dtype
) -> None:
    data = batch(3)
    for name in ("advantage", "logp", "old_logp", "rollout_logp"):
        data[name] = data[name].to(dtype)
    data["age"].fill_(age)
    (value, gradient), metrics = called(made(kind, **DECOUPLED), data)
    expected, plain = called(made(kind, old_logprobs="rollout"), data)
    assert torch.equal(value, expected[0]) and torch.equal(gradient, expected[1])
    assert metrics.pop("correction_weight") == 1.0 and metrics.pop("correction_share") == 0.0
    assert metrics == plain


def test_an_action_that_the_policy_cannot_draw_any_more_has_a_finite_loss() -> None:
    data = batch(4)
    data["logp"] = data["rollout_logp"] - 1000.0
    (value, gradient), metrics = called(made("ppo_clip", **DECOUPLED), data)
    assert bool(value.isfinite()) and bool(gradient.isfinite().all())
    assert metrics["log_ratio_clamped"] == 1.0


# -- masked by age ---------------------------------------------------------------------------------


def stale(
    data: Data, policy: torch.Tensor, older_than: int, floor: float, cap: float
) -> list[bool]:
    """Returns of each action whether its record is old and far away."""
    masks = [False] * len(data["mask"])
    for places in places_of(data):
        oldest = max(int(data["age"][t]) for t in places)
        apart = [float(policy[t] - data["rollout_logp"][t]) for t in places]
        mean = math.exp(sum(apart) / len(apart))
        if oldest > older_than and not floor <= mean <= cap:
            for t in places:
                masks[t] = True
    return masks


@pytest.mark.parametrize("older_than", [0, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_masked_loss_leaves_out_records_that_are_old_and_far_away(
    seed: int, older_than: int
) -> None:
    """They still count in the mean."""
    data = batch(seed)
    mask = c.StaleMaskConfig(older_than=older_than, floor=0.95, cap=1.05)
    actual, metrics = called(made("ppo_clip", **CLIPPED, **DECOUPLED, stale_mask=mask), data)
    masks = stale(data, data["logp"], older_than, 0.95, 1.05)
    assert_same(actual, decoupled(data, masks))
    share = sum(masks) / int(data["mask"].sum())
    assert metrics["stale_masked_share"] == pytest.approx(share)


def test_the_cases_of_a_mask_bind_and_do_not() -> None:
    """Of the batches above, some have records that are masked, and all have some that are not."""
    shares = [
        sum(stale(data, data["logp"], older_than, 0.95, 1.05)) / int(data["mask"].sum())
        for data, older_than in itertools.product(map(batch, range(3)), [0, 2, 3, 4])
    ]
    assert max(shares) > 0.3
    assert min(shares) < max(shares) < 1


@each_kind
@pytest.mark.parametrize(
    ("old_logprobs", "policy"),
    [("rollout", "logp"), ("interpolate", "logp"), ("recompute", "old_logp")],
)
@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_a_mask_is_a_loss_whose_masked_advantages_are_0(
    kind: str, old_logprobs: str, policy: str, normalise: str
) -> None:
    """The policy is compared as it was before the step where that is known."""
    data = batch(5)
    correction = {"kind": "none"} if old_logprobs == "rollout" else {"kind": "truncate"}
    settings = {
        "old_logprobs": old_logprobs,
        "normalise": normalise,
        "constant_length": 5,
        "correction": c.CorrectionConfig(**correction),  # type: ignore[arg-type]
    }
    mask = c.StaleMaskConfig(older_than=2, floor=0.95, cap=1.05)
    actual, _ = called(made(kind, **settings, stale_mask=mask), data)
    masks = torch.tensor(stale(data, data[policy], 2, 0.95, 1.05))
    assert 0 < int(masks.sum()) < int(data["mask"].sum())
    level = {**data, "advantage": data["advantage"].masked_fill(masks, 0.0)}
    assert_same(actual, called(made(kind, **settings), level)[0])


def test_a_young_record_is_not_masked_however_far_away_and_a_near_one_however_old() -> None:
    data = batch(6)
    settings = c.StaleMaskConfig(older_than=3)
    objective = made("ppo_clip", stale_mask=settings)
    data["rollout_logp"] = data["logp"] - 5.0
    young = {**data, "age": torch.full_like(data["age"], 3)}
    assert called(objective, young)[1]["stale_masked_share"] == 0.0
    old = {**data, "age": torch.full_like(data["age"], 4)}
    assert called(objective, old)[1]["stale_masked_share"] == 1.0
    near = {**old, "rollout_logp": data["logp"] + 0.5}
    assert called(objective, near)[1]["stale_masked_share"] == 0.0


def test_the_age_of_an_action_that_is_not_trained_on_does_not_count() -> None:
    data = batch(7)
    data["rollout_logp"] = data["logp"] - 5.0
    data["age"] = torch.where(data["mask"], 0, 9)
    objective = made("ppo_clip", stale_mask=c.StaleMaskConfig(older_than=3))
    assert called(objective, data)[1]["stale_masked_share"] == 0.0


# -- settings --------------------------------------------------------------------------------------


@each_kind
def test_only_losses_that_weigh_by_age_ask_for_it(kind: str) -> None:
    assert made(kind).requires == frozenset()
    assert made(kind, **DECOUPLED).requires == {"age"}
    assert made(kind, stale_mask=c.StaleMaskConfig(older_than=2)).requires == {"age"}


@each_kind
def test_an_interpolated_loss_takes_stale_actions(kind: str) -> None:
    config = KINDS[kind][1]
    assert traits_of(config(**DECOUPLED)).takes_stale
    mask = c.StaleMaskConfig(older_than=2)
    assert not traits_of(config(old_logprobs="recompute", stale_mask=mask)).takes_stale, (
        "a mask corrects nothing"
    )
