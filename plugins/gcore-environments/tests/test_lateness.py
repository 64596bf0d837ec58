"""Who is guilty when an environment does not answer: who holds the loop, or the late one alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from gcore_environments.lateness import HELD_SHARE, SAYS_WITHIN_S, Lateness

TURN_S = 4.0


@dataclass(eq=False)
class Host:
    """Notes what it is asked."""

    ready: bool = True
    asked: list[Any] = field(default_factory=list)

    def send(self, **message: Any) -> None:
        assert message["op"] == "who"
        self.asked.append(tuple(message["id"]))


@dataclass(eq=False)
class Episode:
    """What is looked at of an episode."""

    key: tuple[int, int]
    host: Host
    waits_since: float | None = 0.0
    heard: int = 0


class Watched:
    """Episodes of one host, and who watches them."""

    def __init__(self, **waits_since: float | None) -> None:
        self.host = Host()
        self.episodes: Any = {
            (number, 0): Episode((number, 0), self.host, since)
            for number, since in enumerate(waits_since.values())
        }
        self.lateness = Lateness(TURN_S)

    def look(self, now: float) -> list[Any]:
        return list(self.lateness.look(self.episodes, now))

    def answer(self, runs: tuple[int, int] | None, now: float) -> tuple[Any, Any]:
        host: Any = self.host
        late, guilty = self.lateness.answer(host, runs, self.episodes, now)
        return late and late.key, guilty and guilty.key


@pytest.fixture
def watched() -> Watched:
    """The first one is late from second 4 on; the second has just begun."""
    return Watched(late=0.0, other=3.9)


def test_nobody_is_asked_before_somebody_is_late(watched: Watched) -> None:
    watched.look(TURN_S)
    assert watched.host.asked == []
    watched.look(TURN_S + 0.1)
    watched.look(TURN_S + 0.2)
    assert watched.host.asked == [(0, 0)]  # once


def test_a_host_that_imports_is_not_asked(watched: Watched) -> None:
    watched.host.ready = False
    watched.look(100.0)
    assert watched.host.asked == []


def test_who_awaits_for_ever_is_cancelled_alone(watched: Watched) -> None:
    watched.look(4.1)
    assert watched.answer(None, 4.2) == ((0, 0), None)


def test_who_holds_the_loop_when_asked_twice_is_guilty(watched: Watched) -> None:
    watched.look(4.1)
    assert watched.answer((1, 0), 4.2) == (None, None)
    watched.look(4.3)
    assert len(watched.host.asked) == 1  # not at once
    watched.look(4.2 + HELD_SHARE * TURN_S)
    assert len(watched.host.asked) == 2
    assert watched.answer((1, 0), 5.3) == (None, (1, 0))


def test_who_only_works_while_another_is_late_is_not_guilty(watched: Watched) -> None:
    """Something was heard in between, so the loop goes on."""
    host: Any = watched.host
    watched.look(4.1)
    watched.answer((1, 0), 4.2)
    watched.lateness.heard(host)
    watched.look(4.2 + HELD_SHARE * TURN_S)
    assert watched.answer((1, 0), 5.3) == (None, None)


def test_who_holds_itself_up_is_guilty(watched: Watched) -> None:
    watched.look(4.1)
    watched.answer((0, 0), 4.2)
    watched.look(4.2 + HELD_SHARE * TURN_S)
    assert watched.answer((0, 0), 5.3) == (None, (0, 0))


def test_a_host_that_does_not_say_is_named_once(watched: Watched) -> None:
    watched.look(4.1)
    assert watched.look(4.1 + SAYS_WITHIN_S) == []
    assert watched.look(4.2 + SAYS_WITHIN_S) == [watched.host]
    watched.episodes.clear()
    assert watched.look(4.3 + SAYS_WITHIN_S) == []


def test_who_answers_while_the_host_is_asked_is_not_late(watched: Watched) -> None:
    watched.look(4.1)
    watched.episodes[0, 0].waits_since = None
    assert watched.answer(None, 4.2) == (None, None)


def test_who_is_late_in_its_next_turn_is_asked_about_anew(watched: Watched) -> None:
    watched.look(4.1)
    late = watched.episodes[0, 0]
    late.heard, late.waits_since = 1, 0.0
    assert watched.answer(None, 4.2) == (None, None)
    watched.look(4.3)
    assert watched.answer(None, 4.4) == ((0, 0), None)


def test_an_episode_that_has_ended_is_not_late(watched: Watched) -> None:
    watched.look(4.1)
    del watched.episodes[0, 0]
    assert watched.answer(None, 4.2) == (None, None)
