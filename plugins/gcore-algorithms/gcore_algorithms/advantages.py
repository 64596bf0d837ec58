"""Rewards to advantages, in numpy: these run in controllers, which have no torch.

Notation: r is a record's reward less its KL penalty; S is the number of records in its group.

Records of a group whose rewards are all equal, but for rounding noise, get exactly 0, except where
the batch's mean is subtracted: under ``ReinforcePp``, and with ``normalise_over: action``. So does
a group that has only one record left after failed rewards: there is nothing to compare it with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np

from gcore_algorithms.config import (
    GaeConfig,
    GdpoConfig,
    GrpoConfig,
    RecordAdvantageConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
)
from gcore_core.contract.algorithms import ActionScalars, GroupScalars, are_equal, is_rounding

#: Added to the variance by which advantages are whitened, so that equal ones stay finite.
_WHITE = 1e-8
#: Every float64 is a whole number of units of 2**-1074, the smallest one.
_UNIT_BITS = 1074
#: 32-bit limbs of a sum of up to 2**46 float64 numbers, in units.
_SUM_LIMBS = 67
#: 32-bit limbs of a sum of as many squares, in units of 2**-2148.
_SQUARES_LIMBS = 133


class RecordAdvantage(ABC):
    """What estimators of level "record" share: the KL penalty in the reward, the final clip, no
    batch statistics.

    group_size: records sampled for each prompt.
    requires: names of the scalars that records need, such as ``kl_k1``.
    """

    def __init__(self, config: RecordAdvantageConfig) -> None:
        self.group_size = config.group_size
        self.requires = config.traits().requires
        self._kl = config.kl
        self._clip = config.clip

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        """Returns what groups of other shards need of these: nothing."""
        return np.zeros(0)

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return clamped(self.unclipped(groups, statistics), self._clip)

    @abstractmethod
    def unclipped(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        """Returns for each group the advantages of its records, float64[S], before the clip."""

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

    def unclipped(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return [standardised_in_group(self.rewards(group), self._eps) for group in groups]


class DrGrpo(RecordAdvantage):
    """Dr. GRPO: r - mean of the group.

    Source: Liu et al., "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2. The
    other half of the method is ``normalise: constant`` in the objective.
    """

    def unclipped(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return [centred(self.rewards(group)) for group in groups]


class Rloo(RecordAdvantage):
    """RLOO: r - mean of the group's other rewards, which is (r - mean of the group) S / (S - 1).

    Source: Ahmadian et al., "Back to Basics", arXiv:2402.14740, section 3; Kool et al., "Buy 4
    REINFORCE Samples, Get a Baseline for Free!" (2019).
    """

    def unclipped(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return [_leave_one_out(self.rewards(group)) for group in groups]


class ReinforcePp(RecordAdvantage):
    """REINFORCE++: (r - mean of the batch) / (std of the batch + eps).

    The batch is the n records of all shards; the std divides by n. With ``normalise_over: record``
    each record counts once in both, whatever its length; with ``action`` as often as it has
    actions, as in libraries that keep one advantage per action.

    Source: Hu et al., "REINFORCE++", arXiv:2501.03262. The paper charges each action with the KL
    that follows it; here a record is charged with its whole KL.
    """

    def __init__(self, config: ReinforcePpConfig) -> None:
        super().__init__(config)
        self._eps = config.eps
        self._over = config.normalise_over

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        return _sums([self.rewards(group) for group in groups], _counts(groups, self._over))

    def unclipped(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        mean, std = _mean_and_std(statistics)
        return _standardised([self.rewards(group) for group in groups], mean, std, self._eps)


class ReinforcePpBaseline(RecordAdvantage):
    """REINFORCE++ with baseline: c = r - mean of the group, over the batch's std of c plus eps.

    The batch is the n records of all shards; the std divides by n. With ``normalise_over: record``
    each record counts once, whatever its length, and the batch's mean of c is zero, because each
    group's is. With ``action`` each action counts, and c loses that mean, which is not zero then.

    Source: Hu et al., "REINFORCE++", arXiv:2501.03262, REINFORCE++ with baseline.
    """

    def __init__(self, config: ReinforcePpBaselineConfig) -> None:
        super().__init__(config)
        self._eps = config.eps
        self._over = config.normalise_over

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        return _sums(self._centred(groups), _counts(groups, self._over))

    def unclipped(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        mean, std = _mean_and_std(statistics)
        mean = mean if self._over == "action" else 0.0
        return _standardised(self._centred(groups), mean, std, self._eps)

    def _centred(self, groups: Sequence[GroupScalars]) -> list[np.ndarray]:
        return [centred(self.rewards(group)) for group in groups]


class Gdpo:
    """GDPO: each named reward is normalised in its group, then their weighted sum over the batch.

    With r_k the k-th reward of a record and w_k its weight:

        s = sum over k of w_k (r_k - mean of the group) / (std of the group + eps)
        A = (s - mean of the batch) / (std of the batch + eps)

    The group's std divides by S - 1, the batch's by n. With ``normalise_over: record`` each record
    counts once in the batch, and its mean of s is zero, because each group's is; so it is not
    subtracted, and a group of equal rewards gets exactly 0. With ``action`` each action counts.

    A reward that is equal in its group adds nothing, nor does one that a record lacks: it is
    normalised over the group's records that have it.

    Source: Liu et al., "GDPO: Group reward-Decoupled Normalization Policy Optimization for
    Multi-reward RL Optimization", arXiv:2601.05242.
    """

    def __init__(self, config: GdpoConfig) -> None:
        self.group_size = config.group_size
        self.requires: frozenset[str] = frozenset()
        self._eps = config.eps
        self._over = config.normalise_over
        self._clip = config.clip

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        return _sums([self._sum(group) for group in groups], _counts(groups, self._over))

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        mean, std = _mean_and_std(statistics)
        mean = mean if self._over == "action" else 0.0
        sums = [self._sum(group) for group in groups]
        return clamped(_standardised(sums, mean, std, self._eps), self._clip)

    def _sum(self, group: GroupScalars) -> np.ndarray:
        """Returns s of each record, float64[S]."""
        total = np.zeros(len(group.rewards))
        for name, values in group.named.items():
            has = ~np.isnan(values)
            total[has] += group.weights[name] * standardised_in_group(values[has], self._eps)
        return total


class Gae:
    """GAE: A_t = delta_t + gamma lambda A_{t+1}, where delta_t = r_t + gamma V_{t+1} - V_t.

    V_t is the value before action t. After the last action it is 0 where the policy ended the
    record, and the critic's where it was cut, since then more reward could follow (``bootstrap``).
    Masked actions are not the policy's: the recursion skips them and ignores their values. The
    record's reward comes with the last trained action; with ``kl``, each action costs
    kl (logp_t - ref_logp_t) besides, where logp is of the weights that sampled it.

    With ``whiten`` the policy's advantages are (A - mean) / sqrt(variance + 1e-8), over all trained
    actions of a step. Returns are A + V of before that.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", arXiv:1506.02438, Eq. 16; the cost of each action: Ouyang et al., "Training
    language models to follow instructions with human feedback", arXiv:2203.02155, Section 3.5.
    """

    def __init__(self, config: GaeConfig) -> None:
        self.group_size = config.group_size
        self.requires = config.traits().requires
        self._config = config

    def per_action(self, record: ActionScalars) -> tuple[np.ndarray, np.ndarray]:
        """Returns (advantages, returns) of one record, float64[A] each, 0 at masked actions."""
        trained = np.flatnonzero(record.mask)
        advantages = np.zeros(len(record.mask))
        returns = np.zeros(len(record.mask))
        if len(trained):
            values = np.asarray(record.columns["values"], np.float64)[trained]
            advantages[trained] = self._discounted(self._errors(record, trained, values))
            returns[trained] = advantages[trained] + values
        return advantages, returns

    def _errors(self, record: ActionScalars, trained: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Returns delta_t of each trained action, float64[n].

        trained: int64[n], their places.
        values: float64[n], V_t.
        """
        config = self._config
        rewards = np.zeros(len(trained))
        rewards[-1] = record.reward
        if config.kl:
            logp, ref_logp = (record.columns[name][trained] for name in ("logp", "ref_logp"))
            rewards -= config.kl * (logp - ref_logp)
        is_open = record.truncated and config.bootstrap
        after = record.columns["next_values"][-1] if is_open else 0.0
        errors: np.ndarray = rewards + config.gamma * np.append(values[1:], after) - values
        return errors

    def _discounted(self, errors: np.ndarray) -> np.ndarray:
        """Returns A_t of each trained action, float64[n], of its delta_t."""
        decay = self._config.gamma * self._config.lam
        advantages = np.empty(len(errors))
        advantage = 0.0
        for t in range(len(errors) - 1, -1, -1):
            advantage = errors[t] + decay * advantage
            advantages[t] = advantage
        return advantages

    def statistics(self, advantages: np.ndarray) -> np.ndarray:
        """Returns count, sum and sum of squares, float64[3]; float64[0] without ``whiten``."""
        if not self._config.whiten:
            return np.zeros(0)
        return np.array([advantages.size, advantages.sum(), (advantages**2).sum()], np.float64)

    def of(self, advantages: np.ndarray, statistics: np.ndarray) -> np.ndarray:
        """Returns the advantages of a record's trained actions, whitened if that is asked for."""
        if not self._config.whiten or not statistics.size or not statistics[0]:
            return advantages
        count, total, squares = statistics
        mean = total / count
        variance = max(squares / count - mean**2, 0.0)
        whitened: np.ndarray = (advantages - mean) / math.sqrt(variance + _WHITE)
        return whitened


