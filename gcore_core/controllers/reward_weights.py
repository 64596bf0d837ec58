"""Puts the rewards of a group into numbers: each by itself, and their weighted sum.

Each reward is normalised as its settings say, then weighted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gcore_core.contract.algorithms import GroupScalars, are_equal
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.job_settings import RewardSettings
from gcore_core.contract.lineage import name_of
from gcore_core.contract.records import Header
from gcore_core.contract.scorer import LARGEST_VALUE

#: Values of ``Reward.normalise`` besides "none". GROUP: less the group's mean, over its standard
#: deviation. BATCH: the same over every group of the step. The standard deviation is that of the
#: population: it divides by the number of values. Nothing is added to it, so a normalised reward
#: has deviation 1 whatever its scale. Where all values are equal both make 0.
GROUP = "group"
BATCH = "batch"


def statistics(
    groups: Sequence[Sequence[Header]], weighings: Mapping[str, RewardSettings]
) -> np.ndarray:
    """Sums up the rewards that are normalised by batch, as float64[K, 3].

    A row holds the count, the sum and the sum of squares of one reward. The K rewards are in order
    of their names; K is 0 where no reward is normalised so. ``named_rewards`` needs the sum over
    the shards.
    """
    rows = []
    for name in _batched(weighings):
        values = np.array(
            [h.rewards[name] for group in groups for h in group if name in h.rewards], np.float64
        )
        rows.append([len(values), values.sum(), np.square(values).sum()])
    return np.array(rows, np.float64).reshape(-1, 3)


def named_rewards(
    group: Sequence[Header],
    weighings: Mapping[str, RewardSettings],
    totals: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Returns reward -> each record's value of it, float64[records], normalised and not weighted.

    A record that does not have the reward, because it was skipped, has NaN.

    weighings: reward -> its settings.
    totals: float64[K, 3], what ``statistics`` returned, summed over the shards. None: no reward is
        normalised. A filter gets such rewards, so that its verdict on a group does not depend on
        other groups.
    """
    moments = dict(zip(_batched(weighings), totals, strict=True)) if totals is not None else {}
    named = {}
    for name, how in weighings.items():
        column = np.array([header.rewards.get(name, np.nan) for header in group], np.float64)
        has = np.array([name in header.rewards for header in group], bool)
        if totals is not None and how.normalise == GROUP:
            column[has] = _standardised_in_group(column[has])
        elif totals is not None and how.normalise == BATCH:
            mean_and_deviation = _mean_and_deviation(*moments[name])
            column[has] = _standardised_in_batch(column[has], *mean_and_deviation)
        named[name] = column
    return named


def weighted_sum(
    group: Sequence[Header],
    named: Mapping[str, np.ndarray],
    weighings: Mapping[str, RewardSettings],
) -> np.ndarray:
    """Returns the weighted sum of each record's rewards, float64[records].

    A reward that a record does not have adds nothing. Raises ConfigError for a sum that float32
    cannot hold: a trainer would take it for infinite.

    named: what ``named_rewards`` returned.
    """
    sums = np.zeros(len(group))
    with np.errstate(over="ignore", invalid="ignore"):  # looked at below
        for name, column in named.items():
            has = np.array([name in header.rewards for header in group], bool)
            sums[has] += weighings[name].weight * column[has]
    fits = np.abs(sums) <= LARGEST_VALUE  # NaN does not
    if not fits.all():
        place = int(fits.argmin())
        header = group[place]
        weights = ", ".join(f"{name} {weighings[name].weight:g}" for name in header.rewards)
        raise ConfigError(
            f"the weighted sum of the rewards of record {name_of(*header.key)} is "
            f"{sums[place]:g}, too large for a float32.",
            where="rewards",
            why=f"weights: {weights}",
            todo="lower rewards.<name>.weight",
        )
    return sums


def group_scalars(
    group: Sequence[Header],
    weighings: Mapping[str, RewardSettings],
    totals: np.ndarray | None = None,
) -> GroupScalars:
    """Puts a group into numbers: its rewards and its lengths, without scalars.

    weighings, totals: as for ``named_rewards``.
    """
    named = named_rewards(group, weighings, totals)
    return GroupScalars(
        rewards=weighted_sum(group, named, weighings),
        lengths=np.array([header.n_sampled for header in group], np.int64),
        named=named,
        weights={name: weighings[name].weight for name in named},
    )


def _batched(weighings: Mapping[str, RewardSettings]) -> list[str]:
    return sorted(name for name, how in weighings.items() if how.normalise == BATCH)


def _standardised_in_group(values: np.ndarray) -> np.ndarray:
    """Returns (values - mean) / deviation; zeros if the values differ by rounding only."""
    deviation = 0.0 if are_equal(values) else float(values.std())
    if deviation == 0:
        return np.zeros_like(values)
    return np.asarray((values - values.mean()) / deviation)


def _standardised_in_batch(values: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """Returns (values - mean) / deviation; zeros if the deviation is within a sum's rounding.

    The variance is a difference of two sums over all shards, so a deviation below a millionth of
    the mean cannot be told from 0.
    """
    if deviation <= 1e-6 * abs(mean):
        return np.zeros_like(values)
    return np.asarray((values - mean) / deviation)


def _mean_and_deviation(count: float, total: float, squares: float) -> tuple[float, float]:
    mean = total / max(count, 1)
    return mean, math.sqrt(max(squares / max(count, 1) - mean**2, 0.0))
