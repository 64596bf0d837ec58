"""Rewards to advantages, in numpy: these run in controllers, which have no torch.

Notation: r is a record's reward less its KL penalty; S is the number of records in its group.

Records of a group whose rewards are all equal get exactly 0, except under ``ReinforcePp``, whose
baseline is the batch. So does a group that has only one record left after failed rewards: there is
nothing to compare it with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gcore_algorithms.config import (
    GaeConfig,
    GrpoConfig,
    RecordAdvantageConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
)
from gcore_core.contract.algorithms import GroupScalars

#: A variance below this part of the mean square is taken for 0. The variance is the difference of
#: two large sums, and shards add them in varying order, so equal rewards can give a tiny one.
_ROUNDING = 1e-12


class RecordAdvantage:
    """What estimators of level "record" share: the KL penalty in the reward, no batch statistics.

    group_size: records sampled for each prompt.
    requires: names of the scalars that records need, such as ``kl_k1``.
    """

    def __init__(self, config: RecordAdvantageConfig) -> None:
        self.group_size = config.group_size
        self.requires = config.requires()
        self._kl = config.kl

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        """Returns float64[n] of this shard's groups; ``of`` gets the sum over all shards."""
        return np.zeros(0)

    def rewards(self, group: GroupScalars) -> np.ndarray:
        """Returns float64[S]: each record's reward less coefficient x KL, in nats."""
        rewards: np.ndarray = np.asarray(group.rewards, dtype=np.float64)
        if self._kl.coefficient:
            rewards = rewards - self._kl.coefficient * group.scalars[f"kl_{self._kl.estimator}"]
        return rewards


class Grpo(RecordAdvantage):
    """GRPO: (r - mean of the group) / (std of the group + eps), where the std divides by S - 1.

    Source: Shao et al., "DeepSeekMath", arXiv:2402.03300, section 4.1.2.
    """

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self._eps = config.eps

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return [self._of_group(centred(self.rewards(group))) for group in groups]

    def _of_group(self, centred_rewards: np.ndarray) -> np.ndarray:
        if not centred_rewards.any():
            return centred_rewards
        advantages: np.ndarray = centred_rewards / (centred_rewards.std(ddof=1) + self._eps)
        return advantages


class DrGrpo(RecordAdvantage):
    """Dr. GRPO: r - mean of the group.

    Source: Liu et al., "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2. The
    other half of the method is ``normalise: constant`` in the objective.
    """

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return [centred(self.rewards(group)) for group in groups]


class Rloo(RecordAdvantage):
    """RLOO: r - mean of the group's other rewards, which is (r - mean of the group) S / (S - 1).

    Source: Ahmadian et al., "Back to Basics", arXiv:2402.14740, section 3; Kool et al., "Buy 4
    REINFORCE Samples, Get a Baseline for Free!" (2019).
    """

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return [_leave_one_out(self.rewards(group)) for group in groups]


class ReinforcePp(RecordAdvantage):
    """REINFORCE++: (r - mean of the batch) / (std of the batch + eps).

    The batch is the n records of all shards; the std divides by n.

    Source: Hu et al., "REINFORCE++", arXiv:2501.03262. The paper charges each action with the KL
    that follows it; here a record is charged with its whole KL.
    """

    def __init__(self, config: ReinforcePpConfig) -> None:
        super().__init__(config)
        self._eps = config.eps

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        return _sums([self.rewards(group) for group in groups])

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        mean, std = _mean_and_std(statistics)
        if std == 0:
            return [np.zeros(len(group.rewards)) for group in groups]
        return [(self.rewards(group) - mean) / (std + self._eps) for group in groups]


class ReinforcePpBaseline(RecordAdvantage):
    """REINFORCE++ with baseline: c = r - mean of the group, over the batch's std of c plus eps.

    The batch is the n records of all shards; the std divides by n. The batch's mean is not
    subtracted: it is zero, because each group's is.

    Source: Hu et al., "REINFORCE++", arXiv:2501.03262, REINFORCE++ with baseline.
    """

    def __init__(self, config: ReinforcePpBaselineConfig) -> None:
        super().__init__(config)
        self._eps = config.eps

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        return _sums([centred(self.rewards(group)) for group in groups])

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        _, std = _mean_and_std(statistics)
        if std == 0:
            return [np.zeros(len(group.rewards)) for group in groups]
        return [centred(self.rewards(group)) / (std + self._eps) for group in groups]


class Gae:
    """GAE: A_t = delta_t + gamma lambda A_{t+1}, where delta_t = r_t + gamma V_{t+1} - V_t.

    The value after the last action is 0. Masked actions are not the policy's: the recursion skips
    them and ignores their rewards and values, so a reward must be on a trained action.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", arXiv:1506.02438, Eq. 16.
    """

    def __init__(self, config: GaeConfig) -> None:
        self.group_size = config.group_size
        self.requires = config.requires()
        self._gamma = config.gamma
        self._decay = config.gamma * config.lam

    def per_action(
        self, rewards: np.ndarray, values: np.ndarray, mask: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (advantages, returns) of one record, float64[A] each, 0 at masked actions.

        rewards: float[A].
        values: float[A], V_t.
        mask: bool[A] or uint8[A], nonzero at trained actions.
        returns are advantages + values: what a critic learns.
        """
        trained = np.flatnonzero(mask)
        kept_values = np.asarray(values, dtype=np.float64)[trained]
        deltas = np.asarray(rewards, dtype=np.float64)[trained] - kept_values
        deltas[:-1] += self._gamma * kept_values[1:]
        advantage = 0.0
        kept = np.empty(len(trained))
        for t in range(len(trained) - 1, -1, -1):
            advantage = deltas[t] + self._decay * advantage
            kept[t] = advantage
        advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
        advantages[trained] = kept
        returns[trained] = kept + kept_values
        return advantages, returns


def centred(rewards: np.ndarray) -> np.ndarray:
    """Returns float64[S]: rewards less their mean.

    They are exactly 0 when all rewards are equal; the computed mean may differ from them by
    rounding, so that case is not left to the subtraction.
    """
    if not rewards.size or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    centred: np.ndarray = rewards - rewards.mean()
    return centred


def _leave_one_out(rewards: np.ndarray) -> np.ndarray:
    if rewards.size < 2:
        return np.zeros_like(rewards)
    return centred(rewards) * (rewards.size / (rewards.size - 1))


def _sums(groups: list[np.ndarray]) -> np.ndarray:
    """Returns float64[3]: number, sum and sum of squares, each of which adds up over shards."""
    values = np.concatenate(groups) if groups else np.zeros(0)
    return np.array([values.size, values.sum(), np.square(values).sum()])


def _mean_and_std(sums: np.ndarray) -> tuple[float, float]:
    """Returns mean and std (dividing by n) from ``_sums``; a std that is only rounding is 0."""
    n, total, squares = (float(x) for x in sums)
    if n == 0:
        return 0.0, 0.0
    mean = total / n
    mean_square = squares / n
    variance = mean_square - mean * mean
    return mean, math.sqrt(variance) if variance > _ROUNDING * mean_square else 0.0
