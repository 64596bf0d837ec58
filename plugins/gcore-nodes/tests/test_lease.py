"""A lease outlasts its holder by its term, and not longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from gcore_nodes.lease import Lease

from gcore_core.contract.errors import WorkerDied

TERM_S = 15.0


@dataclass
class Alarm:
    """A call that a ``Clock`` makes when its time has come."""

    at_s: float
    ring: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Clock:
    """Makes calls later, on a time that the test sets."""

    now_s: float = 0.0
    alarms: list[Alarm] = field(default_factory=list)

    def call_later(self, delay_s: float, ring: Callable[[], None]) -> Alarm:
        self.alarms.append(Alarm(self.now_s + delay_s, ring))
        return self.alarms[-1]

    def go_on(self, seconds: float) -> None:
        """Lets time pass, and makes the calls that are due."""
        self.now_s += seconds
        due = [alarm for alarm in self.alarms if alarm.at_s <= self.now_s]
        self.alarms = [alarm for alarm in self.alarms if alarm not in due]
        for alarm in due:
            if not alarm.is_cancelled:
                alarm.ring()


class Case:
    """A lease, its clock, and what it has told: "expired"."""

    def __init__(self, first_term_s: float = 0.0) -> None:
        self.clock = Clock()
        self.told: list[str] = []
        self.lease = Lease(
            TERM_S,
            expired=lambda: self.told.append("expired"),
            first_term_s=first_term_s,
            call_later=self.clock.call_later,
        )


def test_a_lease_that_nobody_takes_expires_after_its_term() -> None:
    case = Case()
    case.clock.go_on(TERM_S - 1)
    assert case.told == []
    case.clock.go_on(1)
    assert case.told == ["expired"]


def test_the_first_holder_may_have_longer_to_come() -> None:
    """A machine that is slow to be reached has not lost its supervisor."""
    case = Case(first_term_s=10 * TERM_S)
    case.clock.go_on(10 * TERM_S - 1)
    assert case.told == []
    with case.lease.held("supervisor 1"):
        pass
    case.clock.go_on(TERM_S)
    assert case.told == ["expired"]


def test_a_held_lease_does_not_expire_however_silent_its_holder_is() -> None:
    case = Case()
    with case.lease.held("supervisor 1"):
        case.clock.go_on(1000 * TERM_S)
        assert case.told == []


def test_a_lost_holder_begins_a_whole_term() -> None:
    case = Case()
    case.clock.go_on(TERM_S - 1)
    with case.lease.held("supervisor 1"):
        case.clock.go_on(TERM_S)
    assert case.told == []
    case.clock.go_on(TERM_S - 1)
    assert case.told == []
    case.clock.go_on(1)
    assert case.told == ["expired"]


def test_a_successor_within_the_term_keeps_the_lease_alive() -> None:
    case = Case()
    with case.lease.held("supervisor 1"):
        pass
    case.clock.go_on(TERM_S - 1)
    with case.lease.held("supervisor 2"):
        case.clock.go_on(10 * TERM_S)
        assert case.told == []
    case.clock.go_on(TERM_S)
    assert case.told == ["expired"]


def test_a_displaced_holder_that_goes_late_takes_nothing_from_its_successor() -> None:
    case = Case()
    first, second = case.lease.held("supervisor 1"), case.lease.held("supervisor 2")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    case.clock.go_on(10 * TERM_S)
    assert case.told == []
    second.__exit__(None, None, None)
    case.clock.go_on(TERM_S)
    assert case.told == ["expired"]


def test_an_expired_lease_cannot_be_taken() -> None:
    case = Case()
    case.clock.go_on(TERM_S)
    with pytest.raises(WorkerDied, match="the lease has expired"), case.lease.held("supervisor 1"):
        pass
    case.clock.go_on(10 * TERM_S)
    assert case.told == ["expired"]


def test_a_closed_lease_tells_nothing_any_more() -> None:
    case = Case()
    with case.lease.held("supervisor 1"):
        case.lease.close()
    case.clock.go_on(10 * TERM_S)
    assert case.told == []
