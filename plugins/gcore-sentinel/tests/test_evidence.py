"""The sequential test stays silent on healthy gaps, finds planted ones, and bets fairly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gcore_sentinel.evidence import (
    ALONE,
    BETS,
    INFLATION,
    LEAST_GROUPS,
    LEAST_SLOPED,
    RATIO,
    TILTS,
    WIDTH,
    Cusum,
    Table,
    against_others,
    counts,
    log_e,
    moments,
    slope_logs,
    slope_moments,
    slope_terms,
)
from gcore_sentinel.synthetic import (
    ACTIONS,
    SAMPLES,
    counts_of_groups,
    healthy,
    table_of,
    typical_gap,
)

ALARM = np.log(1e8)
GROUPS = 64  # of a step
PER_GROUP = SAMPLES * ACTIONS


@pytest.fixture(scope="module")
def table() -> Table:
    return table_of(*healthy(np.random.default_rng(0), 4000))


def peak(table: Table, trainer: np.ndarray, gaps: np.ndarray) -> float:
    """The highest level of a run whose steps have GROUPS groups each."""
    cusum = Cusum()
    levels = []
    logs = log_e(counts_of_groups(trainer, gaps, table), table)
    for step, part in enumerate(np.split(logs, range(GROUPS, len(logs), GROUPS))):
        cusum.add(step, part.sum(axis=0), GROUPS * PER_GROUP)
        levels.append(cusum.level)
    return max(levels)


def actions_to_alarm(table: Table, trainer: np.ndarray, gaps: np.ndarray) -> float:
    cusum = Cusum()
    for group, row in enumerate(log_e(counts_of_groups(trainer, gaps, table), table), 1):
        cusum.add(group, row, PER_GROUP)
        if cusum.level > ALARM:
            return group * PER_GROUP
    return np.inf


def test_ten_million_healthy_actions_give_no_alarm(table: Table) -> None:
    generator = np.random.default_rng(1)
    groups = 10_000_000 // PER_GROUP // 5
    peaks = [peak(table, *healthy(generator, groups)) for _ in range(5)]
    assert max(peaks) < ALARM / 2, peaks


def test_the_largest_healthy_gap_would_break_any_useful_band(table: Table) -> None:
    """The reason for all of this: what is drawn above is as heavy as what was measured."""
    _, gaps = healthy(np.random.default_rng(1), 10_000_000 // PER_GROUP // 5)
    assert np.abs(gaps).max() > 1


@pytest.mark.parametrize(
    ("factor", "within"), [(2.0, 30_000), (3.0, 6_000), (10.0, 2_000)], ids=str
)
def test_gaps_that_are_larger_everywhere_are_found(
    table: Table, factor: float, within: int
) -> None:
    trainer, gaps = healthy(np.random.default_rng(2), 2000)
    assert actions_to_alarm(table, trainer, factor * gaps) <= within


def test_a_shift_far_below_the_tail_is_found(table: Table) -> None:
    """Every gap gets three typical sizes more: less than the largest healthy gaps by far."""
    trainer, gaps = healthy(np.random.default_rng(3), 2000)
    planted = gaps + 3 * typical_gap(trainer) * np.random.default_rng(4).choice((-1, 1), gaps.shape)
    assert actions_to_alarm(table, trainer, planted) <= 4_000


def test_one_action_of_each_record_that_is_far_off_is_found(table: Table) -> None:
    trainer, gaps = healthy(np.random.default_rng(5), 500)
    gaps[:, ACTIONS - 1 :: ACTIONS] = 1.0
    assert actions_to_alarm(table, trainer, gaps) <= 4_000


@pytest.mark.parametrize("worst", [False, True], ids=["spread", "all or nothing"])
def test_a_bets_mean_is_at_most_one_when_shares_are_at_their_bound(worst: bool) -> None:
    """Whatever the dependence inside a group: its actions exceed one by one, or all at once."""
    table = Table(quantiles=np.ones((14, 2)), worst_shares=np.array([0.08, 0.01, 0.05, 0.012]))
    generator = np.random.default_rng(6)
    groups = 100_000
    sums = np.zeros((groups, 6))
    for at, bounds in ((0, table.bounds[:2]), (3, table.bounds[2:])):
        sums[:, at] = 10
        for column, bound in enumerate(bounds, at + 1):
            drawn = generator.random((groups, 1 if worst else 10)) < bound
            sums[:, column] = drawn.sum(axis=1) * (10 if worst else 1)
    means = np.exp(log_e(sums, table)).mean(axis=0)
    errors = np.exp(log_e(sums, table)).std(axis=0) / np.sqrt(groups)
    assert (means <= 1 + 4 * errors).all(), means
    assert (np.exp(log_e(sums, table)).min(axis=0) > 0).all()


def test_a_group_without_actions_of_a_stratum_bets_nothing_there() -> None:
    table = Table(quantiles=np.ones((14, 2)), worst_shares=np.full(4, 0.05))
    (row,) = log_e(np.array([[5.0, 5, 5, 0, 0, 0]]), table)
    half = ALONE // 2
    assert (row[:half] > 0).all() and (row[half:] == 0).all()


def test_sums_of_evidence_are_the_same_in_any_order(table: Table) -> None:
    trainer, gaps = healthy(np.random.default_rng(7), 999)
    logs = log_e(counts_of_groups(trainer, gaps, table), table)
    shuffled = np.random.default_rng(8).permutation(logs)
    parts = [part.sum(axis=0) for part in np.array_split(shuffled, 13)]
    assert (np.sum(parts[::-1], axis=0) == logs.sum(axis=0)).all()


def test_a_log_prob_that_is_not_a_number_exceeds_everything(table: Table) -> None:
    trainer = np.array([-1.0, -1e-6], np.float32)
    assert counts(np.full(2, np.nan, np.float32), trainer, table).tolist() == [1, 1, 1, 1, 1, 1]


def test_a_cusum_says_since_when_it_has_won() -> None:
    cusum = Cusum()
    for step in range(5):
        cusum.add(step, np.full(WIDTH, -1.0), 10)
    for step in range(5, 8):
        cusum.add(step, np.full(WIDTH, 7.0), 10)
    assert cusum.level == pytest.approx(21.0)
    assert (cusum.since[cusum.leader], cusum.actions[cusum.leader]) == (5, 30)


def test_no_bet_can_lose_everything() -> None:
    assert min(BETS) > 0 and max(BETS) < 1


def compared(own: np.ndarray, others: np.ndarray, table: Table) -> np.ndarray:
    """The bets on a replica against the others, float64[streams, tilts]."""
    sums = (moments(sums).sum(axis=0) for sums in (own, others))
    return against_others(*sums)[0].reshape(-1, len(TILTS))


def test_a_replica_with_larger_gaps_than_the_others_is_found_where_all_exceed_the_table(
    table: Table,
) -> None:
    """All of a version's gaps are twice those of the table; one replica's three times as large."""
    chance = np.random.default_rng(9)
    levels = []
    for factor in (2.0, 6.0):
        cusum = Cusum()
        for step in range(6):
            own = counts_of_groups(*_scaled(healthy(chance, 32), factor), table)
            others = counts_of_groups(*_scaled(healthy(chance, 32), 2.0), table)
            logs = np.concatenate([np.zeros(ALONE), compared(own, others, table).ravel()])
            cusum.add(step, logs, 32 * PER_GROUP)
        levels.append(cusum.level)
    assert levels[0] < 2 and levels[1] > ALARM


def _scaled(drawn: tuple[np.ndarray, np.ndarray], factor: float) -> tuple[np.ndarray, np.ndarray]:
    return drawn[0], factor * drawn[1]


@pytest.mark.parametrize("groups", [LEAST_GROUPS, 16, 64])
def test_bets_on_a_replica_have_a_mean_of_at_most_one_at_their_bound(
    table: Table, groups: int
) -> None:
    """Its groups exceed RATIO times as often as the others', so that it is as bad as allowed."""
    chance = np.random.default_rng(groups)
    draws = []
    for _ in range(4000):
        sums = np.zeros((2, groups, 6))
        sums[:, :, [0, 3]] = 40
        for side, ratio in enumerate((RATIO, 1.0)):
            for column, share in ((1, 0.1), (2, 0.02), (4, 0.1), (5, 0.02)):
                of_group = np.minimum(chance.gamma(1.0, ratio * share, groups), 1)
                sums[side, :, column] = chance.binomial(40, of_group)
        draws.append(compared(sums[0], sums[1], table))
    values = np.exp(np.array(draws))
    errors = values.std(axis=0) / np.sqrt(len(draws))
    assert INFLATION > 1 and (values.mean(axis=0) <= 1 + 4 * errors).all(), values.mean(axis=0)


