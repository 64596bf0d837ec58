"""Measures how far raters agree, beyond what chance would give, with bootstrap intervals.

Units are drawn again with replacement (Efron, 1979), so an interval says what other pairs by the
same raters would have shown; it says nothing about other raters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: unit -> rater -> category
Table = Mapping[str, Mapping[str, str]]
_LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number with its interval; all are NaN where it is undefined, as if all said the same.

    low, high: 2.5th and 97.5th percentile of the bootstrap, over samples where it is defined.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Says how far raters agree.

    raters, units: how many there are; units with one rater say nothing and are not counted.
    equal: share of pairs of raters, over all units, who said the same.
    kappa: Cohen's kappa; None unless there are exactly two raters.
    alpha: Krippendorff's alpha for nominal data.
    """

    raters: int
    units: int
    equal: Measure
    kappa: Measure | None
    alpha: Measure


def agreement(table: Table, seed: int = 0, samples: int = 2000) -> Agreement:
    """Measures agreement over all units that at least two raters have judged.

    seed, samples: of the bootstrap.
    """
    shared = {unit: said for unit, said in table.items() if len(said) >= 2}
    raters = sorted({rater for said in shared.values() for rater in said})
    counts = _counts(list(shared.values()))
    rng = np.random.default_rng(seed)
    units = len(shared)
    # Each sample as how often each unit was drawn, int64[samples, units]; the first is all of them.
    drawn = rng.multinomial(units, np.full(units, 1 / units), samples) if units else np.ones((0, 0))
    weights = np.vstack([np.ones((1, units)), drawn])
    kappa = None
    if len(raters) == 2:
        pairs = [(said[raters[0]], said[raters[1]]) for said in shared.values()]
        kappa = _measure(_kappa(pairs, weights))
    return Agreement(
        raters=len(raters),
        units=units,
        equal=_measure(_equal(counts, weights)),
        kappa=kappa,
        alpha=_measure(_alpha(counts, weights)),
    )


def _counts(units: Sequence[Mapping[str, str]]) -> np.ndarray:
    """Counts raters by unit and category, float64[units, categories]."""
    categories = sorted({category for said in units for category in said.values()})
    counts = np.zeros((len(units), len(categories)))
    for row, said in enumerate(units):
        for category in said.values():
            counts[row, categories.index(category)] += 1
    return counts


def _equal(counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the share of equal pairs, float64[samples]."""
    raters = counts.sum(1)
    equal = (counts * (counts - 1)).sum(1)
    return _divided(weights @ equal, weights @ (raters * (raters - 1)))


def _alpha(counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns Krippendorff's alpha for nominal data, float64[samples].

    alpha = 1 - (n - 1) D / E, where n counts judgements, D is the sum over units u and c != k of
    n_uc n_uk / (m_u - 1), and E the sum of n_c n_k over c != k (Krippendorff, Computing
    Krippendorff's Alpha-Reliability, 2011, with values missing).
    """
    raters = counts.sum(1)
    unequal = (raters**2 - (counts**2).sum(1)) / (raters - 1)
    observed = weights @ unequal
    of_category = weights @ counts
    n = of_category.sum(1)
    expected = n**2 - (of_category**2).sum(1)
    return 1 - _divided((n - 1) * observed, expected)


def _kappa(pairs: Sequence[tuple[str, str]], weights: np.ndarray) -> np.ndarray:
    """Returns Cohen's kappa, float64[samples]: (p_o - p_e) / (1 - p_e), Cohen, 1960."""
    categories = sorted({category for pair in pairs for category in pair})
    first, second = (
        np.array([[pair[i] == category for category in categories] for pair in pairs], float)
        for i in (0, 1)
    )
    n = weights.sum(1)
    observed = _divided(weights @ (first * second).sum(1), n)
    expected = _divided(((weights @ first) * (weights @ second)).sum(1), n**2)
    return _divided(observed - expected, 1 - expected)


def _divided(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divides; NaN where the denominator is zero."""
    safe = np.where(denominator == 0, 1.0, denominator)
    return np.where(denominator == 0, np.nan, numerator / safe)


def _measure(values: np.ndarray) -> Measure:
    """Makes a measure of the value of all units and those of the samples behind it."""
    drawn = values[1:][np.isfinite(values[1:])]
    low, high = (
        np.percentile(drawn, [50 * (1 - _LEVEL), 50 * (1 + _LEVEL)])
        if drawn.size
        else (np.nan, np.nan)
    )
    return Measure(value=float(values[0]), low=float(low), high=float(high))
