"""Objectives equal slow loops written from the papers, and do not depend on how an update was
split.

Everything is float64; tolerance 1e-12: the same sums in another order.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from gcore_algorithms import config as c
from gcore_algorithms import corrections, objectives
from gcore_algorithms import kl as kl_module
from gcore_algorithms.kl import kl
from gcore_algorithms.objectives import Cispo, Gspo, PpoClip, Sapo

KINDS = {
    "ppo_clip": (PpoClip, c.PpoClipConfig),
    "gspo": (Gspo, c.GspoConfig),
    "cispo": (Cispo, c.CispoConfig),
    "sapo": (Sapo, c.SapoConfig),
}
BOUNDS = {
    "ppo_clip": {"clip_low": 0.1, "clip_high": 0.15},
    "gspo": {"clip_low": 0.02, "clip_high": 0.03},
    "cispo": {"clip_low": 0.25, "clip_high": 0.3},
    "sapo": {"temperature_positive": 1.3, "temperature_negative": 2.1},
}
NORMALISE = ["token", "sequence", "constant"]
CORRECTIONS = [
    ("none", "token"),
    *itertools.product(("truncate", "mask"), ("token", "sequence", "geometric")),
]
each_kind = pytest.mark.parametrize("kind", list(KINDS))
each_normalisation = pytest.mark.parametrize("normalise", NORMALISE)
CURRENT = ("logp", "entropy")


def configs(kind: str, normalise: str):
    """Every combination of terms, with bounds that bind on some of ``batch``'s actions and not on
    others.
    """
    estimators, entropies = (None, "k1", "k2", "k3"), (0.0, 0.02)
    for estimator, entropy, (correction, level) in itertools.product(
        estimators, entropies, CORRECTIONS
    ):
        extra = {"dual_clip": 1.5} if kind == "ppo_clip" and entropy else {}
        yield KINDS[kind][1](
            normalise=normalise,
            constant_length=5 if normalise == "constant" else None,
            kl=c.LossKlConfig(coefficient=0.1, estimator=estimator)
            if estimator
            else c.LossKlConfig(),
            entropy_coefficient=entropy,
            old_logprobs="rollout" if correction == "none" and entropy else "recompute",
            correction=c.CorrectionConfig(kind=correction, level=level, cap=1.2, floor=0.8),
            **BOUNDS[kind],
            **extra,
        )


def batch(seed: int = 0, lengths: tuple[int, ...] = (4, 1, 6, 3, 2, 5)) -> dict[str, torch.Tensor]:
    """Every column and output. Some actions are masked, and all of record 3."""
    g = torch.Generator().manual_seed(seed)
    record = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    n = len(record)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(n, generator=g, dtype=torch.float64)

    mask = torch.rand(n, generator=g) < 0.8
    mask[record == 3] = False
    mask[:2] = True
    logp = noise(1.0) - 2.0
    old_logp = logp + noise(0.3)
    return {
        "record": record,
        "mask": mask,
        "advantage": torch.randn(len(lengths), generator=g, dtype=torch.float64)[record],
        "old_logp": old_logp,
        "rollout_logp": old_logp + noise(0.3),
        "ref_logp": logp + noise(0.5),
        "logp": logp,
        "entropy": noise(0.1).abs() + 1.0,
    }


def leaves(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**data, **{name: data[name].clone().requires_grad_() for name in CURRENT}}


def call(objective, data, index=None):
    """``objective`` on the actions ``index``, given only what it requires; records are numbered
    anew.
    """
    part = data if index is None else {name: values[index] for name, values in data.items()}
    part = {**part, "record": torch.unique(part["record"], return_inverse=True)[1]}
    given = {"record", "mask", "advantage", "rollout_logp"} | objective.requires
    columns = {
        name: values for name, values in part.items() if name in given and name not in CURRENT
    }
    current = {name: part[name] for name in CURRENT if name == "logp" or name in objective.requires}
    return objective.loss(columns, current)


def value_and_gradient(objective, data, parts=(None,)):
    """sum(loss) / sum(weight) over the parts, its gradients by logp and entropy, and the mean of
    each metric.
    """
    data = leaves(data)
    results = [call(objective, data, part) for part in parts]
    value = sum(r[0] for r in results) / sum(r[1] for r in results)
    value.backward()
    gradients = [
        g if (g := data[name].grad) is not None else torch.zeros_like(data[name])
        for name in CURRENT
    ]
    metrics = {
        name: sum(r[2][name][0] for r in results) / sum(r[2][name][1] for r in results)
        for name in results[0][2]
    }
    return value.detach(), gradients, metrics


def assert_same(got, expected):
    for a, b in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    if len(got) > 2 and len(expected) > 2:
        assert got[2].keys() == expected[2].keys()
        for name in got[2]:
            torch.testing.assert_close(got[2][name], expected[2][name], rtol=1e-12, atol=1e-12)


# -- against the papers ----------------------------------------------------------------------------


def clip(x, low, high):
    return torch.minimum(torch.maximum(x, x.new_tensor(low)), x.new_tensor(high))


def gains(kind, config, ratios, advantages, logps):
    """Gain of each action of one record, as in PPO Eq. 7 (with dual clip), GSPO Eqs. 5, 7 and 14,
    CISPO Eqs. 4, 5, and SAPO.
    """
    if kind == "sapo":
        taus = [
            config.temperature_positive if a > 0 else config.temperature_negative
            for a in advantages
        ]
        return [
            4 / tau / (1 + torch.exp(-tau * (r - 1))) * a
            for r, a, tau in zip(ratios, advantages, taus, strict=True)
        ]
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if kind == "cispo":
        return [
            clip(r, low, high).detach() * a * lp
            for r, a, lp in zip(ratios, advantages, logps, strict=True)
        ]
    if kind == "gspo":
        product = torch.ones((), dtype=torch.float64)
        for r in ratios:
            product = product * r
        s = product ** (1 / len(ratios))
        shares = [s] * len(ratios)
        if config.correction.kind != "none" and config.correction.level == "token":
            shares = [
                s.detach() * r / r.detach() for r in ratios
            ]  # weights differ by action: GSPO-token
        return [
            torch.minimum(x * a, clip(x, low, high) * a)
            for x, a in zip(shares, advantages, strict=True)
        ]
    clipped = []
    for r, a in zip(ratios, advantages, strict=True):
        gain = torch.minimum(r * a, clip(r, low, high) * a)
        if config.dual_clip is not None and a < 0:
            gain = torch.maximum(gain, config.dual_clip * a)
        clipped.append(gain)
    return clipped


def weights(correction, log_weights):
    """One weight per action of a record."""
    if correction.kind == "none":
        return [1.0] * len(log_weights)
    total = sum(log_weights)
    shared = {"sequence": total, "geometric": total / len(log_weights)}
    raw = [torch.exp(shared.get(correction.level, w)) for w in log_weights]
    if correction.kind == "truncate":
        return [min(max(float(w), correction.floor), correction.cap) for w in raw]
    return [float(w) if correction.floor <= w <= correction.cap else 0.0 for w in raw]


def penalty(estimator, d):
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[estimator]


def reference(kind, config, data):
    """Value and gradients from loops over records and actions."""
    data = leaves(data)
    behaviour = data["old_logp"] if config.old_logprobs == "recompute" else data["rollout_logp"]
    per_record = []
    for record in data["record"].unique():
        chosen = [
            t for t in range(len(data["mask"])) if data["record"][t] == record and data["mask"][t]
        ]
        if not chosen:
            continue
        ratios = [torch.exp(data["logp"][t] - behaviour[t]) for t in chosen]
        gain = gains(
            kind,
            config,
            ratios,
            [data["advantage"][t] for t in chosen],
            [data["logp"][t] for t in chosen],
        )
        weight = weights(
            config.correction, [data["old_logp"][t] - data["rollout_logp"][t] for t in chosen]
        )
        losses = []
        for t, g, w in zip(chosen, gain, weight, strict=True):
            loss = -w * g - config.entropy_coefficient * data["entropy"][t]
            if config.kl.coefficient:
                loss = loss + 0.1 * penalty(
                    config.kl.estimator, data["logp"][t] - data["ref_logp"][t]
                )
            losses.append(loss)
        per_record.append(losses)
    n = len(per_record)
    if config.normalise == "token":
        value = sum(sum(losses) for losses in per_record) / sum(
            len(losses) for losses in per_record
        )
    elif config.normalise == "sequence":
        value = sum(sum(losses) / len(losses) for losses in per_record) / n
    else:
        value = sum(sum(losses) for losses in per_record) / (n * config.constant_length)
    value.backward()
    return value.detach(), [
        g if (g := data[name].grad) is not None else data[name] * 0 for name in CURRENT
    ]


@each_kind
@each_normalisation
def test_an_objective_equals_the_papers_formula(kind, normalise):
    data = batch()
    for config in configs(kind, normalise):
        objective = KINDS[kind][0](config)
        value, gradients, _ = value_and_gradient(objective, data)
        expected, expected_gradients = reference(kind, config, data)
        assert_same((value, gradients), (expected, [g.detach() for g in expected_gradients]))


# -- invariances -----------------------------------------------------------------------------------


def splits(record: torch.Tensor) -> list[list[torch.Tensor]]:
    """Ways to spread the records over ranks and micro-batches; actions of micro-batches lie in
    other orders, too.
    """
    rng = random.Random(0)
    records = record.unique().tolist()

    def actions(chosen: list[int]) -> torch.Tensor:
        return torch.cat(
            [(record == r).nonzero().squeeze(1) for r in chosen]
            or [torch.zeros(0, dtype=torch.long)]
        )

    shuffled = rng.sample(records, len(records))
    halves = [actions(shuffled[0::2]), actions(shuffled[1::2])]
    ranks = [
        actions(shuffled[:1]),
        actions(shuffled[1:5]),
        actions(shuffled[5:]),
        actions([]),
    ]  # one rank has none
    mixed = torch.tensor(rng.sample(range(len(record)), len(record)))
    return [[actions([r]) for r in records], [actions(records[::-1])], halves, ranks, [mixed]]


@each_kind
@each_normalisation
def test_value_gradient_and_metrics_do_not_depend_on_the_split(kind, normalise):
    data = batch(1)
    for config in configs(kind, normalise):
        objective = KINDS[kind][0](config)
        whole = value_and_gradient(objective, data)
        for parts in splits(data["record"]):
            assert_same(value_and_gradient(objective, data, parts), whole)


@each_kind
@each_normalisation
def test_masked_actions_have_no_influence(kind, normalise):
    data = batch(2)
    wild = {
        name: values.masked_fill(~data["mask"], float("nan"))
        if values.is_floating_point()
        else values
        for name, values in data.items()
    }
    kept = {name: values[data["mask"]] for name, values in data.items()}
    for config in configs(kind, normalise):
        objective = KINDS[kind][0](config)
        value, gradients, metrics = value_and_gradient(objective, wild)
        tame = value_and_gradient(objective, data)
        assert torch.equal(value, tame[0])
        assert metrics == tame[2]
        for gradient, tame_gradient in zip(gradients, tame[1], strict=True):
            assert torch.equal(gradient, tame_gradient)
            assert not gradient[~data["mask"]].any()
        without = value_and_gradient(objective, kept)
        assert_same((value, [g[data["mask"]] for g in gradients], metrics), without)


@each_kind
@each_normalisation
def test_a_micro_batch_without_trained_actions_weighs_nothing(kind, normalise):
    data = leaves(batch())
    for config in configs(kind, normalise):
        for part in (torch.zeros(0, dtype=torch.long), (data["record"] == 3).nonzero().squeeze(1)):
            loss, weight, metrics = call(KINDS[kind][0](config), data, part)
            loss.backward()  # a rank without records still takes part in the backward pass
            assert (loss.item(), weight.item()) == (0.0, 0.0)
            assert all(float(value) == float(count) == 0.0 for value, count in metrics.values())


@each_kind
@each_normalisation
def test_only_the_loss_carries_a_gradient(kind, normalise):
    for config in configs(kind, normalise):
        loss, weight, metrics = call(KINDS[kind][0](config), leaves(batch()))
        assert loss.requires_grad and not weight.requires_grad
        assert loss.shape == weight.shape == ()
        for pair in metrics.values():
            assert all(
                x.shape == () and x.dtype == loss.dtype and not x.requires_grad for x in pair
            )


# -- single terms ----------------------------------------------------------------------------------


def test_on_policy_every_surrogate_gives_the_policy_gradient():
    data = batch(lengths=(3, 5, 2))
    data["mask"] = torch.ones_like(data["mask"])
    data["rollout_logp"] = data["logp"].clone()
    for kind, (objective, config) in KINDS.items():
        _, (gradient, _), metrics = value_and_gradient(objective(config(normalise="token")), data)
        torch.testing.assert_close(
            gradient, -data["advantage"] / 10, rtol=1e-12, atol=1e-12, msg=kind
        )
        assert float(metrics["ratio"]) == pytest.approx(1.0, abs=1e-12)
        assert float(metrics["clip_share"]) == 0.0
        assert float(metrics["kl_behaviour"]) == pytest.approx(0.0, abs=1e-12)


def test_clip_share_is_the_share_of_actions_without_gradient():
    data = batch(5)
    objective = PpoClip(c.PpoClipConfig(dual_clip=1.5))
    _, (gradient, _), metrics = value_and_gradient(objective, data)
    still = (gradient[data["mask"]] == 0).double().mean()
    assert 0 < float(still) < 1
    torch.testing.assert_close(metrics["clip_share"], still)


def test_metrics_are_means_over_trained_actions():
    data = batch(6)
    data = {name: values[data["mask"]] for name, values in data.items()}
    config = c.PpoClipConfig(
        kl=c.LossKlConfig(coefficient=0.1),
        entropy_coefficient=0.1,
        old_logprobs="recompute",
        correction=c.CorrectionConfig(kind="mask", cap=1.2, floor=0.8),
    )
    _, _, metrics = value_and_gradient(PpoClip(config), data)
    log_ratio, d = data["logp"] - data["old_logp"], data["logp"] - data["ref_logp"]
    weight = (data["old_logp"] - data["rollout_logp"]).exp()
    outside = (weight < 0.8) | (weight > 1.2)
    expected = {
        "ratio": log_ratio.exp(),
        "kl_behaviour": log_ratio.exp() - 1 - log_ratio,
        "kl_reference": (-d).exp() - 1 + d,
        "entropy": data["entropy"],
        "correction_weight": weight * ~outside,
        "correction_share": outside.double(),
        "log_ratio_clamped": torch.zeros_like(log_ratio),
    }
    assert metrics.keys() == expected.keys() | {"clip_share"}
    for name, values in expected.items():
        torch.testing.assert_close(metrics[name], values.mean(), rtol=1e-12, atol=1e-12)


def test_a_correction_beyond_the_range_of_floats_is_bounded():
    data = batch()
    data["rollout_logp"] = data["old_logp"] - 1000.0
    for kind, share in (("truncate", 1.2), ("mask", 0.0)):
        correction = c.CorrectionConfig(kind=kind, level="sequence", cap=1.2)
        objective = PpoClip(c.PpoClipConfig(old_logprobs="recompute", correction=correction))
        value, _, metrics = value_and_gradient(objective, data)
        assert torch.isfinite(value)
        assert float(metrics["correction_weight"]) == pytest.approx(share)
        assert float(metrics["correction_share"]) == 1.0


def test_a_mask_has_icepops_bounds_on_both_sides_unless_others_are_set():
    data = batch()
    data["rollout_logp"] = data["old_logp"].clone()
    outside = torch.tensor([math.log(0.4), math.log(6.0)], dtype=torch.float64)
    inside = torch.tensor([math.log(0.6), math.log(4.9)], dtype=torch.float64)
    data["mask"][:] = data["record"] == 0
    data["rollout_logp"][:4] -= torch.cat([outside, inside])
    for correction, masked in (({}, 2), ({"floor": 0.0}, 1), ({"floor": 0.0, "cap": 7.0}, 0)):
        config = c.CorrectionConfig(kind="mask", **correction)
        objective = PpoClip(c.PpoClipConfig(old_logprobs="recompute", correction=config))
        _, _, metrics = value_and_gradient(objective, data)
        assert float(metrics["correction_share"]) == masked / 4


def test_truncated_weights_are_bounded_from_above_alone_unless_others_are_set():
    assert c.CorrectionConfig(kind="truncate").bounds() == (0.0, 2.0)
    assert c.CorrectionConfig(kind="truncate", floor=0.5, cap=3.0).bounds() == (0.5, 3.0)


def test_a_correction_of_an_exact_generator_changes_nothing():
    data = batch()
    data["rollout_logp"] = data["old_logp"].clone()
    plain = value_and_gradient(PpoClip(c.PpoClipConfig(old_logprobs="recompute")), data)
    for kind, level in CORRECTIONS[1:]:
        correction = c.CorrectionConfig(kind=kind, level=level)
        corrected = value_and_gradient(
            PpoClip(c.PpoClipConfig(old_logprobs="recompute", correction=correction)), data
        )
        assert_same(corrected[:2], plain[:2])


# -- log-ratios beyond the range of floats ---------------------------------------------------------


def with_log_ratios(data, actions, log_ratio):
    """The data in float32, where ``actions`` have this log-ratio to the rollout, old and reference
    log-probs, whatever their difference was.
    """
    data = {
        name: values.float() if values.is_floating_point() else values.clone()
        for name, values in data.items()
    }
    for name in ("old_logp", "rollout_logp", "ref_logp"):
        data[name][actions] = data["logp"][actions] - log_ratio
    return data


@each_kind
@each_normalisation
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("where", ["one action", "a whole record", "every action"])
def test_losses_gradients_and_metrics_are_finite_at_any_log_ratio(
    kind, normalise, log_ratio, advantage, where
):
    data = batch(7)
    chosen = {
        "one action": torch.arange(len(data["mask"])) == 0,
        "a whole record": data["record"] == 2,
        "every action": torch.ones_like(data["mask"]),
    }[where]
    data = with_log_ratios(data, chosen, log_ratio)
    data["advantage"][chosen] = advantage
    share = (chosen & data["mask"]).sum() / data["mask"].sum()
    for config in configs(kind, normalise):
        value, gradients, metrics = value_and_gradient(KINDS[kind][0](config), data)
        assert value.dtype == torch.float32
        assert torch.isfinite(value)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        assert all(torch.isfinite(metric) for metric in metrics.values())
        assert metrics["log_ratio_clamped"] == share


@each_kind
@each_normalisation
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("log_weight", [100.0, -100.0])
def test_corrections_are_finite_at_any_log_weight_and_without_a_cap(
    kind, normalise, correction, level, log_weight
):
    data = with_log_ratios(batch(8), torch.zeros(21, dtype=torch.bool), 0.0)
    data["rollout_logp"] = data["old_logp"] - log_weight
    config = KINDS[kind][1](
        normalise=normalise,
        constant_length=5,
        old_logprobs="recompute",
        correction=c.CorrectionConfig(kind=correction, level=level, cap=float("inf")),
    )
    value, gradients, metrics = value_and_gradient(KINDS[kind][0](config), data)
    assert torch.isfinite(value)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert all(torch.isfinite(metric) for metric in metrics.values())
    assert metrics["log_ratio_clamped"] == 1.0


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("log_ratio", [21.0, -21.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_the_limit_has_no_gradient(kind, log_ratio, advantage):
    data = batch(9)
    chosen = data["record"] == 2
    data = with_log_ratios(data, chosen, log_ratio)
    data["advantage"][chosen] = advantage
    _, (gradient, _), _ = value_and_gradient(KINDS[kind][0](KINDS[kind][1]()), data)
    assert not gradient[chosen].any()
    assert gradient[~chosen].any()


@pytest.mark.parametrize("log_ratio", [21.0, -21.0])
def test_cispo_keeps_its_gradient_beyond_the_limit(log_ratio):
    data = batch(9)
    chosen = (data["record"] == 2) & data["mask"]
    data = with_log_ratios(data, chosen, log_ratio)
    objective = Cispo(c.CispoConfig(clip_low=0.5, clip_high=0.5))
    _, (gradient, _), _ = value_and_gradient(objective, data)
    weight = 1.5 if log_ratio > 0 else 0.5
    torch.testing.assert_close(
        gradient[chosen], -weight * data["advantage"][chosen] / data["mask"].sum()
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_pulls_back_a_policy_however_far_it_left_its_reference(estimator):
    """The gradient of the loss by logp is positive where the policy likes an action more."""
    logp = torch.tensor([-0.1], requires_grad=True)
    kl(estimator, logp, torch.tensor([-100.0])).sum().backward()
    assert logp.grad.item() >= 1.0


@each_kind
@each_normalisation
def test_within_the_limit_the_clamp_changes_no_bit(kind, normalise, monkeypatch):
    data = batch(10)
    scale = 19.9 / (data["logp"] - data["rollout_logp"]).abs().max()
    data["rollout_logp"] = data["logp"] - scale * (data["logp"] - data["rollout_logp"])
    data["old_logp"] = data["rollout_logp"] + 0.05
    data = with_log_ratios(data, torch.zeros_like(data["mask"]), 0.0)
    clamped = [
        value_and_gradient(KINDS[kind][0](config), data) for config in configs(kind, normalise)
    ]
    for module in (objectives, corrections, kl_module):
        monkeypatch.setattr(module, "LOG_RATIO_LIMIT", float("inf"))
    for config, (value, gradients, metrics) in zip(configs(kind, normalise), clamped, strict=True):
        expected = value_and_gradient(KINDS[kind][0](config), data)
        assert torch.equal(value, expected[0])
        for gradient, other in zip(gradients, expected[1], strict=True):
            assert torch.equal(gradient, other)
        assert metrics == expected[2]


def expected_gradient(estimator: str, logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Mean over actions of the policy of the gradient of the estimator, by enumeration."""
    logits = logits.clone().requires_grad_()
    logp = logits.log_softmax(0)
    (logp.detach().exp() * kl(estimator, logp, ref)).sum().backward()
    return logits.grad


