"""How many groups dynamic sampling issues: a posterior over the keep rate, updated as groups
finish. Pure.

Groups that finish early are short, and short ones are kept at a rate of their own. So the prior is
not one rate but one for each quarter of a step's groups in the order in which they finish, as the
steps before had it, and a group that has finished is compared with its own quarter. What that says
of the rate as a whole makes a Beta posterior.

Enough are issued that the groups still missing come with a margin of standard deviations:
``margin`` of the chance that each group has, ``doubt`` of the rate itself, which early groups will
tell in time. A refill costs the less the
earlier it is: at first one is made as soon as ``eager`` standard deviations of chance are not
covered, later only when the step is more and more likely to fall short, since it would wait for
whole new answers either way. The doubt of the
rate speaks against a refill, then for a large one: what the first few groups say is soon known
    better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

QUARTERS = 4


def groups_missing(needed: int, kept: int, finished: int, in_flight: int, rule: np.ndarray) -> int:
    """How many groups to issue now, see ``KeepRate.missing``. rule: float64[4 + quarters]: weight
    of the prior in groups, margin, doubt, eager, keep rate of each quarter. Plain arithmetic, so
    that a compiler may take it as it is.
    """
    lacking = needed - kept
    if lacking <= 0:
        return 0
    weight, rates = rule[0], rule[4:]
    quarters, mean = len(rates), float(np.sum(rates)) / len(rates)
    flight, low, high = in_flight, in_flight, in_flight + 20 * needed
    share = finished / max(finished + in_flight, 1)
    chances, doubts, asked = rule[3] - 2 * (1 + rule[3]) * share, -rule[2], False
    # is it enough to have ``flight`` in flight? As many as there are; then by bisection, with the
    # margin
    while True:
        done, early = quarters * finished / max(finished + flight, 1), 0.0  # in quarters
        for i in range(quarters):
            early += rates[i] * min(max(done - i, 0.0), 1.0)
        # What the finished ones would have kept, had they been like all.
        seen = min(kept * mean * done / early, float(finished)) if early > 0 else 0.0
        rate = min(max((weight * mean + seen) / (weight + finished), 0.01), 1.0)
        doubt = rate * (1 - rate) / (weight + finished + 1)
        late = min(
            max(rate * (quarters * mean - early) / max((quarters - done) * mean, 1e-9), 0.01), 1.0
        )
        least = flight * late - chances * math.sqrt(flight * late * (1 - late))
        enough = flight > 0 and least - doubts * flight * late / rate * math.sqrt(doubt) >= lacking
        if not asked:
            if enough:
                return 0
            asked, chances, doubts = True, max(rule[1], chances), rule[2]
        elif enough:
            high = flight
        else:
            low = flight + 1
        if low >= high:
            return int(high - in_flight)
        flight = (low + high) // 2


@dataclass(frozen=True, kw_only=True)
class KeepRate:
    """What is believed of the keep rate before a step.

    rates: of each quarter of the groups in the order they finish. change2: mean square of how far
    the rate moved from one step to the next, which says how many groups the prior is worth. known:
    no doubt about the rate; what other rules are compared with.
    """

    rates: tuple[float, ...] = (0.5,) * QUARTERS
    change2: float = 0.01
    margin: float = 2.0
    doubt: float = 1.0
    eager: float = -0.5
    known: bool = False

    @property
    def mean(self) -> float:
        return float(np.mean(self.rates))

    @property
    def weight(self) -> float:
        """Groups that the prior is worth."""
        if self.known:
            return 1e9
        return float(np.clip(self.mean * (1 - self.mean) / max(self.change2, 1e-6), 8.0, 1000.0))

    def rule(self) -> np.ndarray:
        return np.array([self.weight, self.margin, self.doubt, self.eager, *self.rates])

    def missing(self, *, needed: int, kept: int, finished: int, in_flight: int) -> int:
        """How many groups to issue now: ``needed`` must be kept, ``kept`` of the ``finished`` ones
        are, and ``in_flight`` are issued and not finished.
        """
        return groups_missing(needed, kept, finished, in_flight, self.rule())

    def after(self, kept: Sequence[int], finished: Sequence[int]) -> KeepRate:
        """The belief before the next step. kept, finished: groups of each quarter in the order they
        finished, summed over shards.
        """
        groups = np.asarray(finished, float)
        if not groups.sum():
            return self
        # A quarter has few groups: how it differs from the whole is learned from many steps.
        whole = float(np.clip(np.sum(kept) / groups.sum(), 0.01, 1.0))
        told = (np.asarray(kept) + 8 * whole) / (groups + 8) / whole
        shape = 0.8 * np.asarray(self.rates) / self.mean + 0.2 * told
        rates = np.clip(whole * shape / shape.mean(), 0.01, 1.0)
        moved2 = max((whole - self.mean) ** 2 - whole * (1 - whole) / groups.sum(), 0.0)
        return replace(
            self, rates=tuple(map(float, rates)), change2=0.7 * self.change2 + 0.3 * moved2
        )


def by_quarter(values: np.ndarray) -> list[int]:
    """Sums of the four quarters of what is told in the order of finishing; ``np.ones`` counts
    them.
    """
    return [int(part.sum()) for part in np.array_split(np.asarray(values, np.int64), QUARTERS)]
