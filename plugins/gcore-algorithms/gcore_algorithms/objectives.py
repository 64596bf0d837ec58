"""Losses: surrogate x correction x mask + KL - entropy, summed under a normalisation.

Every objective returns sums that add up over micro-batches and ranks, so that the gradient of an
update does not depend on how its records were split. A record's actions must all be in one
micro-batch. The correction, and the mask of records that are too old, multiply the surrogate alone;
KL and entropy are those of the current policy.

Notation, for action t of record i:

    A     its advantage
    r     exp(logp - before), the ratio of the current policy to one before it: ``rollout_logp``;
          ``old_logp`` with ``old_logprobs: recompute``; with ``interpolate`` what is between
          ``rollout_logp`` and logp (``gcore_algorithms.proximal``)
    [x]   x clipped to [1 - clip_low, 1 + clip_high]
    sg    no gradient flows through it

Formulas below are gains; a loss is the negative of one.

log r is clamped to +-LOG_RATIO_LIMIT before it is exponentiated, so that one wrong log-prob cannot
make a loss infinite or NaN. An action beyond the limit has the value of the limit. Its ratio has no
gradient, as that of a clipped action has none: no update can bring back what is e^20 away, and a
factor of e^20 would leave nothing of the other actions' gradient. Within the limit nothing changes,
to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcore_algorithms.config import (
    CispoConfig,
    GspoConfig,
    ObjectiveConfig,
    PpoClipConfig,
    SapoConfig,
)
from gcore_algorithms.corrections import correction_weights, stale_records
from gcore_algorithms.entropy import EntropyCoefficient
from gcore_algorithms.kl import kl
from gcore_algorithms.layout import Records, keep_trained
from gcore_algorithms.proximal import interpolated_logp
from gcore_core.contract.algorithms import LOG_RATIO_LIMIT


@dataclass(frozen=True, kw_only=True, slots=True)
class Actions:
    """The trained actions of a micro-batch.

    logp: float[A], under the current policy, with gradient.
    log_ratio: float[A], log r, with gradient; it is not clamped.
    advantage: float[A].
    records: to which record each action belongs.
    """

    logp: Tensor
    log_ratio: Tensor
    advantage: Tensor
    records: Records


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """What a subclass computes for each action.

    loss: float[A], with gradient.
    ratio: float[A], that of the policies; of whole sequences under GSPO.
    clipped: bool[A], whether the clip was active.
    gate: float[A], how much of an action's gradient a gate lets through; None without a gate.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    gate: Tensor | None = None


