"""Lending the trainer's devices: when it pays, and what becomes of the samples."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest
from gcore_sim.ahead import (
    AheadJob,
    AheadStep,
    GroupLengths,
    Layout,
    TrainerPace,
    mean_seconds,
    simulate_ahead,
)
from gcore_sim.config import EngineProfile
from gcore_sim.lending import GiveBack

from gcore_core.controllers.placement.lending import Lending, Rates
from gcore_core.controllers.window.deadlines import Deadlines, Membership

#: Two samples at a time, so most of them wait for a place, and more engines end them sooner.
NARROW = EngineProfile(base_s=0.01, running_s=0.0, cached_s=0.0, prefill_s=0.0, max_running=2)
#: All samples at a time, at the pace of one: more engines end none of them sooner.
WIDE = EngineProfile(base_s=0.01, running_s=0.0, cached_s=0.0, prefill_s=0.0, max_running=1000)
EVERY = get_args(GiveBack)


class Uneven:
    """Lengths between 100 and 400 tokens."""

    def group(self, ordinal: int) -> GroupLengths:
        lengths = np.random.default_rng(ordinal).integers(100, 400, 4)
        return GroupLengths(10, [int(length) for length in lengths])


def steps_of(
    lent: int, switch_s: float = 0.0, steps: int = 16, make: Any = Deadlines, **settings: Any
) -> list[AheadStep]:
    """One engine, one rank that trains in a second; what is lent are engines on that rank."""
    given = {"ahead": 1, "age": 3, "waits": False, "profile": NARROW, **settings}
    job = AheadJob(prompts=6, trainer=TrainerPace(fixed_s=1.0), push_s=0.5, **given)
    return simulate_ahead(job, Layout(1, 1, lent=lent, switch_s=switch_s), Uneven(), steps, make)


@pytest.mark.parametrize(
    ("missing", "rate", "own", "lent", "saved_s"),
    [
        (8, 0.5, 1, 1, 8.0),  # 16 s with one engine, 8 s with two
        (8, 0.5, 4, 4, 2.0),
        (8, 0.5, 4, 12, 3.0),
        (8, 0.0, 4, 4, 0.0),  # nothing was measured yet
        (0, 0.5, 4, 4, 0.0),
        (8, 0.5, 4, 0, 0.0),
    ],
)
def test_a_loan_saves_what_more_engines_take_off_the_wait(
    missing: int, rate: float, own: int, lent: int, saved_s: float
) -> None:
    assert Lending(own, lent, 0.0).saved_s(missing, rate) == pytest.approx(saved_s)


def test_a_loan_pays_only_where_it_saves_more_than_it_takes() -> None:
    assert not Lending(1, 1, 8.0).pays(8, 0.5)
    assert Lending(1, 1, 7.9).pays(8, 0.5)
    assert not Lending(1, 1, 0.0).pays(0, 0.5)


def test_the_rate_is_of_one_engine_over_the_time_that_each_was_awake() -> None:
    rates = Rates(engines=2)
    rates.add(4)
    assert rates.per_engine_s(10.0) == 0.0  # no step has ended
    rates.awake(10.0, 6)  # 2 x 10 engine seconds so far
    rates.add(12)
    rates.end_step(20.0)  # 6 x 10 more
    assert rates.per_engine_s(20.0) == pytest.approx(16 / 80)
    rates.end_step(30.0)  # six engines ended nothing in 10 s; what was before is forgotten
    assert rates.per_engine_s(30.0) == 0.0


@pytest.mark.parametrize("give_back", EVERY)
def test_lending_shortens_steps_that_wait_for_want_of_engines(give_back: GiveBack) -> None:
    without = steps_of(0)
    lending = steps_of(1, give_back=give_back)
    assert mean_seconds(lending[4:-3], 0) < 0.95 * mean_seconds(without[4:-3], 0)
    assert sum(step.lent_s for step in lending) > 0


@pytest.mark.parametrize("give_back", ["redraw", "keep"])
def test_nothing_is_lent_where_every_sample_runs_already(give_back: GiveBack) -> None:
    """What runs would begin anew elsewhere, so a loan ends none of it sooner."""
    assert steps_of(1, profile=WIDE, give_back=give_back) == steps_of(0, profile=WIDE)


@pytest.mark.parametrize("give_back", EVERY)
def test_nothing_is_lent_where_a_loan_takes_longer_than_the_wait(give_back: GiveBack) -> None:
    assert steps_of(1, switch_s=1e6, give_back=give_back) == steps_of(0)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("give_back", EVERY)
def test_every_group_is_taken_once_and_within_its_age_where_devices_are_lent(
    give_back: GiveBack, waits: bool
) -> None:
    taken = Counter[int]()

    class Counting(Deadlines):
        def take(self) -> Membership | None:
            membership = super().take()
            taken.update(membership.consumed if membership else [])
            return membership

    steps = steps_of(1, 2.0, steps=12, make=Counting, give_back=give_back, waits=waits)
    assert sum(step.lent_s for step in steps) > 0
    assert sorted(taken) == list(range(6 * 12)) and set(taken.values()) == {1}
    assert max(step.age_largest for step in steps) <= 3


@pytest.mark.parametrize("give_back", EVERY)
def test_only_samples_that_are_drawn_again_lose_tokens(give_back: GiveBack) -> None:
    lost = sum(step.lost_tokens for step in steps_of(1, give_back=give_back))
    assert (lost > 0) == (give_back == "redraw")


@pytest.mark.parametrize("give_back", EVERY)
def test_the_trainer_never_works_while_its_devices_are_lent(give_back: GiveBack) -> None:
    """A loan with its changes of use lies within the waits of a step."""
    for step in steps_of(1, 2.0, give_back=give_back):
        parts = step.waited_s + step.trained_s + step.drained_s + step.pushed_s
        assert step.seconds == pytest.approx(parts)
        assert step.lent_s <= step.waited_s + step.drained_s + 1e-9
        assert step.trained_s == pytest.approx(1.0)
