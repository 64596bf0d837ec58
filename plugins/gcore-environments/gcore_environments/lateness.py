"""Finds out which episode keeps an environment from answering, so that it alone fails.

Environments of one process share one event loop, so where one is late another may hold the loop.
The process is then asked which episode runs now. A thread that does nothing else answers:

    none                 the late one awaits what does not come: it alone is cancelled
    one                  it is asked again, a while later. Where the same one runs then, and no
                         environment was heard in between, that one holds the loop: it is guilty
    there is no answer   code in C holds the whole process: nobody is known to be guilty
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gcore_environments.episodes import Episode
from gcore_environments.hosts import Host
from gcore_environments.turns import Key

#: Seconds within which a process must say which episode runs.
SAYS_WITHIN_S = 2.0
#: The second question follows the first answer after this share of ``turn_s``.
HELD_SHARE = 0.25


@dataclass
class _Inquiry:
    """A question to a process: which episode runs now.

    late: the episode that is waited for.
    heard: how many replies it had got then.
    asked_at: when the question was sent, or is to be sent again, by ``time.monotonic``.
    is_sent: whether its answer is awaited.
    suspect: the episode that ran when it was asked first; None before, or where an environment was
        heard since.
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
        """Asks the hosts of late episodes which one runs.

        Returns the hosts that have not answered such a question in time.

        now: by ``time.monotonic``.
        """
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
        """Notes that an environment of a host was heard: its loop goes on, so nobody holds it."""
        if host in self._inquiries:
            self._inquiries[host].suspect = None

    def forget(self, host: Host) -> None:
        """Forgets a host that is gone."""
        self._inquiries.pop(host, None)

    def answer(
        self, host: Host, runs: Key | None, episodes: Mapping[Key, Episode], now: float
    ) -> tuple[Episode | None, Episode | None]:
        """Takes a host's answer; returns (the late episode to cancel, the episode at fault).

        At most one of them is not None. Both are None where it is to be asked again, or where the
        late one has been heard meanwhile.

        runs: the episode that runs in the host's loop, if any.
        episodes: those that are still played.
        now: by ``time.monotonic``.
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
