"""Rewards to advantages, in numpy: these run in controllers, which have no torch.

Notation: r is a record's reward less its KL penalty; S is the number of records in its group.

Records of a group whose rewards are all equal, but for rounding noise, get exactly 0, except under
``ReinforcePp``, whose baseline is the batch. So does a group that has only one record left after
failed rewards: there is nothing to compare it with.
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
from gcore_core.contract.algorithms import ActionScalars, GroupScalars, are_equal, is_rounding

#: Added to the variance by which advantages are whitened, so that equal ones stay finite.
_WHITE = 1e-8
#: Every float64 is a whole number of units of 2**-1074, the smallest one.
_UNIT_BITS = 1074
#: 32-bit limbs of a sum of up to 2**46 float64 numbers, in units.
_SUM_LIMBS = 67
#: 32-bit limbs of a sum of as many squares, in units of 2**-2148.
_SQUARES_LIMBS = 133


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
        """Returns what groups of other shards need of these: nothing."""
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
        deviation = centred_rewards.std(ddof=1) if centred_rewards.any() else 0.0
        if deviation == 0:
            return np.zeros_like(centred_rewards)
        advantages: np.ndarray = centred_rewards / (deviation + self._eps)
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

    The batch is the n records of all shards; the std divides by n. Each record counts once,
    whatever its length: others take mean and std over actions, where long records count more.

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

    The batch is the n records of all shards; the std divides by n. Each record counts once,
    whatever its length. The batch's mean is not subtracted: it is zero, because each group's is.

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
        self.requires = config.requires()
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


def _leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Returns float64[S]: rewards less the mean of the others, 0 for a record that is alone."""
    if rewards.size < 2:
        return np.zeros_like(rewards)
    return centred(rewards) * (rewards.size / (rewards.size - 1))


# -- statistics of the batch -----------------------------------------------------------------------


def _sums(groups: list[np.ndarray]) -> np.ndarray:
    """Returns the number of rewards, their sum and the sum of their squares, without rounding.

    A variance from rounded sums is lost where the rewards lie close together and far from 0: at a
    std of a millionth of the mean, sums in float64 have no digit left for it. Two passes, first for
    the mean, would need two rounds of messages. So both sums are exact integers, cut into limbs of
    32 bits, which float64 adds up exactly over as many as 2**21 shards.

    float64[1 + 67 + 133]: the number, then the limbs of both sums, lowest first. Every entry adds
    up over the shards.
    """
    values = np.concatenate(groups) if groups else np.zeros(0)
    units = [_units(value) for value in values.tolist()]
    total = _limbs(sum(units), _SUM_LIMBS)
    squares = _limbs(sum(unit * unit for unit in units), _SQUARES_LIMBS)
    return np.concatenate([[len(units)], total, squares])


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
