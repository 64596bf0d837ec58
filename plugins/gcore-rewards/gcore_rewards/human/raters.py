"""Keeps what raters said: in memory to choose what comes next, and in a journal for good."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Generic

from gcore_rewards.human.journal import Journal, Tail
from gcore_rewards.human.judgements import Line, Said, Undone


class Refusal(Exception):
    """An answer that is not taken.

    status: of HTTP: 404 for something that does not exist, 409 for what was answered before, 422
        for an answer of another form.
    """

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class SaidByRaters(Generic[Said]):
    """What raters said of what, less what they took back.

    path: the journal's file; a second start reads what it has.
    kind: ``Judgement`` or ``Label``.

    Raises ConfigError when another process has the file, DataError for a line that cannot be read.
    """

    def __init__(self, path: Path, kind: type[Said], todo: str) -> None:
        self.journal = Journal(path, todo)
        self._kind: type[Said] = kind
        self._last_number = 0
        # what -> rater -> what the rater said of it, in order
        self._of: dict[str, dict[str, list[Said]]] = defaultdict(dict)
        self._by: dict[str, list[Said]] = defaultdict(list)  # rater -> all, in order
        # rater -> what the rater took back last, and so is asked again at once
        self.again: dict[str, str] = {}
        try:
            for line in Tail[Line](path, Line).new():
                self._take(line)
        except BaseException:
            self.journal.close()
            raise

    def of(self, key: str, rater: str) -> list[Said]:
        """Returns what a rater said of something."""
        return self._of[key].get(rater, [])

    def count(self, key: str, without: str = "") -> int:
        """Returns how many raters, other than ``without``, said more of something than "skip"."""
        return sum(
            rater != without and any(said.category != "skip" for said in all_said)
            for rater, all_said in self._of[key].items()
        )

    def last(self, rater: str) -> int:
        """Returns the number of what a rater said last; 0 where that is nothing."""
        said = self._by[rater]
        return said[-1].number if said else 0

    def add(self, make: Callable[[int, float], Said]) -> None:
        """Writes what a rater said; returns when it is on the disk.

        make: makes the line from its number and the time, in seconds since 1970.

        Raises OSError when it cannot be written.
        """
        said = make(self._last_number + 1, time.time())
        self.journal.append(said)
        self._take(said)
        self.again.pop(said.rater, None)

    def undo(self, rater: str, number: int) -> None:
        """Takes back what a rater said last.

        number: of that line, as the page showed it, so that a second click undoes nothing more.

        Raises Refusal when it is not the rater's last line, OSError when it cannot be written.
        """
        all_said = self._by[rater]
        if not all_said or all_said[-1].number != number:
            raise Refusal(409, "this was taken back before, or is not your last answer.")
        key = all_said[-1].key
        line = Undone(number=number, rater=rater, time_unix_s=time.time())
        self.journal.append(line)
        self._take(line)
        self.again[rater] = key

    def _take(self, line: Line) -> None:
        if isinstance(line, Undone):
            for said in [said for said in self._by[line.rater] if said.number == line.number]:
                self._by[line.rater].remove(said)
                self._of[said.key][line.rater].remove(said)
        elif isinstance(line, self._kind):
            self._last_number = max(self._last_number, line.number)
            self._by[line.rater].append(line)
            self._of[line.key].setdefault(line.rater, []).append(line)
