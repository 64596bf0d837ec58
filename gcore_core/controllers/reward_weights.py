"""Makes one number from the named rewards of a record.

Each reward is normalised as its settings say, then weighted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gcore_core.contract.algorithms import are_equal
from gcore_core.contract.job_settings import Reward
from gcore_core.contract.records import Header

#: Values of ``Reward.normalise`` besides "none". GROUP: less the group's mean, over its standard
#: deviation. BATCH: the same over every group of the step. The standard deviation is that of the
#: population: it divides by the number of values. Nothing is added to it, so a normalised reward
#: has deviation 1 whatever its scale. Where all values are equal both make 0.
GROUP = "group"
BATCH = "batch"


def statistics(groups: Sequence[Sequence[Header]], weighings: Mapping[str, Reward]) -> np.ndarray:
    """Sums up the rewards that are normalised by batch, as float64[K, 3].

    A row holds the count, the sum and the sum of squares of one reward. The K rewards are in order
    of their names; K is 0 where no reward is normalised so. ``rewards_of`` needs the sum over the
    shards.
    """
    rows = []
    for name in _batched(weighings):
        values = np.array(
            [h.rewards[name] for group in groups for h in group if name in h.rewards], np.float64
        )
        rows.append([len(values), values.sum(), np.square(values).sum()])
    return np.array(rows, np.float64).reshape(-1, 3)


def rewards_of(
    group: Sequence[Header], weighings: Mapping[str, Reward], totals: np.ndarray | None = None
) -> np.ndarray:
    """Returns the weighted sum of each record's rewards, float64[records].

    A reward that a record does not have, because it was skipped, adds nothing.

    weighings: reward -> its settings.
    totals: float64[K, 3], what ``statistics`` returned, summed over the shards. None: no reward is
        normalised. A filter gets such rewards, so that its verdict on a group does not depend on
        other groups.
    """
    sums = np.zeros(len(group))
    moments = dict(zip(_batched(weighings), totals, strict=True)) if totals is not None else {}
    for name, how in weighings.items():
        has = np.array([name in header.rewards for header in group], bool)
        values = np.array(
            [header.rewards[name] for header in group if name in header.rewards], np.float64
        )
        if totals is not None and how.normalise == GROUP:
            values = _standardised_in_group(values)
        elif totals is not None and how.normalise == BATCH:
            values = _standardised_in_batch(values, *_mean_and_deviation(*moments[name]))
        sums[has] += how.weight * values
    return sums


def _batched(weighings: Mapping[str, Reward]) -> list[str]:
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
