"""Remembers, across restarts of a scorer, the records whose reward ended its process.

A function that holds the interpreter's lock, such as a regular expression, lets no other code of
its process run: not the time limit, and not the answer that the records have timed out. So a scorer
notes what it begins and how long that may take. Its agent looks at the note, and ends a process
that goes beyond the limit. The process that takes its place reads the note.

Nothing in the process takes part in that. Signals, timers and ``faulthandler`` are the user's: what
a function does with them neither lifts the limit nor meets it.

A coroutine that computes in place of waiting does the same to the event loop. Many run at a time
and may wait long, so the note has no limit for them: such a process no longer answers, and its
agent ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from gcore_core.runtime.messages import ENDED_BY_LIMIT, ENDED_HUNG

log = logging.getLogger(__name__)
#: Seconds between a reward's time limit and that of the agent. The reward's comes first wherever
#: other code of the process can run.
GRACE_S = 2.0
#: How much of what is over is kept: the latest, so that the note stays small.
_KEPT = 1024
#: The first byte of a note: whether what it calls running still runs. When a plain function returns
#: only this byte is written, so that a call writes its note once.
_BUSY = b"1"
_IDLE = b"0"


class Key(NamedTuple):
    """Names one reward's work on one record.

    version: of the weights that sampled the record's last action. An evaluation asks again for the
        same ordinals with other weights.
    """

    reward: str
    purpose: str
    ordinal: int
    sample: int
    version: int


class _Note(msgspec.Struct):
    """Holds what one process leaves to the next.

    running: what the plain function that runs now was called with; empty where none runs.
    number: of that call, among those of its process.
    limit_s: the seconds after which the agent ends it.
    waiting: what the coroutines that have not returned were called with.
    suspects: what ran when a process ended, but is not proved to have ended it: it ran beside work
        of other groups, or the process hung for the first time.
    over: what is proved to have ended a process, or has used up its time.
    """

    running: list[Key] = []
    number: int = 0
    limit_s: float = 0.0
    waiting: list[Key] = []
    suspects: list[Key] = []
    over: list[Key] = []


class Overruns:
    """Keeps the note of one scorer worker.

    A call that holds several groups' records tells only that one of them overran. The records of
    such a call are suspects: the next process scores each group of them alone. A group that ends
    its process alone is over: its records have timed out, and are not scored again.
    """

    def __init__(self, path: Path | None = None, ending: str = "") -> None:
        """Reads the note that an earlier process has left.

        path: of the note; None keeps none.
        ending: how that process ended; see ``WorkerSpec.ending``.
        """
        self._path = path
        self._file = -1  # the note, once it has been written
        self._is_told = False  # that it cannot be written
        self._note = _Note()
        if path is not None and path.exists():
            # A process that was killed while it wrote has left half a note, which says nothing.
            with contextlib.suppress(msgspec.DecodeError):
                self._note = _read(path.read_bytes())
        self._over = set(self._note.over)
        self._judge(ending)

    def _judge(self, ending: str) -> None:
        """Decides what the work that the earlier process did not finish is."""
        note = self._note
        # The limit is a plain function's alone; whatever runs may have stopped the event loop.
        running = note.running + (note.waiting if ending == ENDED_HUNG else [])
        note.running = []
        note.waiting = []
        if not running:
            return
        if ending not in (ENDED_BY_LIMIT, ENDED_HUNG):
            self._write()  # should this process end, nothing of the former one is to blame
            return
        is_alone = len({key.ordinal for key in running}) == 1
        # The limit is of this work alone, so it is proof. A process that hung may have been stopped
        # by somebody; it is proof when it happens again.
        is_proof = ending == ENDED_BY_LIMIT or set(running) <= set(note.suspects)
        if is_alone and is_proof:
            self.add_over(running)
        else:
            note.suspects = list(dict.fromkeys([*note.suspects, *running]))[-_KEPT:]
        log.error(
            "rewards.%s: ended the process while %s were scored; rewards.%s.timeout_s bounds it",
            running[0].reward,
            _shown(running),
            running[0].reward,
        )
        self._write()

    def _is_over(self, key: Key) -> bool:
        """Returns whether this work has used up its time."""
        return key in self._over

    def suspects(self, keys: Collection[Key]) -> bool:
        """Returns whether any of this work is a suspect, which is to be scored alone."""
        return any(key in self._note.suspects for key in keys)

    def parts(self, keys: Sequence[Key]) -> list[list[int]]:
        """Divides work into calls: the indexes of ``keys`` of each call.

        What is over is in none. Each group of suspects is a call, the rest is one.
        """
        suspects: dict[int, list[int]] = {}
        others = []
        for i, key in enumerate(keys):
            if self._is_over(key):
                continue
            if key in self._note.suspects:
                suspects.setdefault(key.ordinal, []).append(i)
            else:
                others.append(i)
        # The harmless ones come first: they are answered whatever a suspect does.
        return [part for part in (others, *suspects.values()) if part]

    def add_over(self, keys: Sequence[Key]) -> None:
        """Notes work that used up its time, although other code could run meanwhile."""
        self._note.over = [*self._note.over, *keys][-_KEPT:]
        self._over = set(self._note.over)
        self._write()

    @contextlib.contextmanager
    def watch(self, keys: Collection[Key], timeout_s: float) -> Iterator[None]:
        """Notes that this work runs in the block, for the agent, which bounds the block."""
        self._note.running = list(keys)
        self._note.number += 1
        self._note.limit_s = timeout_s + GRACE_S
        self._write()
        try:
            yield
        finally:
            self._note.running = []
            if self._note.suspects:
                self._clear(keys)
            elif self._file >= 0:
                self._put(_IDLE)  # the note stays as it is, but nothing runs

    @contextlib.contextmanager
    def watch_waiting(self, keys: Collection[Key]) -> Iterator[None]:
        """Notes that a coroutine does this work in the block, beside others."""
        self._note.waiting = [*self._note.waiting, *keys]
        self._write()
        try:
            yield
        finally:
            for key in keys:
                self._note.waiting.remove(key)
            self._clear(keys)

    def _clear(self, keys: Collection[Key]) -> None:
        """Notes that work has ended, well or not, without its process."""
        self._note.suspects = [key for key in self._note.suspects if key not in keys]
        self._write()

    def _write(self) -> None:
        runs = _BUSY if self._note.running else _IDLE
        self._put(runs + msgspec.json.encode(self._note), whole=True)

    def _put(self, content: bytes, *, whole: bool = False) -> None:
        """Writes the beginning of the note; where there is no room for it, work goes on without.

        whole: nothing of the note before stays behind it.
        """
        if self._path is None:
            return
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            if whole:
                os.ftruncate(self._file, 0)
            os.pwrite(self._file, content, 0)
        except OSError as error:
            if not self._is_told:
                log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._is_told = True


def _read(content: bytes) -> _Note:
    """Decodes a note. Raises msgspec.DecodeError for half a note."""
    note = msgspec.json.decode(content[1:], type=_Note)
    if content[:1] == _IDLE:
        note.running = []
    return note


def note_path(directory: str, worker: str) -> Path:
    """Returns the path of a scorer worker's note.

    directory: the store's, which outlives the process.
    worker: its name, such as "scorer.0".
    """
    return Path(directory) / f"{worker}-running"


class Hold:
    """Measures, for an agent, how long one call holds a scorer.

    Make it when the scorer's process starts: a call that the process before it has left in the note
    does not count.
    """

    def __init__(self, path: Path) -> None:
        """Takes the path of the scorer's note."""
        self._path = path
        note = _note_of_running(path)
        self._number_before = note.number if note else 0
        self._number = 0  # of the call that was running at the last look; 0: none was
        self._held_s = 0.0
        self._limit_s = 0.0

    def goes_on(self) -> bool:
        """Looks at the note; returns whether the call still runs that ran at the last look."""
        note = _note_of_running(self._path)
        number = 0 if note is None or note.number == self._number_before else note.number
        if number and number == self._number:
            return True
        self._number = number
        self._held_s = 0.0
        self._limit_s = note.limit_s if note is not None else 0.0
        return False

    def is_over(self, more_s: float) -> bool:
        """Adds seconds to the time of the call; returns whether that is beyond its limit."""
        self._held_s += more_s
        return self._held_s > self._limit_s


def describe_running(path: Path) -> str:
    """Says which reward ran when the process that kept a note was ended; empty where none did."""
    note = _note_of_running(path)
    if note is None:
        return ""
    running = note.running
    reward = f"rewards.{running[0].reward}"
    return (
        f"{reward} held the process for longer than {reward}.timeout_s, with the records "
        f"{_shown(running)}"
    )


def describe_called(path: Path) -> str:
    """Says which reward ran when a process that kept a note ended by itself; empty where none."""
    note = _note_of_running(path)
    if note is None:
        return ""
    reward = f"rewards.{note.running[0].reward}"
    return f"{reward} was being called, with the records {_shown(note.running)}"


def _note_of_running(path: Path) -> _Note | None:
    """Returns a note which says that a plain function runs; None where it does not."""
    try:
        content = path.read_bytes()
        return _read(content) if content[:1] == _BUSY else None
    except (OSError, msgspec.DecodeError):  # no note, or half of one
        return None


def _shown(keys: Sequence[Key]) -> str:
    names = [f"{key.ordinal}/{key.sample}" for key in keys[:3]]
    return ", ".join(names) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
