"""Finds out who keeps an environment from answering, so that the guilty alone fails.

Environments of one process share one event loop. Where one of them is late, another may hold the
loop. So the process is asked *who* runs; a thread of its own answers:

    nobody runs          the late one awaits what does not come: it alone is cancelled
    one runs, twice      and nothing was heard in between: it holds the loop, and is guilty
    no answer            code in C holds the whole process: nobody is known to be guilty
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gcore_environments.episodes import Episode
from gcore_environments.hosts import Host
from gcore_environments.turns import Key

#: Within how many seconds a process says who runs. Its thread does nothing else.
SAYS_WITHIN_S = 2.0
#: Who holds the loop for this share of ``turn_s``, while another is late, is guilty.
HELD_SHARE = 0.25


@dataclass
class _Inquiry:
    """A question to a process.

    late: the episode that is waited for.
    heard: how many replies that one had got.
    asked_at: when the question was sent, or is to be sent again.
    is_sent: whether its answer is awaited.
    suspect: who ran when it was asked first.
    """

    late: Episode
    heard: int
    asked_at: float
    is_sent: bool = True
    suspect: Key | None = None


class Lateness:
    """Watches the clocks of all episodes.

    turn_s: how long an environment may take for one observation.
    """

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._inquiries: dict[Host, _Inquiry] = {}

    def look(self, episodes: Mapping[Key, Episode], now: float) -> list[Host]:
        """Asks the hosts of late episodes who runs; returns those that do not say."""
        for episode in episodes.values():
            host = episode.host
            if host.ready and host not in self._inquiries and self._is_late(episode, now):
                self._inquiries[host] = _Inquiry(episode, episode.heard, now)
                _ask(host, episode)
        for host, asked in self._inquiries.items():
            if not asked.is_sent and now >= asked.asked_at:
                asked.is_sent = True
                _ask(host, asked.late)
        silent = [
            host
            for host, asked in self._inquiries.items()
            if asked.is_sent and now > asked.asked_at + SAYS_WITHIN_S
        ]
        for host in silent:
            self.forget(host)
        return silent

    def heard(self, host: Host) -> None:
        """Notes that a host has said something: its loop goes on, so nobody holds it."""
        if host in self._inquiries:
            self._inquiries[host].suspect = None

    def forget(self, host: Host) -> None:
        """Forgets a host that is gone."""
        self._inquiries.pop(host, None)

    def answer(
        self, host: Host, runs: Key | None, episodes: Mapping[Key, Episode], now: float
    ) -> tuple[Episode | None, Episode | None]:
        """Takes what a host says; returns (who is to be cancelled, who holds all others up).

        runs: the episode that runs in the host's loop, if any.
        episodes: those that are still played.
        """
        asked = self._inquiries.pop(host, None)
        if asked is None:
            return None, None
        late = asked.late
        is_over = episodes.get(late.key) is not late or late.heard != asked.heard
        if is_over or not self._is_late(late, now):
            return None, None
        running = None if runs is None else episodes.get(runs)
        if running is None:
            return late, None
        if runs == asked.suspect:
            return None, running
        again_at = now + HELD_SHARE * self._turn_s
        self._inquiries[host] = _Inquiry(late, late.heard, again_at, is_sent=False, suspect=runs)
        return None, None

    def _is_late(self, episode: Episode, now: float) -> bool:
        since = episode.waits_since
        return since is not None and now - since > self._turn_s


def _ask(host: Host, late: Episode) -> None:
    host.send(op="who", id=list(late.key))
