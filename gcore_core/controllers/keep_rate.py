"""Computes how many groups dynamic sampling issues, from a belief about the keep rate.

Everything here is pure.

The belief is a posterior that is updated as groups finish. Groups that finish early are short, and
short ones are kept at a rate of their own. So the prior has not one rate but four: one for each
quarter of a step's groups in the order in which they finish, as it was in the steps before. A group
that has finished is compared with its own quarter. What that says of the rate over all quarters
makes a Beta posterior.

So many groups are issued that the missing ones come with a margin, in standard deviations. There
are two kinds of deviation: those of chance (``margin``), since each group is kept or not, and those
of the rate itself (``doubt``), which is only estimated and is known better as groups finish.

A refill costs the less the earlier it is made. At the beginning of a step one is made as soon as
``eager`` standard deviations of chance are not covered. Later one is made only when the step is
more and more likely to fall short, since it would wait for whole new answers either way.

``doubt`` counts both ways. Whether to refill is tested with the rate that much better than
estimated: soon it is known better. How much to refill is then computed with the rate that much
worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

QUARTERS = 4


def groups_missing(needed: int, kept: int, finished: int, in_flight: int, rule: np.ndarray) -> int:
    """Returns how many groups to issue now.

    Like ``covers`` it is plain arithmetic on numbers and one array, so that a compiler can take
    both as they are. ``KeepRate.missing`` calls it.

    needed: groups that must be kept.
    kept: of the ``finished`` groups, how many were kept.
    finished: groups that are drawn and scored.
    in_flight: groups that are issued and have not finished.
    rule: float64[4 + quarters]: weight of the prior in groups, margin, doubt, eager, then the keep
        rate of each quarter; see ``KeepRate``.
    """
    lacking = needed - kept
    if lacking <= 0:
        return 0
    margin = rule[1]
    doubt = rule[2]
    eager = rule[3]

    # First question: are the groups in flight enough? The test is lax, since a refill that turns
    # out needless is a waste. A negative number of deviations counts on luck. The deviations of
    # chance go in a straight line from ``eager``, when nothing has finished, to its mirror at -1,
    # when everything has: with -0.5 from -0.5 to -1.5. ``eager`` is above -1, so they fall: the
    # later it is, the more a refill would cost compared with what luck may still give.
    share = finished / max(finished + in_flight, 1)
    chances = eager - 2 * (1 + eager) * share
    if covers(in_flight, lacking, kept, finished, rule, chances, -doubt):
        return 0

    # They are not. Second question: how many are? This test is strict, since another refill would
    # come too late. Bisection finds the smallest number that passes; never more than 20 times what
    # is needed.
    strict = max(margin, chances)  # never laxer than the test that was just failed
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
    """Returns whether ``flight`` groups in flight are enough to get the ``lacking`` ones.

    flight: groups in flight, those included that a refill would add.
    lacking: groups that are still to be kept.
    kept: of the ``finished`` groups, how many were kept.
    finished: groups that are drawn and scored.
    rule: float64[4 + quarters], as for ``groups_missing``.
    chances: standard deviations of chance that must be covered: each group is kept or not.
    doubts: standard deviations of the keep rate itself, which is only estimated.
    """
    if flight <= 0:
        return False
    weight = rule[0]
    rates = rule[4:]
    quarters = len(rates)
    mean = float(np.sum(rates)) / quarters

    # The finished groups are the first that finished. If they are 1.5 quarters of the step, then
    # ``finished_quarters`` is 1.5, and ``early`` is the prior's rate of quarter 0 plus half of that
    # of quarter 1.
    finished_quarters = quarters * finished / max(finished + flight, 1)
    early = 0.0
    for i in range(quarters):
        early += rates[i] * min(max(finished_quarters - i, 0.0), 1.0)

    # Early quarters have rates of their own. So ``kept`` is scaled to what it would have been, had
    # the finished groups been like the average of all quarters; at most ``finished``.
    kept_if_average = (
        min(kept * mean * finished_quarters / early, float(finished)) if early > 0 else 0.0
    )
    # Mean and variance of the Beta posterior of the rate over all quarters. A rate is at least
    # 0.01: else a filter that has kept nothing yet would have the whole limit issued at once.
    rate = min(max((weight * mean + kept_if_average) / (weight + finished), 0.01), 1.0)
    variance = rate * (1 - rate) / (weight + finished + 1)
    # The groups in flight make the remaining quarters. Their rate is the posterior's, times the
    # prior's mean rate of the remaining quarters over its mean rate of all.
    late = min(
        max(
            rate * (quarters * mean - early) / max((quarters - finished_quarters) * mean, 1e-9),
            0.01,
        ),
        1.0,
    )

    # The expected number that is kept of the flight, less ``chances`` deviations of chance. Then
    # less ``doubts`` deviations of the rate: late / rate scales them to the flight's quarters.
    by_chance = flight * late - chances * math.sqrt(flight * late * (1 - late))
    return bool(by_chance - doubts * flight * late / rate * math.sqrt(variance) >= lacking)


@dataclass(frozen=True, kw_only=True)
class KeepRate:
    """Holds the belief about the keep rate before a step.

    rates: keep rate of each quarter of the groups, in the order in which they finish.
    change2: mean square of how far the rate moved from one step to the next. It says how many
        groups the prior is worth.
    margin: standard deviations of chance that an issue covers.
    doubt: standard deviations of the rate itself that an issue covers.
    eager: a refill is made at a step's beginning when this many standard deviations of chance are
        not covered; below 0 it counts on luck.
    is_known: whether the rate is taken as certain; benchmarks compare other rules with that.
    """

    rates: tuple[float, ...] = (0.5,) * QUARTERS
    change2: float = 0.01
    margin: float = 2.0
    doubt: float = 1.0
    eager: float = -0.5
    is_known: bool = False

    @property
    def mean(self) -> float:
        """The keep rate over all quarters."""
        return float(np.mean(self.rates))

    @property
    def weight(self) -> float:
        """How many groups the prior is worth."""
        if self.is_known:
            return 1e9
        return float(np.clip(self.mean * (1 - self.mean) / max(self.change2, 1e-6), 8.0, 1000.0))

    def rule(self) -> np.ndarray:
        """Returns the belief as ``groups_missing`` takes it."""
        return np.array([self.weight, self.margin, self.doubt, self.eager, *self.rates])

    def missing(self, *, needed: int, kept: int, finished: int, in_flight: int) -> int:
        """Returns how many groups to issue now.

        needed: groups that must be kept.
        kept: of the ``finished`` groups, how many were kept.
        finished: groups that are drawn and scored.
        in_flight: groups that are issued and have not finished.
        """
        return groups_missing(needed, kept, finished, in_flight, self.rule())

    def after(self, kept: Sequence[int], finished: Sequence[int]) -> KeepRate:
        """Returns the belief before the next step.

        kept: of the finished groups of each quarter, how many were kept; summed over shards.
        finished: groups of each quarter, in the order in which they finished; summed over shards.
        """
        groups = np.asarray(finished, float)
        if not groups.sum():
            return self
        # A quarter of one step has few groups, so its rate relative to the whole is learned slowly,
        # over many steps: 8 groups at the whole's rate are added, and the step's weight is 0.2.
        whole = float(np.clip(np.sum(kept) / groups.sum(), 0.01, 1.0))
        relative_rates = (np.asarray(kept) + 8 * whole) / (groups + 8) / whole
        shape = 0.8 * np.asarray(self.rates) / self.mean + 0.2 * relative_rates
        rates = np.clip(whole * shape / shape.mean(), 0.01, 1.0)
        # How far the rate moved, squared, less the part that chance explains.
        moved2 = max((whole - self.mean) ** 2 - whole * (1 - whole) / groups.sum(), 0.0)
        return replace(
            self, rates=tuple(map(float, rates)), change2=0.7 * self.change2 + 0.3 * moved2
        )


def by_quarter(values: np.ndarray) -> list[int]:
    """Returns the sum of each quarter of ``values``.

    values: a number for each group, in the order in which groups finished. With ones it counts the
        groups of each quarter.
    """
    return [int(part.sum()) for part in np.array_split(np.asarray(values, np.int64), QUARTERS)]
