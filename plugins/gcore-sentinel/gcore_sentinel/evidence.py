"""The sequential test: how often a gap exceeds a quantile that healthy gaps rarely exceed.

A gap is |rollout's log-prob - trainer's log-prob| of one action, in nats. In low precision healthy
gaps have so heavy a tail that no bound on the largest one is of use. Two things are steady instead:

- Gaps depend on the log-prob: an action of probability .9999 is off by 1e-6, one of .01 by .04. So
  a table holds the .9 and the .99 quantile of healthy gaps for bins of the trainer's log-prob, and
  only the share of actions above them is looked at. It stays the same while a policy's entropy
  falls.
- Actions of a group are not independent, since its samples share prefixes; groups are. So a group
  counts as one observation: the mean over its actions, X in [0, 1].

The bet. Under "healthy", E[X] <= p0. Each version of the weights has rounding of its own, so that
this must hold version by version: p0 is the largest share that healthy runs had over a few steps in
a row, and at least .02. Twice the mean over a run would be too little: a version's share can be
five times the mean, and versions after it have it too.
Then e = 1 + (c / p0) (X - p0) is at least 1 - c > 0 and has E[e] <= 1, for every c in (0, 1). A
product of such factors is an e-value: it rarely gets large while all is well, and grows by a factor
with every group when it is not. There are 4 kinds of X (two quantiles, and two strata of sure and
unsure actions) and 7 sizes of bets c: 28 logarithms, which add up over groups, ranks and shards.

The alarm. Each step adds its sum L to M = max(M, 0) + L, and the alarm is mean(exp(M)) > A. This is
a CUSUM of e-values, an e-detector: a healthy run makes at least A steps on average before it stops
(Shin, Ramdas, Rinaldo 2024, "E-detectors", theorem 2.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
#: Logarithms of e-values in one row of evidence: every bet on every stream.
WIDTH = len(STREAMS) * len(BETS)
#: p0 is the largest healthy share over so many steps in a row: few enough to see what some versions
#: of the weights have and others do not, enough for the .99 quantile to be exceeded at all.
WINDOW = 8
#: Numbers of one record: actions and exceedances of both quantiles, in each stratum.
COUNTS = 6


@dataclass(frozen=True, kw_only=True)
class Table:
    """Holds what healthy gaps of a pair are like.

    quantiles: float64[BINS, 2], the .9 and the .99 quantile of |gap| in each bin, in nats.
    worst_shares: float64[4], largest share of healthy actions above over WINDOW steps in a row,
        for each of STREAMS.
    """

    quantiles: np.ndarray
    worst_shares: np.ndarray

    @property
    def bounds(self) -> np.ndarray:
        """float64[4], p0 of each stream."""
        bounds: np.ndarray = np.maximum(self.worst_shares, LEAST_SHARE)
        return bounds


def marks(rollout: np.ndarray, trainer: np.ndarray, table: Table) -> np.ndarray:
    """Marks what is bet on, bool[A, COUNTS]: per stratum an action, one over .9, one over .99.

    A log-prob that is not a number exceeds both.

    rollout, trainer: float32[A], log-probs of the compared actions.
    """
    gap = np.abs(rollout.astype(np.float64) - trainer)
    limits = table.quantiles[np.digitize(trainer, EDGES)] + FLOOR
    over = ~(gap[:, None] <= limits)
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
    """Returns the logarithms of a group's e-values, float64[groups, WIDTH], on the grid.

    A group without an action of a stratum bets nothing there.

    sums: float64[groups, COUNTS], ``counts`` summed over the group's records.
    """
    n = sums[:, [0, 0, 3, 3]]
    hits = sums[:, [1, 2, 4, 5]]
    bounds = table.bounds
    mean = np.where(n > 0, hits / np.maximum(n, 1), bounds)
    bets = np.array(BETS) / bounds[:, None]
    values = np.log1p(bets * (mean - bounds)[:, :, None])
    return on_grid(np.where(n[:, :, None] > 0, values, 0.0)).reshape(len(sums), WIDTH)


@dataclass(kw_only=True)
class Cusum:
    """Keeps M of one replica, or of all of them together.

    m: float64[WIDTH].
    since: int64[WIDTH], the step in which each of M last began from 0.
    actions: int64[WIDTH], how many actions were compared since then.
    """

    m: np.ndarray = field(default_factory=lambda: np.zeros(WIDTH))
    since: np.ndarray = field(default_factory=lambda: np.zeros(WIDTH, np.int64))
    actions: np.ndarray = field(default_factory=lambda: np.zeros(WIDTH, np.int64))

    def add(self, step: int, logs: np.ndarray, actions: int) -> None:
        """Takes the sum of a step.

        logs: float64[WIDTH], summed over all its groups.
        """
        begins = self.m <= 0
        self.since = np.where(begins, step, self.since)
        self.actions = np.where(begins, 0, self.actions) + actions
        self.m = np.maximum(self.m, 0.0) + logs

    @property
    def level(self) -> float:
        """log of the mean of exp(M)."""
        top = float(self.m.max())
        return top + float(np.log(np.exp(self.m - top).mean()))

    @property
    def leader(self) -> int:
        """Which of the WIDTH bets has won most."""
        return int(self.m.argmax())


def stream_of(bet: int) -> tuple[str, float]:
    """Returns (stratum, quantile) of one of the WIDTH bets."""
    return STREAMS[bet // len(BETS)]


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
    before = np.concatenate([np.zeros((1, sums.shape[1])), np.cumsum(sums, axis=0)])
    window = min(WINDOW, len(sums))
    total = before[window:] - before[:-window]
    n = np.maximum(total[:, [0, 0, 3, 3]], 1)
    worst: np.ndarray = (total[:, [1, 2, 4, 5]] / n).max(axis=0)
    return worst
