"""The sequential test: bets against "this is healthy", which rarely win while it is.

A gap is |rollout's log-prob - trainer's log-prob| of one action, in nats. In low precision healthy
gaps have so heavy a tail that no bound on the largest one is of use. So the test looks at many gaps
and asks three questions. Each is a set of bets, and a fault makes some of them rich.

    question                                  bets                         needs
    are gaps large too often?                 28: 4 streams, 7 sizes       a table
    more often than the other replicas'?      20: 4 streams, 5 tilts       a table, two replicas
    do all gaps lean the same way?            10: 2 directions, 5 tilts    a table, entropies

**What is bet on.** Two things are steady over a healthy run:

- Gaps depend on the log-prob: an action of probability .9999 is off by 1e-6, one of .01 by .04. So
  a table holds the .9 and the .99 quantile of healthy gaps for bins of the trainer's log-prob, and
  only the share of actions above them is looked at. It stays the same while a policy's entropy
  falls.
- Actions of a group are not independent, since its samples share prefixes; groups are. So a group
  counts as one observation: X in [0, 1], the share of its actions that are above a quantile.

There are 4 streams of X: two quantiles, for sure and for unsure actions.

**The first bets: large too often.** Under "healthy", E[X] <= p0. A group multiplies the stake of a
bet of size c, in (0, 1), by

    e = 1 + (c / p0) (X - p0)

This is at least 1 - c > 0, and E[e] <= 1: the stake does not grow on average. For example p0 = .02
and c = .4:

    X = 0      no action above the quantile    the stake is multiplied by  .6
    X = .02    as many as p0                                              1
    X = .08    four times as many                                         2.2

29 groups in a row of the last kind make 8e9 of 1. That is an alarm at A = 1e8, even where none of
the other 57 bets has won: the mean over all 58 is 1.5e8.

Bets of a small size win slowly on small faults, those of a large one fast on large ones.

p0 is the largest share that healthy runs had over a few steps in a row, and at least .02. Each
version of the weights has rounding of its own, so E[X] <= p0 must hold version by version. Twice
the mean over a run would be too little: a version's share can be five times the mean, and versions
after it have it too.

**Why an alarm is rarely false.** A stake is kept as its logarithm M. A step adds the sum L of its
groups' logarithms: M = max(M, 0) + L. The alarm is at mean(exp(M)) > A, over all bets.

Imagine that before every step a new gambler comes, who puts an equal part of 1 on each bet, and
that all who came stay. While all is well, nobody's stake grows on average, whatever happened
before. So after t steps the gamblers together hold t on average, or less. In each bet, exp(M) is
what the richest of them made of 1: the one who came when M last began from 0. So mean(exp(M)) is at
most what all gamblers together hold. At an alarm that is more than A; on average it is at most the
number of steps until then. So a healthy run makes A steps on average before an alarm, or more.

This is a CUSUM of e-values, an e-detector (Shin, Ramdas, Rinaldo 2024, "E-detectors: a
nonparametric framework for sequential change detection", theorem 2.4). It is exact for the first
bets; the other two kinds are fair only about, for the reason below.

**The second bets: one replica against the others.** Where there are several replicas, each is also
compared with the others of its step. They hold the same version, so its rounding falls out, and p0
with it. The bet is on

    D = (mean of X over its groups) - RATIO (mean of X over the others' groups)

which is at most 0 on average for a replica whose gaps are not clearly more often large than the
others'. With Z = D / (standard error of D), a step multiplies the stake by

    exp(tilt Z - tilt^2 INFLATION / 2)

For a normal Z of mean 0 and INFLATION 1 its mean would be 1. But the standard error is estimated
from some ten groups. So Z is cut off at MOST_Z, and INFLATION is above 1.

**The third bets: all lean the same way.** A sampler at another temperature than its records say
tilts the gaps by little: they gain slope x (log-prob + entropy), with slope = 1 / T - 1. At
T = 0.998 that makes no gap larger than healthy ones are. But it has the sign of log-prob + entropy
in all of them, so a weighted sum shows it. For each action, with the gap's own sign and l the .9
quantile at its log-prob:

    r = gap / l, cut off at -1 and 1
    x = (log-prob + entropy) / l

A group gives U = sum of r x, and I = sum of x^2 where r is not cut off. U / I is about the slope,
as in a fit by least squares, and depends little on the heavy tail. The bets are on U - b I and on
-U - b I, whose means are at most 0 while the pair's own slope is at most b. They are made as those
on a replica against others, with Z = sum / (its standard deviation) over the groups of a step.

All logarithms add up over groups, ranks and shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gcore_core.contract.sentinel import on_grid

#: Borders of the bins of the trainer's log-prob, in nats.
EDGES = (-5, -3, -2, -1, -0.5, -0.1, -0.03, -0.01, -3e-3, -1e-3, -3e-4, -1e-4, -3e-5)
BINS = len(EDGES) + 1
#: An action is unsure below this log-prob (probability .97), else sure.
UNSURE = -0.03
#: Gaps up to this one are never counted: float32's own rounding.
FLOOR = 2e-6
#: Sizes of bets, from one that wins slowly on small faults to one that wins fast on large ones.
BETS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95)
#: No share is bet against that is smaller: a table of finite size does not know it.
LEAST_SHARE = 0.02
#: What is bet on: (stratum, quantile); the order of ``counts`` and of the table's shares.
STREAMS = (("unsure", 0.9), ("unsure", 0.99), ("sure", 0.9), ("sure", 0.99))
#: Logarithms of e-values of a replica by itself: every bet on every stream.
ALONE = len(STREAMS) * len(BETS)
#: Sizes of bets on a replica against the others.
TILTS = (0.25, 0.5, 1.0, 2.0, 3.0)
#: Logarithms of e-values of a replica against others: every tilt on every stream.
AGAINST = len(STREAMS) * len(TILTS)
#: The same of its slope: every tilt on a slope that is too steep, and on one that is too flat.
SLOPE = 2 * len(TILTS)
WIDTH = ALONE + AGAINST + SLOPE
#: So many times as often as the others' may a healthy replica's gaps be large. Replicas differ in
#: how many samples they run at once, which changes the rounding of some kernels.
RATIO = 1.5
#: A standard error is not estimated from fewer groups. A step that has fewer is put together with
#: the next ones.
LEAST_GROUPS = 8
#: The same of a slope, whose groups are compared with nothing: it needs more of them.
LEAST_SLOPED = 24
MOST_Z = 4.0
INFLATION = 1.25
#: No variance of group means is taken to be smaller.
LEAST_VARIANCE = 1e-4
#: Healthy slopes up to this one are never bet against, whatever the table has seen.
LEAST_SLOPE = 5e-4
#: x is divided by this, so that sums of squares stay where they are exact.
_SLOPE_UNIT = 32.0
#: Numbers of ``moments``: groups with actions, sum of X, sum of X squared, for each of STREAMS.
MOMENTS = 3 * len(STREAMS)
#: Numbers that wait for further groups: moments of a replica and of the others, and of its slope.
WAITING = 2 * MOMENTS + 6
#: p0 is the largest healthy share over so many steps in a row: few enough to see what some versions
#: of the weights have and others do not, enough for the .99 quantile to be exceeded at all.
WINDOW = 8
#: Numbers of one record, in this order: unsure actions, those of them above the .9 quantile, above
#: the .99 quantile; then the same three of sure actions.
COUNTS = 6
#: Then U and I of its slope.
NUMBERS = COUNTS + 2


@dataclass(frozen=True, kw_only=True)
class Table:
    """Holds what healthy gaps of a pair are like.

    quantiles: float64[BINS, 2], the .9 and the .99 quantile of |gap| in each bin, in nats.
    worst_shares: float64[4], largest share of healthy actions above over WINDOW steps in a row,
        for each of STREAMS.
    worst_slope: largest healthy |U / I| over so many steps; 0: not known, so nothing is bet on it.
    """

    quantiles: np.ndarray
    worst_shares: np.ndarray
    worst_slope: float = 0.0

    @property
    def bounds(self) -> np.ndarray:
        """float64[4], p0 of each stream."""
        bounds: np.ndarray = np.maximum(self.worst_shares, LEAST_SHARE)
        return bounds

    @property
    def slope_bound(self) -> float:
        """The largest slope that is not bet against: b."""
        return max(self.worst_slope, LEAST_SLOPE)


def marks(rollout: np.ndarray, trainer: np.ndarray, table: Table) -> np.ndarray:
    """Marks what is bet on, bool[A, COUNTS]: per stratum an action, one over .9, one over .99.

    A log-prob that is not a number exceeds both.

    rollout, trainer: float32[A], log-probs of the compared actions.
    """
    gap = np.abs(rollout.astype(np.float64) - trainer)
    # float64[A, 2], the quantiles of each action's bin
    limits = table.quantiles[np.digitize(trainer, EDGES)] + FLOOR
    over = ~(gap[:, None] <= limits)  # not ">": a gap that is no number counts as over
    unsure = trainer < UNSURE
    parts = [
        (part, part & over[:, 0], part & over[:, 1]) for part in (unsure, np.logical_not(unsure))
    ]
    marked: np.ndarray = np.stack([column for part in parts for column in part], axis=1)
    return marked


def counts(rollout: np.ndarray, trainer: np.ndarray, table: Table) -> np.ndarray:
    """Counts what is bet on, float64[COUNTS]; see ``marks``."""
    total: np.ndarray = marks(rollout, trainer, table).sum(axis=0).astype(np.float64)
    return total


def exact_table(band: float) -> Table:
    """Returns what a float32 pair is held to, without being measured.

    Its healthy gaps are far below its band. So one in ten may be beyond a tenth of the band.

    band: in nats.
    """
    return Table(quantiles=np.full((BINS, 2), band / 10), worst_shares=np.full(len(STREAMS), 0.1))


def log_e(sums: np.ndarray, table: Table) -> np.ndarray:
    """Returns the logarithms of a group's e-values, float64[groups, ALONE], on the grid.

    A group without an action of a stratum bets nothing there.

    sums: float64[groups, COUNTS], ``counts`` summed over the group's records.
    """
    # float64[groups, 4] each: of every stream the actions, and those that exceed its quantile
    n = sums[:, [0, 0, 3, 3]]
    hits = sums[:, [1, 2, 4, 5]]
    bounds = table.bounds
    # X of every stream; where there is no action, what neither wins nor loses
    mean = np.where(n > 0, hits / np.maximum(n, 1), bounds)
    # float64[4, BETS], c / p0; then log e, float64[groups, 4, BETS]
    bets = np.array(BETS) / bounds[:, None]
    values = np.log1p(bets * (mean - bounds)[:, :, None])
    return on_grid(np.where(n[:, :, None] > 0, values, 0.0)).reshape(len(sums), ALONE)


def slope_terms(
    rollout: np.ndarray, trainer: np.ndarray, entropy: np.ndarray, table: Table
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the terms of U and I, float64[A] each; 0 where the entropy is not a number.

    rollout, trainer, entropy: float32[A], of the compared actions.

    Both sums have the same unit: U is divided by _SLOPE_UNIT twice, and I by its square.
    """
    limits = table.quantiles[np.digitize(trainer, EDGES), 0] + FLOOR
    ratio = (rollout.astype(np.float64) - trainer) / limits  # r before it is cut off
    x = (trainer.astype(np.float64) + entropy) / (limits * _SLOPE_UNIT)
    known = np.isfinite(x) & np.isfinite(ratio)
    inside = known & (np.abs(ratio) < 1)
    u = np.where(known, np.clip(ratio, -1, 1) * x / _SLOPE_UNIT, 0.0)
    return u, np.where(inside, x * x, 0.0)