class PolicyObjective(ABC):
    """A ``gcore_core.contract.algorithms.Objective`` whose subclasses define the surrogate.

    Metrics are means over trained actions, logarithms in nats:

    ratio: r.
    clip_share: share of actions at which the clip was active.
    gate: 1 where a gate lets all of the gradient through; only under SAPO.
    log_ratio_clamped: share of actions with a log-ratio beyond +-LOG_RATIO_LIMIT.
    kl_behaviour: k3 estimate of KL(policy that r is taken against || current policy).
    kl_reference: k3 estimate of KL(current policy || reference); only with ``ref_logp``.
    entropy: only if ``current`` has it.
    entropy_coefficient: what the entropy is multiplied by; only with ``entropy.target``.
    correction_weight: only with a correction.
    correction_share: share of actions whose weight was truncated or masked; only with a correction.
    stale_masked_share: share of actions whose record was masked; only with ``stale_mask``.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.requires = config.traits().requires
        self._entropy = EntropyCoefficient(config.entropy_coefficient, config.entropy)
        self._config = config
        self._before = "old_logp" if config.old_logprobs == "recompute" else "rollout_logp"
        self._interpolates = config.old_logprobs == "interpolate"
        self._corrects = config.correction.kind != "none"
        self._masks_stale = config.stale_mask.older_than is not None

    @abstractmethod
    def surrogate(self, actions: Actions) -> Surrogate:
        """Returns the loss of each action, before correction, KL and entropy."""

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Returns the summed loss, its normaliser and the metrics of one micro-batch.

        columns: of all A actions: mask bool[A], record int64[A], advantage float[A] and what
            ``requires`` names.
        current: logp float[A] with gradient; entropy float[A] if it is computed.
        The first two results are 0-d. A metric is a (sum, count) pair, so that it adds up.
        """
        config = self._config
        columns, current = self._trained(columns, current)
        logp = current["logp"]
        before = columns[self._before]
        if self._interpolates:
            before = interpolated_logp(columns["age"], before, logp)
        log_ratio = logp - before
        records = Records(columns["record"], like=logp, rows=columns.get("rows"))
        surrogate = self.surrogate(
            Actions(logp=logp, log_ratio=log_ratio, advantage=columns["advantage"], records=records)
        )
        loss = surrogate.loss
        metrics = _metrics(surrogate, log_ratio, columns, current)
        metrics["log_ratio_clamped"] = self._beyond_limit(log_ratio, before, columns, logp)
        if self._corrects:
            weight, bounded = correction_weights(
                config.correction, before, columns["rollout_logp"], records
            )
            loss = loss * weight
            metrics["correction_weight"] = weight.sum()
            metrics["correction_share"] = bounded.sum(dtype=logp.dtype)
        if self._masks_stale:
            policy = before if self._before == "old_logp" else logp.detach()
            apart = policy - columns["rollout_logp"]
            masked = stale_records(config.stale_mask, columns["age"], apart, records)
            loss = loss.masked_fill(masked, 0.0)
            metrics["stale_masked_share"] = masked.sum(dtype=logp.dtype)
        if config.kl.coefficient:
            loss = loss + config.kl.coefficient * kl(config.kl.estimator, logp, columns["ref_logp"])
        if self._entropy.applied:
            loss = loss - self._entropy.applied * current["entropy"]
        if config.adapts:
            metrics["entropy_coefficient"] = self._entropy.applied * logp.new_full((), logp.numel())
        actions = logp.new_full((), logp.numel())
        counted = {name: (value, actions) for name, value in metrics.items()}
        return self._total(loss, records), self._weight(records), counted

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Moves the entropy coefficient by a step's entropy, where there is a target."""
        self._entropy.observe(metrics["entropy"])

    def state(self) -> dict[str, Any]:
        return self._entropy.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._entropy.restore(state)

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the normaliser that ``loss`` returns, 0-d, without a forward pass."""
        # rollout_logp only gives dtype and device
        names = {"record", "rollout_logp", "rows"} & columns.keys()
        trained = keep_trained(columns["mask"], columns, names)
        like = trained["rollout_logp"]
        return self._weight(Records(trained["record"], like=like, rows=trained.get("rows")))

    def _trained(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns ``columns`` and ``current`` without masked actions and unused columns."""
        names = {"record", "advantage", self._before} | (self.requires & {"age"})
        if self._corrects or self._masks_stale:
            names.add("rollout_logp")
        names |= {"ref_logp", "rows"} & columns.keys()
        outputs = ("logp", "entropy") if "entropy" in current else ("logp",)
        return keep_trained(columns["mask"], columns, names), keep_trained(
            columns["mask"], current, outputs
        )

    @torch.no_grad()
    def _beyond_limit(
        self, log_ratio: Tensor, before: Tensor, columns: Mapping[str, Tensor], logp: Tensor
    ) -> Tensor:
        """Returns how many actions have a log-ratio that is clamped before it is exponentiated.

        Those of actions are looked at; what GSPO or a correction sums over a record is not.

        before: log-probs that the ratio is taken against.
        """
        beyond = log_ratio.abs() > LOG_RATIO_LIMIT
        if "ref_logp" in columns:  # k3 exponentiates the negative of it, and clamps that side alone
            beyond |= columns["ref_logp"] - logp > LOG_RATIO_LIMIT
        if self._corrects:
            beyond |= (before - columns["rollout_logp"]).abs() > LOG_RATIO_LIMIT
        return beyond.sum(dtype=logp.dtype)

    def _total(self, loss: Tensor, records: Records) -> Tensor:
        """Returns the sum of the loss [A] as a 0-d tensor.

        Under ``normalise: sequence`` every record counts alike: its actions share a weight of 1.
        """
        if self._config.normalise == "sequence":
            loss = records.means(loss)
        return loss.sum()

    def _weight(self, records: Records) -> Tensor:
        """Returns what the total is divided by, 0-d; records without trained actions do not count.

        token: the number of actions.
        sequence: the number of records.
        constant: the number of records times ``constant_length``.
        """
        if self._config.normalise == "token":
            return records.actions
        if self._config.normalise == "sequence":
            return records.count
        return records.count * self._config.constant_length


class PpoClip(PolicyObjective):
    """PPO's clipped surrogate: min(r A, [r] A); where A < 0, with ``dual_clip`` c, at least c A.

    Sources:

    - Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347, Eq. 7.
    - With ``normalise: sequence`` it is the surrogate of GRPO: Shao et al., "DeepSeekMath",
      arXiv:2402.03300, Eq. 3.
    - With different bounds and ``normalise: token`` it is that of DAPO: Yu et al.,
      arXiv:2503.14476, Eq. 8.
    - Dual clip: Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement
      Learning", arXiv:1912.09729.
    """

    def __init__(self, config: PpoClipConfig) -> None:
        super().__init__(config)
        self._bounds = 1.0 - config.clip_low, 1.0 + config.clip_high
        self._dual_clip = config.dual_clip

    def surrogate(self, actions: Actions) -> Surrogate:
        return clipped_surrogate(
            actions.log_ratio, actions.advantage, self._bounds, self._dual_clip
        )