def test_few_groups_compare_nothing(table: Table) -> None:
    own = np.tile([8.0, 8, 8, 0, 0, 0], (LEAST_GROUPS - 1, 1))
    others = np.tile([8.0, 0, 0, 8, 0, 0], (64, 1))
    assert (compared(own, others, table) == 0).all()
    # They wait for those of the next step.
    cusum = Cusum()
    of_step = np.concatenate([moments(sums).sum(axis=0) for sums in (own, others)] + [np.zeros(6)])
    assert (cusum.compared(of_step) == 0).all() and (cusum.waiting == of_step).all()
    assert cusum.compared(of_step).max() > 0 and (cusum.waiting[[0, 1]] == 0).all()
    enough = np.tile([8.0, 8, 8, 0, 0, 0], (LEAST_GROUPS, 1))
    logs = compared(enough, others, table)
    assert (logs[:2] > 0).all() and (logs[2:] == 0).all()  # it has no sure actions


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bets_on_a_slope_have_a_mean_of_at_most_one_at_their_bound(
    table: Table, sign: float
) -> None:
    """Gaps lean as steeply as is allowed, on top of noise with a heavy tail."""
    chance = np.random.default_rng(11)
    known = replace(table, worst_slope=2e-3)
    draws = []
    for _ in range(3000):
        trainer, gaps = healthy(chance, LEAST_SLOPED)
        entropy = -trainer + chance.normal(0, 0.5, trainer.shape) * np.abs(trainer)
        leaning = gaps + sign * known.slope_bound * (trainer + entropy)
        terms = slope_terms(trainer + leaning, trainer, entropy, known)
        sums = np.zeros((LEAST_SLOPED, 8))
        sums[:, 6:] = np.stack([term.sum(axis=1) for term in terms], axis=1)
        draws.append(slope_logs(slope_moments(sums, known).sum(axis=0))[0])
    values = np.exp(np.array(draws))
    errors = values.std(axis=0) / np.sqrt(len(draws))
    assert (values.mean(axis=0) <= 1 + 4 * errors).all(), values.mean(axis=0)
