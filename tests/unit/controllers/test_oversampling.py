"""How many groups dynamic sampling issues."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore_core.controllers.keep_rate import KeepRate, by_quarter

rates = st.lists(st.floats(0.02, 1.0), min_size=4, max_size=4).map(tuple)


def test_enough_kept_groups_need_no_more() -> None:
    assert KeepRate().missing(needed=8, kept=8, finished=20, in_flight=5) == 0


def test_a_filter_that_keeps_everything_issues_exactly_what_is_needed() -> None:
    sure = KeepRate(rates=(1.0,) * 4, change2=0.0)
    assert sure.missing(needed=32, kept=0, finished=0, in_flight=0) == 32
    assert sure.missing(needed=32, kept=10, finished=10, in_flight=22) == 0


def test_a_known_rate_is_enough_in_all_but_few_steps() -> None:
    """Two standard deviations: 97.7% of normal draws."""
    known = KeepRate(rates=(0.5,) * 4, is_known=True, margin=2.0)
    issued = known.missing(needed=512, kept=0, finished=0, in_flight=0)
    kept = np.random.default_rng(0).binomial(issued, 0.5, 4000)
    assert 0.96 < (kept >= 512).mean() < 0.99


@given(
    rates=rates,
    needed=st.integers(1, 600),
    finished=st.integers(0, 500),
    in_flight=st.integers(0, 500),
)
def test_issuing_the_missing_groups_leaves_none_missing(
    rates: tuple[float, ...], needed: int, finished: int, in_flight: int
) -> None:
    """Once the missing groups are in flight, none are missing; and a step that has nothing in
    flight is not stuck.
    """
    rule = KeepRate(rates=rates)
    counts = {"needed": needed, "kept": min(finished // 2, needed), "finished": finished}
    more = rule.missing(**counts, in_flight=in_flight)
    assert 0 <= more <= 20 * needed
    if more < 20 * needed:
        assert rule.missing(**counts, in_flight=in_flight + more) == 0
    if in_flight == 0 and counts["kept"] < needed:
        assert more > 0


@given(rates=rates, kept=st.integers(0, 100))
def test_more_kept_groups_mean_no_more_missing_ones(rates: tuple[float, ...], kept: int) -> None:
    rule = KeepRate(rates=rates)
    less = rule.missing(needed=300, kept=kept, finished=200, in_flight=100)
    assert rule.missing(needed=300, kept=kept + 20, finished=200, in_flight=100) <= less


def test_early_groups_are_compared_with_early_groups() -> None:
    """Short groups come first and are kept more; when they come as expected, nothing has
    changed.
    """
    biased, flat = (
        KeepRate(rates=(0.8, 0.6, 0.4, 0.2), change2=0.001),
        KeepRate(rates=(0.5,) * 4, change2=0.001),
    )
    issued = biased.missing(needed=500, kept=0, finished=0, in_flight=0)
    counts = {"needed": 500, "finished": issued // 4, "in_flight": issued - issued // 4}
    assert biased.missing(**counts, kept=round(0.8 * issued / 4)) == 0
    worse = round(0.6 * issued / 4)
    assert flat.missing(**counts, kept=worse) == 0, (
        "to a rule without quarters it looks better than usual"
    )
    assert biased.missing(**counts, kept=worse) > 0.1 * issued


def test_keep_rates_per_quarter_and_their_variance_are_learned() -> None:
    steady, jumpy, truth = KeepRate(), KeepRate(), (0.7, 0.6, 0.5, 0.4)
    for step in range(30):
        kept = [round(200 * rate) for rate in truth]
        steady = steady.after(kept, [200] * 4)
        jumpy = jumpy.after([n // 2 for n in kept] if step % 4 > 1 else kept, [200] * 4)
    np.testing.assert_allclose(steady.rates, truth, atol=0.01)
    assert steady.weight > 10 * jumpy.weight
    assert steady.after([0] * 4, [0] * 4) == steady


def test_counts_per_quarter_add_up_to_the_total() -> None:
    assert by_quarter(np.array([True, True, False, True, False])) == [2, 0, 1, 0]
    assert sum(by_quarter(np.ones(7))) == 7


def test_a_known_keep_rate_has_full_weight_without_learning() -> None:
    assert KeepRate(is_known=True).weight > 1e6 and KeepRate().mean == pytest.approx(0.5)