class Gspo(PolicyObjective):
    """GSPO: min(s A, [s] A), where s = exp(mean of log r over the record) is a sequence's ratio.

    Source: Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071, Eqs. 5 and 7.
    It is written as the paper's GSPO-token (Eq. 14), s_t = sg(s) r_t / sg(r_t). Value and gradient
    are the same while a record's actions share one advantage and one correction weight; unlike Eq.
    5 it is also defined when they do not. Masked actions are left out of the mean.
    """

    def __init__(self, config: GspoConfig) -> None:
        super().__init__(config)
        self._bounds = 1.0 - config.clip_low, 1.0 + config.clip_high

    def surrogate(self, actions: Actions) -> Surrogate:
        records = actions.records
        logp = actions.logp
        with torch.no_grad():
            of_record = records.spread(records.sums(actions.log_ratio) / records.lengths)
        # logp - logp.detach() is 0 and has logp's gradient: log s_t
        return clipped_surrogate(
            of_record + (logp - logp.detach()), actions.advantage, self._bounds, None
        )


class Cispo(PolicyObjective):
    """CISPO: sg([r]) A logp. The clipped ratio is a constant, so every action keeps its gradient.

    Source: MiniMax, "MiniMax-M1", arXiv:2506.13585, Eqs. 4 and 5.
    """

    def __init__(self, config: CispoConfig) -> None:
        super().__init__(config)
        self._bounds = 1.0 - config.clip_low, 1.0 + config.clip_high

    def surrogate(self, actions: Actions) -> Surrogate:
        with torch.no_grad():
            ratio = _ratio(actions.log_ratio)
            weight = ratio.clamp(*self._bounds)
            clipped = weight != ratio
            weight = weight * actions.advantage
        return Surrogate(loss=-weight * actions.logp, ratio=ratio, clipped=clipped)


class Sapo(PolicyObjective):
    """SAPO: f(r) A, where f(r) = 4 / tau x sigmoid(tau (r - 1)): a gate in place of the clip.

    tau is one temperature where A > 0, and another where it is not. On policy f has slope 1, as r
    has. The gradient is that of w r A logp, where w = 4 p (1 - p), p = sigmoid(tau (r - 1)): it
    fades with the distance of r from 1 and is nowhere cut off.

    Source: Gao et al., "Soft Adaptive Policy Optimization", arXiv:2511.20347.
    """

    def __init__(self, config: SapoConfig) -> None:
        super().__init__(config)
        self._temperatures = config.temperature_positive, config.temperature_negative

    def surrogate(self, actions: Actions) -> Surrogate:
        ratio = _ratio(actions.log_ratio)
        advantage = actions.advantage
        positive, negative = (torch.full_like(advantage, tau) for tau in self._temperatures)
        temperature = torch.where(advantage > 0, positive, negative)
        share = torch.sigmoid(temperature * (ratio - 1.0))
        with torch.no_grad():
            gate = 4.0 * share * (1.0 - share)
        return Surrogate(
            loss=-4.0 / temperature * share * advantage,
            ratio=ratio,
            clipped=torch.zeros_like(gate, dtype=torch.bool),
            gate=gate,
        )


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, bounds: tuple[float, float], dual_clip: float | None
) -> Surrogate:
    """Returns the loss -min(r A, [r] A); with ``dual_clip`` c it is at most -c A where A < 0.

    log_ratio: float[A], log r, with gradient; beyond +-LOG_RATIO_LIMIT it is clamped and gives no
        gradient.
    advantage: float[A].
    bounds: of the ratio, low and high.
    dual_clip: c > 1, or None.
    In the result ``clipped`` marks actions that a clip left without gradient.
    """
    ratio = _ratio(log_ratio)
    gain = ratio * advantage
    with torch.no_grad():
        limit = ratio.clamp(*bounds) * advantage
        clipped = gain > limit
        if dual_clip is not None:
            # Both clips are never active at once: with A < 0 the first one needs a ratio below 1,
            # this one a ratio above c > 1.
            dual_limit = dual_clip * advantage
            too_costly = (advantage < 0) & (gain < dual_limit)
            limit = torch.where(too_costly, dual_limit, limit)
            clipped = clipped | too_costly
    return Surrogate(loss=-torch.where(clipped, limit, gain), ratio=ratio, clipped=clipped)


def _ratio(log_ratio: Tensor) -> Tensor:
    """Returns r of log r, clamped; a clamped one has no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@torch.no_grad()
def _metrics(
    surrogate: Surrogate,
    log_ratio: Tensor,
    columns: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Returns the sum of each metric over actions, 0-d.

    KL terms are computed for each action and then summed: a difference of sums would lose a small
    KL to rounding in float32.
    """
    exponent = log_ratio.clamp(max=LOG_RATIO_LIMIT)
    metrics = {
        "ratio": surrogate.ratio.sum(),
        "clip_share": surrogate.clipped.sum(dtype=log_ratio.dtype),
        "kl_behaviour": (exponent.expm1() - exponent).sum(),
    }
    if surrogate.gate is not None:
        metrics["gate"] = surrogate.gate.sum()
    if "ref_logp" in columns:
        metrics["kl_reference"] = kl("k3", current["logp"], columns["ref_logp"]).sum()
    if "entropy" in current:
        metrics["entropy"] = current["entropy"].sum()
    return metrics
