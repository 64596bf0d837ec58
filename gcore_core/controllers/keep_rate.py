"""How many groups dynamic sampling issues: a posterior over the keep rate, updated as groups
finish. Pure.

Groups that finish early are short, and short ones are kept at a rate of their own. So the prior is
not one rate but one for each quarter of a step's groups in the order in which they finish, as the
steps before had it, and a group that has finished is compared with its own quarter. What that says
of the rate as a whole makes a Beta posterior.

Enough are issued that the groups still missing come with a margin of standard deviations:
``margin`` of the chance that each group has, ``doubt`` of the rate itself, which early groups will
tell in time.

A refill costs the less the earlier it is. At first one is made as soon as ``eager`` standard
deviations of chance are not covered. Later it is made only when the step is more and more likely to
fall short, since it would wait for whole new answers either way. The doubt of the rate speaks
against a refill, then for a large one: what the first few groups say is soon known better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

QUARTERS = 4


def groups_missing(needed: int, kept: int, finished: int, in_flight: int, rule: np.ndarray) -> int:
    """How many groups to issue now, see ``KeepRate.missing``. Plain arithmetic, like ``covers``, so
    that a compiler may take both as they are.

    rule: float64[4 + quarters]: weight of the prior in groups, margin, doubt, eager, keep rate of
        each quarter.
    """
    lacking = needed - kept
    if lacking <= 0:
        return 0
    margin = rule[1]
    doubt = rule[2]
    eager = rule[3]

    # First: is what is in flight enough? A lax test, since a refill that turns out needless is a
    # waste: deviations below zero count on luck. With -0.5 for ``eager`` the deviations of chance
    # go from -0.5, when nothing has finished, to -1.5, when all has.
    share = finished / max(finished + in_flight, 1)
    chances = eager - 2 * (1 + eager) * share
    if covers(in_flight, lacking, kept, finished, rule, chances, -doubt):
        return 0

    # It is not: the fewest that are enough by a strict test, since the next refill would come too
    # late. By bisection; more than 20 times what is needed are never issued at once.
    strict = max(margin, chances)
    low = in_flight
    high = in_flight + 20 * needed
    while low < high:
        flight = (low + high) // 2
        if covers(flight, lacking, kept, finished, rule, strict, doubt):
            high = flight
        else:
            low = flight + 1
    return int(high - in_flight)


def covers(
    flight: int,
    lacking: int,
    kept: int,
    finished: int,
    rule: np.ndarray,
    chances: float,
    doubts: float,
) -> bool:
    """Whether ``flight`` groups in flight are enough for the ``lacking`` ones, when ``kept`` of the
    ``finished`` ones were kept.

    chances: standard deviations of chance that must be covered: each group is kept or not.
    doubts: standard deviations of the keep rate itself, which is only estimated.
    """
    if flight <= 0:
        return False
    weight = rule[0]
    rates = rule[4:]
    quarters = len(rates)
    mean = float(np.sum(rates)) / quarters

    # The finished ones were the first: so many quarters of the step (1.5, say), and so many would
    # have been kept of one group a quarter by the prior.
    done = quarters * finished / max(finished + flight, 1)
    early = 0.0
    for i in range(quarters):
        early += rates[i] * min(max(done - i, 0.0), 1.0)

    # How many of the finished ones had been kept, had they been like the average of all quarters.
    seen = min(kept * mean * done / early, float(finished)) if early > 0 else 0.0
    # The posterior of the rate over all quarters: a Beta distribution's mean and variance. Rates
    # are at least 0.01, so that a filter that has kept nothing yet does not make everything issue.
    rate = min(max((weight * mean + seen) / (weight + finished), 0.01), 1.0)
    variance = rate * (1 - rate) / (weight + finished + 1)
    # The rate of those in flight, which are of the quarters that are left.
    late = min(
        max(rate * (quarters * mean - early) / max((quarters - done) * mean, 1e-9), 0.01), 1.0
    )

    by_chance = flight * late - chances * math.sqrt(flight * late * (1 - late))
    return bool(by_chance - doubts * flight * late / rate * math.sqrt(variance) >= lacking)


@dataclass(frozen=True, kw_only=True)
class KeepRate:
    """What is believed of the keep rate before a step.

    rates: of each quarter of the groups in the order they finish.
    change2: mean square of how far the rate moved from one step to the next, which says how many
        groups the prior is worth.
    margin: standard deviations of chance that an issue covers.
    doubt: standard deviations of the rate itself that an issue covers.
    eager: standard deviations of chance that must not be covered for a refill to be made at a
        step's beginning.
    known: no doubt about the rate; what other rules are compared with.
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
