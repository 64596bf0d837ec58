"""How long records take: a rank's seconds are a fixed time and non-negative multiples of what its
records add up to.

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

#: What a step's measurements count for after the next step: the latest twenty or so decide.
_KEEP = 0.95
#: A measurement's squared error (5 %) over the squared doubt in what a term of the prior adds up to
#: (all of it).
_TRUST = 0.05**2


def features(work: Work, shared: bool) -> np.ndarray:
    """float64[N, 4]: records, tokens, pairs of tokens (twice), extra."""
    lengths, prompt = work.lengths.astype(np.float64), work.prompt.astype(np.float64)
    together: np.ndarray = np.ones(len(work))
    if shared:
        _, group, sizes = np.unique(work.group, return_inverse=True, return_counts=True)
        together = sizes[group]
    pairs = lengths**2 - prompt**2 + prompt**2 / together
    return np.stack([np.ones(len(work)), work.actions + prompt / together, pairs, work.extra], 1)


class CostModel:
    """Costs of records from a prior, then from measured seconds.

    terms float64[5]: fixed, per record, per token, per pair, per extra; in seconds once something
        was measured. A prior
    fills in what measurements leave open: ranks that are well balanced differ too little to tell
        its terms apart.
    """

    def __init__(self, hidden_size: int, shared: bool) -> None:
        self._shared = shared
        self._prior = np.array([0.0, 0.0, 1.0, 1 / (12 * hidden_size), 1.0])
        self.terms = self._prior
        self._gram, self._moment, self._count = np.zeros((5, 5)), np.zeros(5), 0.0
        self._told = np.zeros(
            4
        )  # of measured seconds y and predicted ones p: count, sums of y, y^2 and (y - p)^2

    def costs(self, work: Work) -> np.ndarray:
        """float64[N], in any unit; the fixed time is left out."""
        return np.asarray(features(work, self._shared) @ self.terms[1:])

    def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
        """See ``LearnsCosts.observe``."""
        rows = np.array([np.append(1.0, features(load, self._shared).sum(0)) for load in loads])
        if self._count:
            error = seconds - rows @ self.terms
            new = [np.ones(len(seconds)), seconds, seconds**2, error**2]
            self._told = _KEEP * self._told + np.sum(new, 1)
        self._gram = _KEEP * self._gram + rows.T @ rows
        self._moment = _KEEP * self._moment + rows.T @ seconds
        self._count = _KEEP * self._count + len(seconds)
        self._fit()
        count, total, squares, errors = self._told
        spread = squares - total**2 / max(count, 1.0)
        return float(1 - errors / spread) if spread > 1e-9 * squares else None

    def state(self) -> dict[str, Any]:
        """All that was measured; the terms follow from it and from the prior."""
        arrays = {"gram": self._gram, "moment": self._moment, "told": self._told}
        return {"count": self._count, **{name: array.tolist() for name, array in arrays.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a ``state``; the prior stays this one's."""
        self._count = float(state["count"])
        self._gram, self._moment, self._told = (
            np.array(state[name]) for name in ("gram", "moment", "told")
        )
        if self._count:
            self._fit()

    def _fit(self) -> None:
        """Least squares with the prior as one more measurement of each term, at the scale that
        suits it best.
        """
        size = self._prior @ self._gram @ self._prior
        if not size > 0:
            return  # no rank had a token
        prior = self._prior * (self._prior @ self._moment / size)
        seen = self._gram.diagonal() > 0
        norms = np.sqrt(self._gram.diagonal()[seen])
        doubt = _TRUST / self._count
        gram = self._gram[np.ix_(seen, seen)] / np.outer(norms, norms) + doubt * np.eye(len(norms))
        terms = prior.copy()
        terms[seen] = (
            nonnegative(gram, self._moment[seen] / norms + doubt * prior[seen] * norms) / norms
        )
        # all of it fixed: true of ranks that are alike, and no reason to deal records in just any
        # way
        self.terms = terms if terms[seen][1:].any() else prior


def nonnegative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least x'Gx / 2 - m'x, for a positive definite G of a few rows.

    Some entries of it are zero, and the others solve their part of Gx = m; so it is the best of all
    such solutions that have no negative entry.
    """
    found, least = np.zeros(len(moment)), 0.0
    for chosen in product((False, True), repeat=len(moment)):
        some = np.flatnonzero(chosen)
        part = np.linalg.solve(gram[np.ix_(some, some)], moment[some])
        value = -float(moment[some] @ part) / 2
        if (part >= 0).all() and value < least:
            found, least = np.zeros(len(moment)), value
            found[some] = part
    return found