def slope_moments(sums: np.ndarray, table: Table) -> np.ndarray:
    """Returns what a slope is judged by, float64[groups, 6], on the grid.

    For too steep, then for too flat: groups, sum of T and of T squared, with T = +-U - b I. All are
    0 where the table knows no slope.

    sums: float64[groups, NUMBERS], summed over the group's records.
    """
    if not table.worst_slope:
        return np.zeros((len(sums), 6))
    u, information = sums[:, COUNTS], sums[:, COUNTS + 1]
    columns = []
    for sign in (1.0, -1.0):
        term = on_grid(sign * u - table.slope_bound * information)
        columns += [(information > 0).astype(np.float64), term, on_grid(term * term)]
    return np.stack(columns, axis=1)


def slope_logs(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logarithms of the bets on a slope, and whether they are made.

    row: float64[6], ``slope_moments`` summed over a replica's groups in some steps.
    Returns float64[SLOPE] and bool[6], true where the moments were made use of.
    """
    # sign 0: too steep, 1: too flat; of each the logarithms, and whether its moments were used
    logs = np.zeros((2, len(TILTS)))
    used = np.zeros((2, 3), bool)
    for sign, (n, total, squares) in enumerate(row.reshape(2, 3)):
        mean = total / max(n, 1)
        variance = (squares - n * mean**2) / max(n - 1, 1)
        if n >= LEAST_SLOPED and variance > 0:
            logs[sign] = _tilted(total / np.sqrt(n * variance))  # Z: the sum over its deviation
            used[sign] = True
    return logs.ravel(), used.ravel()


def worst_slope_of(sums: np.ndarray) -> float:
    """Returns the largest |U / I| over WINDOW steps in a row.

    sums: float64[steps, NUMBERS], summed over each step, in the order of the steps.
    """
    before = np.concatenate([np.zeros((1, 2)), np.cumsum(sums[:, COUNTS:], axis=0)])
    window = min(WINDOW, len(sums))
    total = before[window:] - before[:-window]
    with_actions = total[total[:, 1] > 0]
    return float(np.abs(with_actions[:, 0] / with_actions[:, 1]).max(initial=0.0))


def _tilted(z: Any) -> np.ndarray:
    """Returns tilt Z - tilt^2 INFLATION / 2 for each of TILTS, float64[..., TILTS].

    z: float64[...], is cut off at MOST_Z.
    """
    tilts = np.array(TILTS)
    cut = np.clip(z, -MOST_Z, MOST_Z)
    logs: np.ndarray = tilts * np.asarray(cut)[..., None] - INFLATION * tilts**2 / 2
    return logs


def moments(sums: np.ndarray) -> np.ndarray:
    """Returns what a replica is compared with others by, float64[groups, MOMENTS], on the grid.

    sums: float64[groups, COUNTS], ``counts`` summed over the group's records.
    """
    n = sums[:, [0, 0, 3, 3]]  # actions of each stream; see ``log_e``
    mean = on_grid(sums[:, [1, 2, 4, 5]] / np.maximum(n, 1))
    return np.concatenate([(n > 0).astype(np.float64), mean, on_grid(mean * mean)], axis=1)


def against_others(own: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logarithms of the bets on a replica against the others, and which are made.

    Streams in which either side has fewer than LEAST_GROUPS groups bet nothing.

    own, others: float64[MOMENTS], summed over the groups of some steps.
    Returns float64[AGAINST] and bool[MOMENTS], true at the moments that were made use of.
    """
    # float64[4] each, of every stream: groups, sum of X, sum of X squared
    (n, total, squares), (n_others, total_others, squares_others) = (
        np.split(part, 3) for part in (own, others)
    )
    counts_of = np.maximum(n, 1), np.maximum(n_others, 1)
    mean, mean_others = total / counts_of[0], total_others / counts_of[1]
    # One variance of X, from the deviations of both sides' groups from their own side's mean.
    rest = (squares - n * mean**2) + (squares_others - n_others * mean_others**2)
    variance = np.maximum(rest / np.maximum(n + n_others - 2, 1), LEAST_VARIANCE)
    # The standard error of D: variances of means add up, that of RATIO times a mean by RATIO^2.
    error = np.sqrt(variance * (1 / counts_of[0] + RATIO**2 / counts_of[1]))
    values = _tilted((mean - RATIO * mean_others) / error)
    enough = np.minimum(n, n_others) >= LEAST_GROUPS
    return np.where(enough[:, None], values, 0.0).ravel(), np.tile(enough, 3)


@dataclass(kw_only=True)
class Cusum:
    """Keeps M of one replica, or of all of them together; of these the bets against others stay 0.

    m: float64[WIDTH].
    since: int64[WIDTH], the step in which each of M last began from 0.
    actions: int64[WIDTH], how many actions were compared since then.
    waiting: float64[WAITING], of steps that had too few groups: moments of the replica, those of
        the others, and ``slope_moments``.
    """

    m: np.ndarray = field(default_factory=lambda: np.zeros(WIDTH))
    since: np.ndarray = field(default_factory=lambda: np.zeros(WIDTH, np.int64))
    actions: np.ndarray = field(default_factory=lambda: np.zeros(WIDTH, np.int64))
    waiting: np.ndarray = field(default_factory=lambda: np.zeros(WAITING))

    def compared(self, moments_: np.ndarray) -> np.ndarray:
        """Returns the logarithms of a step's bets that need a standard error.

        moments_: float64[WAITING], of the step; what waits is added.
        Returns float64[AGAINST + SLOPE].
        """
        total = self.waiting + moments_
        own, others, slope = np.split(total, (MOMENTS, 2 * MOMENTS))
        against, used = against_others(own, others)
        tilted, used_of_slope = slope_logs(slope)
        self.waiting = np.where(np.concatenate([used, used, used_of_slope]), 0.0, total)
        return np.concatenate([against, tilted])

    def add(self, step: int, logs: np.ndarray, actions: int) -> None:
        """Takes the sum of a step.

        logs: float64[WIDTH], summed over all its groups; the last ones may be left out, of bets
            that are not made.
        """
        logs = np.pad(logs, (0, WIDTH - len(logs)))
        begins = self.m <= 0  # what it held is worth no more than a new gambler's stake
        self.since = np.where(begins, step, self.since)
        self.actions = np.where(begins, 0, self.actions) + actions
        self.m = np.maximum(self.m, 0.0) + logs

    @property
    def level(self) -> float:
        """log of the mean of exp(M), which is compared with log A.

        The largest M is taken out of the mean and added again, so that exp() does not overflow.
        """
        top = float(self.m.max())
        return top + float(np.log(np.exp(self.m - top).mean()))

    @property
    def leader(self) -> int:
        """Which of the WIDTH bets has won most."""
        return int(self.m.argmax())


def stream_of(bet: int) -> tuple[str, float]:
    """Returns (stratum, quantile) of a bet that is on gaps: one of ALONE + AGAINST."""
    if bet < ALONE:
        return STREAMS[bet // len(BETS)]
    return STREAMS[(bet - ALONE) // len(TILTS)]


def quantiles_of(gaps: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """Returns the .9 and .99 quantile of gaps in each bin, float64[BINS, 2].

    A bin with at most 30 gaps gets those of the nearest bin that has more.

    gaps: float64[n]. bins: int64[n], as np.digitize with EDGES gives them.
    """
    sizes = np.bincount(bins, minlength=BINS)
    filled = np.flatnonzero(sizes > 30)
    if not len(filled):
        raise ValueError("no bin has more than 30 gaps")
    nearest = [int(filled[np.abs(filled - i).argmin()]) for i in range(BINS)]
    by_bin = {i: np.quantile(gaps[bins == i], (0.9, 0.99)) for i in filled.tolist()}
    return np.stack([by_bin[i] for i in nearest])


def worst_shares_of(sums: np.ndarray) -> np.ndarray:
    """Returns the largest share of actions above each quantile over WINDOW steps, float64[4].

    Of a shorter run, the share of all of it.

    sums: float64[steps, COUNTS], ``counts`` summed over each step, in the order of the steps.
    """
    # Sums over WINDOW steps in a row are differences of sums over all steps before a step.
    before = np.concatenate([np.zeros((1, sums.shape[1])), np.cumsum(sums, axis=0)])
    window = min(WINDOW, len(sums))
    total = before[window:] - before[:-window]
    n = np.maximum(total[:, [0, 0, 3, 3]], 1)
    worst: np.ndarray = (total[:, [1, 2, 4, 5]] / n).max(axis=0)
    return worst
