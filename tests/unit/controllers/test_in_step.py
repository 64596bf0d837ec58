"""How a synchronous step issues groups, which of them it takes, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from gcore_core.contract.errors import ConfigError
from gcore_core.controllers.generation.in_step import InStep
from gcore_core.controllers.generation.schedule import Bounds, GroupReport, Membership


def in_step(
    *, exact: bool = False, carries: bool = False, limit: int = 40, base: int = 0, step: int = 0
) -> InStep:
    bounds = Bounds(prompts=4, limit=limit, exact=exact, steps=12)
    return InStep(bounds=bounds, step=step, base=base, carries=carries)


def end(schedule: InStep, ordinals: Iterable[int], **told: bool) -> None:
    """These groups become complete; those with odd ordinals teach nothing."""
    version = schedule.version
    ended = [GroupReport(o, o % 2 == 0, False, version, 0.0, 0.0, **told) for o in ordinals]
    schedule.look(version, schedule.step, ended)


def play(schedule: InStep) -> Membership:
    """A step whose groups become complete from the last to the first."""
    while (membership := schedule.take_if_ready()) is None:
        end(schedule, reversed(schedule.issue()))
    return membership


def test_a_step_takes_the_lowest_that_teach_whatever_ends_first() -> None:
    schedule = in_step()
    membership = play(schedule)
    assert [one.ordinal for one in membership.trained] == [0, 2, 4, 6]
    assert membership.consumed == list(range(7))
    assert (membership.step, membership.first_ordinal, schedule.consumed) == (0, 0, 7)
    membership = play(schedule)
    assert [one.ordinal for one in membership.trained] == [8, 10, 12, 14]
    assert membership.consumed == list(range(7, 15))
    assert (membership.step, membership.first_ordinal, schedule.consumed) == (1, 7, 15)


def test_a_step_is_not_over_while_a_group_that_was_issued_is_drawn() -> None:
    schedule = in_step()
    ordinals = schedule.issue()
    schedule.look(0, 0, [GroupReport(o, True, False, 0, 0.0, 0.0) for o in ordinals[1:]])
    assert schedule.take_if_ready() is None and schedule.issue() == []
    schedule.look(0, 0, [GroupReport(0, True, False, 0, 0.0, 0.0)])
    assert schedule.take_if_ready() is not None


def test_a_run_that_is_to_repeat_issues_only_what_is_surely_needed() -> None:
    schedule = in_step(exact=True)
    assert schedule.issue() == [0, 1, 2, 3]
    end(schedule, [0, 1, 2])
    assert schedule.issue() == [], "one is in flight"
    end(schedule, [3])
    assert schedule.issue() == [4, 5]


def test_a_step_goes_on_with_what_teaches_when_its_limit_is_issued() -> None:
    schedule = in_step(limit=5)
    membership = play(schedule)
    assert [one.ordinal for one in membership.trained] == [0, 2, 4]
    assert membership.consumed == [0, 1, 2, 3, 4]
    assert (membership.issued, schedule.front) == (5, 5)


@pytest.mark.parametrize("carries", [True, False])
def test_surplus_is_issued_again_and_keeps_its_records_once_if_it_may(carries: bool) -> None:
    schedule = in_step(carries=carries)
    schedule._drops = True  # so it issues with a margin
    membership = play(schedule)
    surplus = list(membership.surplus)
    assert surplus and surplus[0] == schedule.consumed == 7
    assert list(membership.carried) == (surplus if carries else [])
    assert schedule.oldest == (0 if carries else 1)
    again = schedule.issue()
    assert again[0] == 7
    if carries:
        assert set(surplus) <= set(again)
    end(schedule, again)
    membership = play(schedule)
    assert not set(membership.carried) & set(surplus), "they would be two steps old"


@pytest.mark.parametrize("told", [{"whole": False}, {"unusable": True}])
def test_surplus_that_failed_is_drawn_again(told: dict[str, bool]) -> None:
    schedule = in_step(carries=True)
    schedule._drops = True
    ordinals = schedule.issue()
    end(schedule, ordinals[:-1])
    last = GroupReport(ordinals[-1], False, told.get("unusable", False), 0, 0.0, 0.0, whole=False)
    schedule.look(0, 0, [last])
    membership = play(schedule)
    assert ordinals[-1] in membership.surplus and ordinals[-1] not in membership.carried


@pytest.mark.parametrize("carries", [True, False])
def test_a_resumed_run_issues_what_one_that_goes_on_issues(carries: bool) -> None:
    before = in_step(carries=carries)
    for _ in range(3):
        membership = play(before)
    state = json.loads(json.dumps(before.state()))
    resumed = in_step(carries=carries, base=before.base, step=before.step)
    assert resumed.restore(state, set(membership.carried)) == list(membership.carried)
    assert resumed.oldest == before.oldest
    for _ in range(2):
        assert play(resumed) == play(before)
    assert resumed.state() == before.state()


def test_records_that_another_program_has_drawn_for_later_steps_are_drawn_again() -> None:
    """They would be freed with the first step, before a later one takes them."""
    state = {"ledger": {"next_ordinal": 10}, "quota": {"left": [3, 2, 2]}}
    resumed = in_step(carries=True, base=10, step=3)
    assert resumed.restore(state, {10, 12, 15, 16}) == [10, 12]
    assert in_step(carries=True, base=10, step=3).restore({}, {12, 15}) == []


def test_a_run_that_took_groups_out_of_order_is_not_gone_on_with() -> None:
    state = {"ledger": {"next_ordinal": 4}, "window": {"above": [6, 7]}}
    with pytest.raises(ConfigError, match="took groups out of order"):
        in_step().restore(state, set())
