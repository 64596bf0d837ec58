"""Models how long records take, from a prior and from measured seconds of ranks.

A rank's seconds are a fixed time and non-negative multiples of what its records add up to:

    seconds = fixed + per_record N + per_token sum(L) + per_pair sum(L^2) + per_extra sum(extra)

for N records of L tokens. Where a prompt of P tokens is encoded once for k records of its group,
they share its P and P^2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from gcore_core.contract.algorithms import Work

#: The weight that measurements keep with each later step: the latest twenty or so decide.
_KEEP = 0.95
#: A measurement's squared error (5 %) over the squared error of a term of the prior, which may be
#: wrong by all of what it adds up to.
_TRUST = 0.05**2


def features(work: Work, shared: bool) -> np.ndarray:
    """Returns float64[N, 4], for each record: 1, its tokens, their square, its extra work.

    The square counts every pair of tokens twice.

    shared: whether the records of a group share the cost of their prompt.
    """
    lengths = work.lengths.astype(np.float64)
    prompt = work.prompt.astype(np.float64)
    sharers: np.ndarray = np.ones(len(work))
    if shared:
        _, group, sizes = np.unique(work.group, return_inverse=True, return_counts=True)
        sharers = sizes[group]
    # Of L^2 the part P^2 is the prompt's own, which k records share.
    pairs = lengths**2 - prompt**2 + prompt**2 / sharers
    return np.stack([np.ones(len(work)), work.actions + prompt / sharers, pairs, work.extra], 1)


class CostModel:
    """Computes costs of records, at first from a prior, then from measured seconds too.

    The prior fills in what measurements leave open: well balanced ranks differ too little to tell
    the terms apart.

    terms: float64[5]: fixed, per record, per token, per pair, per extra; in seconds once something
        was measured, before that relative to the cost of one token.
    """

    def __init__(self, hidden_size: int, shared: bool) -> None:
        self._shared = shared
        self._prior = np.array([0.0, 0.0, 1.0, 1 / (12 * hidden_size), 1.0])
        self.terms = self._prior
        # Least squares over ranks with features x and measured seconds y needs only these sums:
        self._gram = np.zeros((5, 5))  # of x x'
        self._moment = np.zeros(5)  # of x y
        self._count = 0.0  # of ranks
        # Of measured seconds y and predicted ones p: count, sums of y, y^2 and (y - p)^2.
        self._prediction_sums = np.zeros(4)

    def costs(self, work: Work) -> np.ndarray:
        """Returns the records' costs, float64[N], in any unit and without the fixed time."""
        return np.asarray(features(work, self._shared) @ self.terms[1:])

    def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
        """See ``LearnsCosts.observe``."""
        rows = np.array([np.append(1.0, features(load, self._shared).sum(0)) for load in loads])
        if self._count:
            error = seconds - rows @ self.terms
            new = [np.ones(len(seconds)), seconds, seconds**2, error**2]
            self._prediction_sums = _KEEP * self._prediction_sums + np.sum(new, 1)
        self._gram = _KEEP * self._gram + rows.T @ rows
        self._moment = _KEEP * self._moment + rows.T @ seconds
        self._count = _KEEP * self._count + len(seconds)
        self._fit()
        # 1 - errors / spread is R^2, the share of the seconds' variance that was predicted.
        count, total, squares, errors = self._prediction_sums
        spread = squares - total**2 / max(count, 1.0)
        return float(1 - errors / spread) if spread > 1e-9 * squares else None

    def state(self) -> dict[str, Any]:
        """Returns all that was measured; the terms follow from it and from the prior."""
        arrays = {"gram": self._gram, "moment": self._moment, "told": self._prediction_sums}
        return {"count": self._count, **{name: array.tolist() for name, array in arrays.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from the measurements of a ``state``; the prior stays this model's own."""
        self._count = float(state["count"])
        self._gram, self._moment, self._prediction_sums = (
            np.array(state[name]) for name in ("gram", "moment", "told")
        )
        if self._count:
            self._fit()

    def _fit(self) -> None:
        """Fits the terms by least squares, with the prior as one more measurement of each term.

        The prior is first scaled so that it predicts the measured seconds best.
        """
        size = self._prior @ self._gram @ self._prior
        if not size > 0:
            return  # no rank had a token
        prior = self._prior * (self._prior @ self._moment / size)
        # Terms whose feature never occurred keep the prior. The others are fitted in units in which
        # each feature has norm 1, so that one number, `prior_weight`, weighs the prior of all of
        # them.
        has_data = self._gram.diagonal() > 0
        norms = np.sqrt(self._gram.diagonal()[has_data])
        prior_weight = _TRUST / self._count
        gram = self._gram[np.ix_(has_data, has_data)] / np.outer(
            norms, norms
        ) + prior_weight * np.eye(len(norms))
        terms = prior.copy()
        terms[has_data] = (
            nonnegative(
                gram, self._moment[has_data] / norms + prior_weight * prior[has_data] * norms
            )
            / norms
        )
        # Ranks with equal work look as if all of their time was fixed. With such terms every way to
        # deal records would seem equally good, so the prior is kept.
        self.terms = terms if terms[has_data][1:].any() else prior


def nonnegative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Returns the x >= 0 with the least x'Gx / 2 - m'x, for a positive definite G of a few rows.

    Some entries of x are zero, and the others solve their part of Gx = m. So x is the best of all
    such solutions that have no negative entry, and all 2^n choices of zeros are tried.
    """
    best = np.zeros(len(moment))
    least = 0.0
    for is_free in product((False, True), repeat=len(moment)):
        free = np.flatnonzero(is_free)
        solution = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        value = -float(moment[free] @ solution) / 2
        if (solution >= 0).all() and value < least:
            best = np.zeros(len(moment))
            least = value
            best[free] = solution
    return best