def divergence_gradient(logits: torch.Tensor, divergence) -> torch.Tensor:
    logits = logits.clone().requires_grad_()
    divergence(logits.log_softmax(0)).backward()
    return logits.grad


def test_the_gradients_of_kl_losses_are_those_the_documentation_names():
    g = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(2, 6, generator=g, dtype=torch.float64)
    ref = ref.log_softmax(0)
    reverse = divergence_gradient(logits, lambda logp: (logp.exp() * (logp - ref)).sum())
    forward = divergence_gradient(logits, lambda logp: (ref.exp() * (ref - logp)).sum())
    for estimator, gradient in (("k1", torch.zeros_like(ref)), ("k2", reverse), ("k3", forward)):
        torch.testing.assert_close(
            expected_gradient(estimator, logits, ref), gradient, rtol=1e-12, atol=1e-12
        )


def test_k1_and_k3_are_unbiased_estimates_of_the_divergence():
    g = torch.Generator().manual_seed(0)
    logp, ref = torch.randn(2, 6, generator=g, dtype=torch.float64).log_softmax(1)
    divergence = (logp.exp() * (logp - ref)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(
            (logp.exp() * kl(estimator, logp, ref)).sum(), divergence, rtol=1e-12, atol=1e-12
        )


def test_an_unknown_kl_estimator_is_named():
    with pytest.raises(ValueError, match="no KL estimator 'k4'; there are k1, k2 and k3"):
        kl("k4", torch.zeros(1), torch.zeros(1))
