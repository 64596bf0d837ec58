"""Losses that draw the policy to a teacher on what the policy itself has sampled.

Notation, at action t of a record, in the state s_t before it (prompt and earlier actions):

    q       the policy that is trained; q_old the one that ratios compare with (``old_logprobs``)
    p       the teacher, frozen
    r       q(a_t | s_t) / q_old(a_t | s_t)
    A       the record's advantage from rewards
    [x]     x clipped to [1 - clip_low, 1 + clip_high]

No gradient flows through sampling, nor through p, q_old or A. Log-probs are at the record's
temperature, of policy and teacher alike. A loss is a mean over trained actions; ``normalise`` says
over which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gcore_algorithms.layout import Records
from gcore_algorithms.teacher.config import (
    TOP_IDS,
    TOP_LOGP,
    DistillationConfig,
    JensenShannonConfig,
    ReverseKlConfig,
)
from gcore_core.contract.algorithms import LOG_RATIO_LIMIT

#: The least probability of all tokens outside of the top k together. It is 1 less a sum of float32
#: numbers, whose rounding is about this large; below it there is no gradient either.
TAIL_FLOOR = 1e-6

Metrics = dict[str, tuple[Tensor, Tensor]]


class ReverseKl:
    """The sampled form of KL(q || p): min(r a, [r] a), a = w (log p - log q_old) + v A.

    w is ``teacher_weight``, v ``reward_weight``; log p - log q_old of the sampled action is clipped
    to +-``largest_gap``. In expectation over actions -a is the reverse KL of a state, so the loss
    lowers it by a policy gradient in which an action answers for its own state alone.

    Sources:

    - Agarwal et al. 2024, "On-policy distillation of language models: learning from self-generated
      mistakes" (GKD), arXiv:2306.13649, section 3: on-policy data with the reverse KL, and the
      mixture with a reward.
    - Gu et al. 2024, "MiniLLM", arXiv:2306.08543: the gradient of the reverse KL as a policy
      gradient, section 2.2. Of its two parts this is that of the single step, sampled where the
      paper sums over the vocabulary; the part of all later steps is left out. The ratio is clipped
      as in PPO, as there.
    - Schulman et al. 2017, arXiv:1707.06347, Eq. 7: the clipped surrogate.

    Metrics, means over trained actions in nats: teacher_kl (log q_old - log p, an unbiased estimate
    of KL(q_old || p)), teacher_gap_clipped (share beyond ``largest_gap``), ratio, clip_share.
    """

    def __init__(self, config: ReverseKlConfig) -> None:
        self.requires = config.traits().requires
        self._config = config

    def advantages(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns a of each action, float[A]; see ``MakesAdvantages``."""
        config = self._config
        gap = columns["teacher_logp"] - columns[config.behaviour]
        bounded = gap.clamp(-config.largest_gap, config.largest_gap)
        return config.teacher_weight * bounded + config.reward_weight * columns["advantage"]

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Returns loss_sum, weight_sum and metrics; see ``Objective.loss``."""
        config = self._config
        names = ("record", "advantage", "teacher_logp", config.behaviour)
        kept = _trained(columns["mask"], columns, names)
        logp = _trained(columns["mask"], current, ("logp",))["logp"]
        loss, ratio, clipped = _clipped(
            logp - kept[config.behaviour], self.advantages(kept), config
        )
        with torch.no_grad():
            gap = kept[config.behaviour] - kept["teacher_logp"]
            sums = {
                "teacher_kl": gap.sum(),
                "teacher_gap_clipped": (gap.abs() > config.largest_gap).sum(dtype=logp.dtype),
                "ratio": ratio.sum(),
                "clip_share": clipped.sum(dtype=logp.dtype),
            }
        return _total(loss, columns, config), self.weight(columns), _over(logp, sums)

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the normaliser; see ``Objective.weight``."""
        return _weight(columns, self._config)