def centred(rewards: np.ndarray) -> np.ndarray:
    """Returns float64[S]: rewards less their mean.

    They are exactly 0 when all rewards are equal but for rounding; the computed mean may differ
    from them by rounding, so that case is not left to the subtraction.
    """
    if are_equal(rewards):
        return np.zeros_like(rewards)
    centred: np.ndarray = rewards - rewards.mean()
    return centred


def standardised_in_group(rewards: np.ndarray, eps: float) -> np.ndarray:
    """Returns float64[S]: (rewards - mean) / (std + eps), where the std divides by S - 1.

    It is 0 for rewards that are equal but for rounding.
    """
    differences = centred(rewards)
    deviation = differences.std(ddof=1) if differences.any() else 0.0
    if deviation == 0:
        return np.zeros_like(differences)
    standardised: np.ndarray = differences / (deviation + eps)
    return standardised


def clamped(advantages: list[np.ndarray], clip: float | None) -> list[np.ndarray]:
    """Returns the advantages clamped to [-clip, clip]; as they are where it is None."""
    if clip is None:
        return advantages
    return [np.clip(values, -clip, clip) for values in advantages]


def _leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Returns float64[S]: rewards less the mean of the others, 0 for a record that is alone."""
    if rewards.size < 2:
        return np.zeros_like(rewards)
    return centred(rewards) * (rewards.size / (rewards.size - 1))


# -- statistics of the batch -----------------------------------------------------------------------


def _counts(groups: Sequence[GroupScalars], over: Literal["record", "action"]) -> list[np.ndarray]:
    """Returns for each group int64[S]: how often each of its records counts in the batch."""
    if over == "action":
        return [group.lengths for group in groups]
    return [np.ones(len(group.rewards), np.int64) for group in groups]


def _standardised(
    values: list[np.ndarray], mean: float, std: float, eps: float
) -> list[np.ndarray]:
    """Returns (values - mean) / (std + eps) of each group; zeros where the std is 0."""
    if std == 0:
        return [np.zeros_like(of_group) for of_group in values]
    return [(of_group - mean) / (std + eps) for of_group in values]


def _sums(groups: list[np.ndarray], counts: list[np.ndarray]) -> np.ndarray:
    """Returns the number of values, their sum and the sum of their squares, without rounding.

    A variance from rounded sums is lost where the values lie close together and far from 0: at a
    std of a millionth of the mean, sums in float64 have no digit left for it. Two passes, first for
    the mean, would need two rounds of messages. So both sums are exact integers, cut into limbs of
    32 bits, which float64 adds up exactly over as many as 2**21 shards.

    groups: float64[S] each, the values.
    counts: int64[S] each, how often a value counts.
    Returns float64[1 + 67 + 133]: the number, then the limbs of both sums, lowest first. Every
    entry adds up over the shards.
    """
    values = np.concatenate(groups).tolist() if groups else []
    times: list[int] = np.concatenate(counts).tolist() if counts else []
    units = [_units(value) for value in values]
    total = sum(count * unit for count, unit in zip(times, units, strict=True))
    squares = sum(count * unit * unit for count, unit in zip(times, units, strict=True))
    return np.concatenate(
        [[sum(times)], _limbs(total, _SUM_LIMBS), _limbs(squares, _SQUARES_LIMBS)]
    )


def _mean_and_std(sums: np.ndarray) -> tuple[float, float]:
    """Returns mean and std (dividing by n) from ``_sums``; a std that is only rounding is 0."""
    n = int(sums[0])
    if n == 0:
        return 0.0, 0.0
    total = _integer(sums[1 : 1 + _SUM_LIMBS])
    squares = _integer(sums[1 + _SUM_LIMBS :])
    # all three in units, times n: integers are divided once, at the end
    n_units = n << _UNIT_BITS
    mean = total / n_units
    std = math.isqrt(n * squares - total * total) / n_units
    root_mean_square = math.isqrt(n * squares) / n_units
    return mean, 0.0 if is_rounding(std, root_mean_square) else std


def _units(value: float) -> int:
    """Returns a float64 in units of 2**-1074, exactly."""
    numerator, denominator = value.as_integer_ratio()  # the denominator is a power of 2
    return numerator << (_UNIT_BITS - denominator.bit_length() + 1)


def _limbs(number: int, count: int) -> np.ndarray:
    """Returns float64[count]: digits to the base 2**32, lowest first, each with the sign."""
    digits = np.frombuffer(abs(number).to_bytes(4 * count, "little"), "<u4").astype(np.float64)
    return -digits if number < 0 else digits


def _integer(limbs: np.ndarray) -> int:
    """Returns the number of ``_limbs``, or the sum of those of several shards."""
    return sum(int(limb) << (32 * place) for place, limb in enumerate(limbs.tolist()))
