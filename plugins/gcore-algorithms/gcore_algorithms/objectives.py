"""Losses: surrogate x correction + KL - entropy, summed under a normalisation.

Every objective returns sums that add up over micro-batches and ranks, so that the gradient of an
update does not depend on how its records were split. A record's actions must all be in one
micro-batch. The correction multiplies the surrogate alone; KL and entropy are those of the current
policy. Notation, for action t of record i: advantage A, ratio r = exp(logp - behaviour_logp), [x] =
clip to [1 - clip_low, 1 + clip_high], sg = no gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gcore_algorithms.config import CispoConfig, GspoConfig, ObjectiveConfig, PpoClipConfig
from gcore_algorithms.corrections import correction_weights
from gcore_algorithms.kl import kl
from gcore_algorithms.layout import Records, keep_trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Actions:
    """The trained actions of a micro-batch: float[A] each, ``logp`` and ``log_ratio`` with
    gradient.
    """

    logp: Tensor
    log_ratio: Tensor
    advantage: Tensor
    records: Records


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """Of each action: loss (with gradient), ratio, and whether a clip bound it. All [A]."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class PolicyObjective(ABC):
    """A ``gcore_core.contract.algorithms.Objective``; subclasses say what the surrogate is.

    Metrics are means over trained actions: ratio; clip_share; kl_behaviour, the k3 estimate of
        KL(behaviour || policy);
    and where the tensors are there: kl_reference, the k3 estimate of KL(policy || reference);
    entropy; correction_weight; correction_share, actions whose weight was truncated or masked.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.requires = config.requires()
        self._config = config
        self._behaviour = "old_logp" if config.old_logprobs == "recompute" else "rollout_logp"
        self._corrects = config.correction.kind != "none"

    @abstractmethod
    def surrogate(self, actions: Actions) -> Surrogate: ...

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        config = self._config
        columns, current = self._trained(columns, current)
        logp = current["logp"]
        log_ratio = logp - columns[self._behaviour]
        records = Records(columns["record"], like=logp)
        surrogate = self.surrogate(
            Actions(logp=logp, log_ratio=log_ratio, advantage=columns["advantage"], records=records)
        )
        loss = surrogate.loss
        metrics = _metrics(surrogate, log_ratio, columns, current)
        if self._corrects:
            weight, bounded = correction_weights(
                config.correction, columns["old_logp"], columns["rollout_logp"], records
            )
            loss = loss * weight
            metrics["correction_weight"] = weight.sum()
            metrics["correction_share"] = bounded.sum(dtype=logp.dtype)
        if config.kl.coefficient:
            loss = loss + config.kl.coefficient * kl(config.kl.estimator, logp, columns["ref_logp"])
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * current["entropy"]
        actions = logp.new_full((), logp.numel())
        counted = {name: (value, actions) for name, value in metrics.items()}
        return self._total(loss, records), self._weight(records), counted

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        trained = keep_trained(columns["mask"], columns, ("record", "rollout_logp"))
        return self._weight(Records(trained["record"], like=trained["rollout_logp"]))

    def _trained(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the loss reads, without masked actions."""
        names = {"record", "advantage", self._behaviour}
        if self._corrects:
            names.add("rollout_logp")
        if "ref_logp" in columns:
            names.add("ref_logp")
        outputs = ("logp", "entropy") if "entropy" in current else ("logp",)
        return keep_trained(columns["mask"], columns, names), keep_trained(
            columns["mask"], current, outputs
        )

    def _total(self, loss: Tensor, records: Records) -> Tensor:
        """0-d: the sum of the loss under the normalisation."""
        if self._config.normalise == "sequence":
            loss = loss / records.spread(records.lengths)
        return loss.sum()

    def _weight(self, records: Records) -> Tensor:
        """0-d: what the total is divided by. A record without trained actions has no weight."""
        if self._config.normalise == "token":
            return records.actions
        trained = records.lengths.count_nonzero().to(records.lengths.dtype)
        if self._config.normalise == "sequence":
            return trained
        return trained * self._config.constant_length


class PpoClip(PolicyObjective):
    """min(r A, [r] A); below zero with ``dual_clip`` c: max(min(r A, [r] A), c A).

    Sources: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347, Eq. 7;
        with
    ``normalise: sequence`` the surrogate of GRPO, Shao et al., "DeepSeekMath", arXiv:2402.03300,
    Eq. 3; with different bounds and ``normalise: token`` that of DAPO, Yu et al., arXiv:2503.14476,
    Eq. 8; dual clip: Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement
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
    """min(s A, [s] A) with s = exp(mean over the record of log r), the ratio of whole sequences.

    Source: Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071, Eqs. 5 and 7.
    Written as the paper's GSPO-token (Eq. 14), s_t = sg(s) r_t / sg(r_t): the same value and
    gradient while a record's actions share one advantage and one correction weight, and defined
    when they do not. Masked actions are left out of the mean.
    """

    def __init__(self, config: GspoConfig) -> None:
        super().__init__(config)
        self._bounds = 1.0 - config.clip_low, 1.0 + config.clip_high

    def surrogate(self, actions: Actions) -> Surrogate:
        records, logp = actions.records, actions.logp
        with torch.no_grad():
            of_record = records.spread(records.sums(actions.log_ratio) / records.lengths)
        return clipped_surrogate(
            of_record + (logp - logp.detach()), actions.advantage, self._bounds, None
        )


class Cispo(PolicyObjective):
    """sg([r]) A logp: the clipped ratio is a constant weight, so every action keeps its gradient.

    Source: MiniMax, "MiniMax-M1", arXiv:2506.13585, Eqs. 4 and 5.
    """

    def __init__(self, config: CispoConfig) -> None:
        super().__init__(config)
        self._bounds = 1.0 - config.clip_low, 1.0 + config.clip_high

    def surrogate(self, actions: Actions) -> Surrogate:
        with torch.no_grad():
            ratio = actions.log_ratio.exp()
            weight = ratio.clamp(*self._bounds)
            clipped = weight != ratio
            weight = weight * actions.advantage
        return Surrogate(loss=-weight * actions.logp, ratio=ratio, clipped=clipped)


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, bounds: tuple[float, float], dual_clip: float | None
) -> Surrogate:
    """-min(r A, [r] A), and -max(that, dual_clip A) where A < 0; ``clipped`` marks actions without
    gradient.
    """
    ratio = log_ratio.exp()
    gain = ratio * advantage
    with torch.no_grad():
        limit = ratio.clamp(*bounds) * advantage
        clipped = gain > limit
        if dual_clip is not None:
            # Never where the other clip binds: that needs a ratio below 1 when the advantage is
            # negative.
            dual_limit = dual_clip * advantage
            too_costly = (advantage < 0) & (gain < dual_limit)
            limit = torch.where(too_costly, dual_limit, limit)
            clipped = clipped | too_costly
    return Surrogate(loss=-torch.where(clipped, limit, gain), ratio=ratio, clipped=clipped)


@torch.no_grad()
def _metrics(
    surrogate: Surrogate,
    log_ratio: Tensor,
    columns: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Sums over actions. Action by action: a difference of sums would lose a small KL to float32
    rounding.
    """
    metrics = {
        "ratio": surrogate.ratio.sum(),
        "clip_share": surrogate.clipped.sum(dtype=log_ratio.dtype),
        "kl_behaviour": (log_ratio.expm1() - log_ratio).sum(),
    }
    if "ref_logp" in columns:
        metrics["kl_reference"] = kl("k3", current["logp"], columns["ref_logp"]).sum()
    if "entropy" in current:
        metrics["entropy"] = current["entropy"].sum()
    return metrics
