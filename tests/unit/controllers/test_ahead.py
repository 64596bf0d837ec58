"""Which groups are begun when, and which a step takes: no record gets older than promised, none is
lost, and none is taken twice, whatever takes how long.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from gcore_core.controllers.generation.ahead import Ahead
from gcore_core.controllers.generation.schedule import Bounds, GroupReport

BOUNDS = Bounds(prompts=4, ahead=1, age=1, limit=40, exact=False, steps=12)
WINDOWS = [(0, 0), (0, 2), (1, 1), (1, 4), (2, 2), (2, 4), (4, 8)]


def ahead_of(bounds: Bounds) -> Ahead:
    return Ahead(bounds=bounds, step=0, base=0)


@dataclass
class Play:
    """A run without processes: groups take random numbers of looks, some teach nothing.

    due: how many groups each step had to take.
    """

    seed: int
    keep: float = 1.0
    heavy: float = 0.1
    ages: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    due: list[int] = field(default_factory=list)

    def run(
        self,
        schedule: Ahead,
        steps: int,
        drains: bool = False,
    ) -> None:
        chance = random.Random(self.seed)
        begun = dict[int, int]()
        left = dict[int, int]()  # looks until complete
        wanted = schedule.step
        is_trained = False
        for _ in range(100_000):
            ended = [ordinal for ordinal, looks in left.items() if looks == 0]
            told = []
            for ordinal in ended:
                del left[ordinal]
                first = begun[ordinal]
                keeps = random.Random(ordinal).random() < self.keep
                told.append(GroupReport(ordinal, keeps, False, first, first, 0.0))
            push_waits = drains and is_trained
            schedule.look(schedule.version, wanted, told, push_waits)
            membership = schedule.take_if_ready()
            for ordinal in schedule.issue():
                assert ordinal not in begun, "an ordinal is begun twice"
                left[ordinal] = chance.choice((0, 1, 2)) + 25 * (chance.random() < self.heavy)
                begun[ordinal] = schedule.version
            if membership is not None:
                step = schedule.step - 1
                self.steps.append([one.ordinal for one in membership.trained])
                self.consumed += membership.consumed
                self.ages += [step - one.first for one in membership.trained]
                if len(self.steps) == steps:
                    return
            left = {ordinal: max(looks - 1, 0) for ordinal, looks in left.items()}
            is_trained = is_trained or (schedule.step > wanted and chance.random() < 0.3)
            if is_trained and not (drains and schedule.in_flight):
                schedule.version = wanted = schedule.step
                is_trained = False
                self.due.append(schedule.due)
        raise AssertionError("the run does not end")


@pytest.mark.parametrize(("ahead", "age"), WINDOWS)
@pytest.mark.parametrize("keep", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("drains", [False, True])
def test_no_record_is_older_than_promised_and_steps_are_full(
    ahead: int, age: int, keep: float, drains: bool
) -> None:
    largest = 0
    for seed in range(4):
        bounds = replace(BOUNDS, ahead=ahead, age=age, limit=400)
        play = Play(seed, keep)
        play.run(ahead_of(bounds), bounds.steps, drains)
        assert max(play.ages) <= age
        assert all(len(step) == bounds.prompts for step in play.steps)
        assert max(play.due) <= bounds.prompts
        assert len(set(play.consumed)) == len(play.consumed)
        largest = max(largest, *play.ages)
    assert largest >= min(ahead, 1), "nothing ran ahead"


def test_a_slow_group_is_taken_by_a_later_step_and_never_dropped() -> None:
    play = Play(seed=3, heavy=0.1)
    bounds = replace(BOUNDS, ahead=1, age=4, steps=30)
    play.run(ahead_of(bounds), bounds.steps)
    consumed = [ordinal for step in play.steps for ordinal in step]
    assert consumed != sorted(consumed), "no group was overtaken"
    assert max(play.ages) > 1
    assert sorted(consumed) == list(range(4 * 30)), "an ordinal is missing at the end"


@pytest.mark.parametrize(("ahead", "age"), WINDOWS)
def test_a_run_that_is_to_repeat_takes_groups_in_order(ahead: int, age: int) -> None:
    """The same groups, whatever takes how long."""
    found = []
    for seed in range(5):
        play = Play(seed, keep=0.6)
        bounds = replace(BOUNDS, ahead=ahead, age=age, exact=True, limit=400)
        play.run(ahead_of(bounds), bounds.steps, drains=True)
        taken = [ordinal for step in play.steps for ordinal in step]
        assert taken == sorted(taken)
        found.append(play.steps)
    assert all(steps == found[0] for steps in found)


def test_what_is_drawn_ahead_is_bounded() -> None:
    schedule = ahead_of(replace(BOUNDS, ahead=2, age=4))
    schedule.look(0, 0, [])
    assert schedule.issue() == list(range(12)), "three steps of four groups"
    assert schedule.issue() == []
    schedule.look(0, 0, [GroupReport(o, True, False, 0, 0, 0.0) for o in (5, 1, 2, 9, 3)])
    membership = schedule.take_if_ready()
    assert membership is not None
    assert membership.consumed == [1, 2, 3, 5], "the lowest that are complete"
    assert schedule.issue() == [], "no newer weights are there"
    schedule.look(1, 1, [])
    assert schedule.issue() == [12, 13, 14, 15]


@pytest.mark.parametrize("exact", [False, True])
def test_while_a_push_waits_nothing_is_begun_unless_the_run_is_to_repeat(exact: bool) -> None:
    """One group of eight teaches nothing, and is made up for behind the push."""
    schedule = ahead_of(replace(BOUNDS, exact=exact))
    schedule.look(0, 0, [])
    assert schedule.issue() == list(range(8))
    schedule.look(0, 0, [GroupReport(o, True, False, 0, 0, 0.0) for o in range(4)])
    assert schedule.take_if_ready() is not None
    schedule.look(
        0, 0, [GroupReport(o, o != 6, False, 0, 0, 0.0) for o in range(4, 8)], push_waits=True
    )
    assert schedule.issue() == ([8] if exact else [])
    schedule.look(1, 1, [GroupReport(8, True, False, 0, 0, 0.0)] if exact else [])
    begun = schedule.issue()
    assert begun == ([9, 10, 11, 12] if exact else [8, 9, 10, 11, 12])
    assert all(schedule._begun[ordinal] == 1 for ordinal in begun)


def test_the_last_steps_begin_nothing_that_no_step_takes() -> None:
    bounds = replace(BOUNDS, ahead=3, age=3, steps=5)
    play = Play(seed=1)
    schedule = ahead_of(bounds)
    play.run(schedule, bounds.steps)
    assert schedule.front == 5 * bounds.prompts


def test_a_step_goes_on_with_what_teaches_when_its_limit_is_begun() -> None:
    schedule = ahead_of(replace(BOUNDS, ahead=0, age=0, limit=8))
    schedule.look(0, 0, [])
    while begun := schedule.issue():
        told = [GroupReport(o, o % 4 == 0, False, 0, 0, 0.0) for o in begun]
        schedule.look(0, 0, told)
    membership = schedule.take_if_ready()
    assert membership is not None
    assert schedule.front == 8
    assert [one.ordinal for one in membership.trained] == [0, 4]
    assert membership.consumed == list(range(schedule.front))


@pytest.mark.parametrize("carried_share", [0.0, 0.5, 1.0])
def test_a_resumed_window_loses_nothing_and_doubles_nothing(carried_share: float) -> None:
    """Finished groups keep their deadlines; the others are begun again, under newer weights."""
    for seed in range(8):
        bounds = replace(BOUNDS, ahead=2, age=4, steps=20)
        before = Play(seed, keep=0.7)
        schedule = ahead_of(bounds)
        before.run(schedule, 8)
        state = schedule.state()
        chance = random.Random(seed)
        finished = {o for o in schedule._told if chance.random() < carried_share}
        resumed = Ahead(bounds=bounds, step=8, base=schedule.base)
        taken_over = resumed.restore(state, finished)
        assert set(taken_over) == finished
        told = [schedule._told[ordinal] for ordinal in taken_over]
        resumed.look(8, 7, told)
        after = Play(seed + 1, keep=0.7)
        after.run(resumed, 12)
        consumed = before.consumed + after.consumed
        assert len(set(consumed)) == len(consumed)
        assert max(after.ages) <= bounds.age
        low = range(resumed.base)
        assert set(low) <= set(consumed)


def test_with_other_bounds_a_resumed_window_is_drawn_again() -> None:
    schedule = ahead_of(replace(BOUNDS, ahead=1, age=1))
    schedule.look(0, 0, [])
    ordinals = schedule.issue()
    schedule.look(0, 0, [GroupReport(o, True, False, 0, 0, 0.0) for o in ordinals])
    resumed = ahead_of(replace(BOUNDS, ahead=2, age=2))
    assert resumed.restore(schedule.state(), set(ordinals)) == []
    resumed.look(0, 0, [])
    assert resumed.issue() == list(range(12))


@pytest.mark.parametrize("fault", ["issue", "due"])
def test_an_off_by_one_of_the_bound_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above: with a bound that is one too high, records get too old."""
    bounds = replace(BOUNDS, ahead=1, age=1, steps=40)
    if fault == "issue":
        bounds = replace(bounds, ahead=2, age=2)
    else:
        of = Ahead.due.fget
        assert of is not None
        one_later = property(lambda self: max(0, of(self) - self.bounds.prompts))
        monkeypatch.setattr(Ahead, "due", one_later)
    worst = 0
    for seed in range(10):
        play = Play(seed, heavy=0.3)
        play.run(ahead_of(bounds), bounds.steps)
        worst = max(worst, *play.ages)
    assert worst > 1