class JensenShannon:
    """The generalised Jensen-Shannon divergence of q and p over the teacher's k likeliest tokens.

    With M = b p + (1 - b) q, b being ``beta``:

        0 < b < 1   b KL(p || M) + (1 - b) KL(q || M)
        b = 0       KL(p || q), the limit of the divergence over b
        b = 1       KL(q || p), the limit of the divergence over 1 - b

    It is the mean over actions of ``teacher_weight`` times this, plus ``reward_weight`` times PPO's
    clipped surrogate of the sampled action, -min(r A, [r] A).

    Tokens outside the top k: by ``tail`` they count as one token, with the probability that is left
    of each distribution (at least ``TAIL_FLOOR``), or both distributions are conditioned on the top
    k. Merging outcomes can only lower a divergence, so the first is a lower bound, and is exact
    where k is the whole vocabulary.

    Source: Agarwal et al. 2024 (GKD), arXiv:2306.13649: the divergence and its limits in section 2
    (Eq. 1), the mixture with a reward in section 3.

    Metrics, means over trained actions: teacher_jsd (in nats), teacher_tail and policy_tail (the
    probability outside the top k); with a reward also ratio and clip_share.
    """

    def __init__(self, config: JensenShannonConfig) -> None:
        self.requires = config.traits().requires
        self._config = config

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Returns loss_sum, weight_sum and metrics; see ``Objective.loss``."""
        config = self._config
        mask = columns["mask"]
        names = {"record", TOP_LOGP}
        if config.reward_weight:
            names |= {"advantage", config.behaviour}
        kept = _trained(mask, columns, names)
        live = _trained(mask, current, ("logp", f"logp@{TOP_IDS}"))
        teacher = kept[TOP_LOGP].double()
        policy = live[f"logp@{TOP_IDS}"].double()
        logp = live["logp"]
        divergence = jensen_shannon(_whole(teacher, config), _whole(policy, config), config.beta)
        loss = config.teacher_weight * divergence.to(logp.dtype)
        sums = {
            "teacher_jsd": divergence.detach().sum(),
            "teacher_tail": _outside(teacher).sum(),
            "policy_tail": _outside(policy.detach()).sum(),
        }
        if config.reward_weight:
            log_ratio = logp - kept[config.behaviour]
            rewarded, ratio, clipped = _clipped(log_ratio, kept["advantage"], config)
            loss = loss + config.reward_weight * rewarded
            sums |= {"ratio": ratio.sum(), "clip_share": clipped.sum(dtype=logp.dtype)}
        return _total(loss, columns, config), self.weight(columns), _over(logp, sums)

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the normaliser; see ``Objective.weight``."""
        return _weight(columns, self._config)


def jensen_shannon(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """Returns the divergence of each row, float[A] in nats; see ``JensenShannon``.

    teacher, policy: float[A, n], log-probs of n outcomes.
    """
    if beta == 0:
        return (teacher.exp() * (teacher - policy)).sum(-1)
    if beta == 1:
        return (policy.exp() * (policy - teacher)).sum(-1)
    weight = teacher.new_tensor(beta)
    mixed = torch.logaddexp(teacher + weight.log(), policy + (1 - weight).log())
    of_teacher = (teacher.exp() * (teacher - mixed)).sum(-1)
    of_policy = (policy.exp() * (policy - mixed)).sum(-1)
    return beta * of_teacher + (1 - beta) * of_policy


def _whole(logp: Tensor, config: JensenShannonConfig) -> Tensor:
    """Makes a distribution of the log-probs of the top k, float64[A, k]; see ``tail``."""
    if config.tail == "renormalise":
        return logp.log_softmax(-1)
    return torch.cat([logp, _outside(logp).log()[:, None]], 1)


def _outside(logp: Tensor) -> Tensor:
    """Returns the probability of all other tokens, float64[A], at least ``TAIL_FLOOR``."""
    return (1 - logp.exp().sum(-1)).clamp(min=TAIL_FLOOR)


def _clipped(
    log_ratio: Tensor, advantage: Tensor, config: DistillationConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (loss -min(r a, [r] a), r, whether the clip left an action without gradient).

    log_ratio, advantage: float[A]; log r beyond +-LOG_RATIO_LIMIT is clamped and has no gradient.
    """
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    gain = ratio * advantage
    with torch.no_grad():
        limit = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
        clipped = gain > limit
    return -torch.where(clipped, limit, gain), ratio.detach(), clipped


def _trained(
    mask: Tensor, columns: Mapping[str, Tensor], names: Iterable[str]
) -> dict[str, Tensor]:
    """Returns the named columns without the actions that are not trained on.

    Leaving them out keeps even their NaNs out of values and gradients.
    """
    index = mask.nonzero().squeeze(1)
    return {name: columns[name].index_select(0, index) for name in names}


def _total(loss: Tensor, columns: Mapping[str, Tensor], config: DistillationConfig) -> Tensor:
    """Returns the sum of the loss, float[A] of the trained actions, under the normalisation."""
    if config.normalise == "token":
        return loss.sum()
    return _records(columns, like=loss).means(loss).sum()


def _weight(columns: Mapping[str, Tensor], config: DistillationConfig) -> Tensor:
    """Returns how many actions, or records with any, are trained on; 0-d."""
    records = _records(columns, like=columns["rollout_logp"])
    return records.actions if config.normalise == "token" else records.count


def _records(columns: Mapping[str, Tensor], like: Tensor) -> Records:
    """Returns the records of the trained actions."""
    names = {"record", "rows"} & columns.keys()
    kept = _trained(columns["mask"], columns, names)
    return Records(kept["record"], like=like, rows=kept.get("rows"))


def _over(logp: Tensor, sums: Mapping[str, Tensor]) -> Metrics:
    """Returns each sum with the number of actions, float[A], over which its mean is taken."""
    count = logp.new_full((), float(len(logp)))
    return {name: (total.detach().to(logp.dtype), count) for name, total in sums.items()}
