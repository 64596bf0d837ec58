"""Remembers, across restarts of a scorer, the records whose reward used up its time.

A function that holds the interpreter's lock, such as a regular expression, lets no other code of
its process run: not the time limit, and not the answer that the records have timed out. A coroutine
that computes in place of waiting does the same to the event loop. So a scorer notes what it begins
and how long that may take. Its agent looks at the note, and ends a process in which nothing began
or ended within the limit. The process that takes its place reads the note: all that ran then has
timed out, and is not asked again.

Nothing in the process takes part in that. Signals, timers and ``faulthandler`` are the user's: what
a function does with them neither lifts the limit nor meets it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

log = logging.getLogger(__name__)
#: Seconds between a reward's time limit and that of the agent. The reward's comes first wherever
#: other code of the process can run.
GRACE_S = 2.0
#: How much of what is over is kept: the latest, so that the note stays small.
_KEPT = 1024
#: The first byte of a note: whether what it calls running still runs. When the last call returns
#: only this byte is written, so that a call that runs alone writes its note once.
_BUSY = b"1"
_IDLE = b"0"


class RewardWork(NamedTuple):
    """Names one reward's work on one record.

    version: of the weights that sampled the record's last action. An evaluation asks again for the
        same ordinals with other weights.
    """

    reward: str
    purpose: str
    ordinal: int
    sample: int
    version: int


class _Running(msgspec.Struct):
    """Describes a call that has not returned.

    timeout_s: seconds that it may take.
    """

    keys: list[RewardWork]
    timeout_s: float


class _RunningCalls(msgspec.Struct):
    """Holds what one process leaves to the next.

    running: the calls that have not returned; coroutines run next to others.
    number: counts the changes of ``running``.
    over: what has used up its time.
    """

    running: list[_Running] = []
    number: int = 0
    over: list[RewardWork] = []

    @property
    def limit_s(self) -> float:
        """The seconds within which a process that is not held begins or ends a call."""
        return max(call.timeout_s for call in self.running) + GRACE_S

    def describe_running(self) -> tuple[list[str], str]:
        """Returns the rewards that run, as keys of a config, and the records that they score."""
        keys = [key for call in self.running for key in call.keys]
        rewards = list(dict.fromkeys(f"rewards.{key.reward}" for key in keys))
        return rewards, _shown(keys)


class Overruns:
    """Keeps the note of one scorer worker."""

    def __init__(self, path: Path | None = None, *, was_held: bool = False) -> None:
        """Reads the note that an earlier process has left.

        path: of the note; None keeps none.
        was_held: the agent ended that process at the limit; see ``WorkerSpec.was_held``. Any other
            end says nothing about what ran, which is asked again.
        """
        self._path = path
        self._file = -1  # the note, once it has been written
        self._is_told = False  # that it cannot be written
        self._note = _RunningCalls()
        if path is not None and path.exists():
            # A process that was killed while it wrote has left half a note, which says nothing.
            with contextlib.suppress(msgspec.DecodeError):
                self._note = _read(path.read_bytes())
        self._over = set(self._note.over)
        left = self._note.running
        if not left:
            return
        rewards, records = self._note.describe_running()
        self._note.running = []
        self._write()  # should this process end, nothing of the former one is to blame
        if was_held:
            self.add_over([key for call in left for key in call.keys])
            log.error(
                "%s: held the process beyond the time limit while %s were scored, which have timed "
                "out; %s bounds it",
                ", ".join(rewards),
                records,
                ", ".join(f"{reward}.timeout_s" for reward in rewards),
            )

    def is_over(self, key: RewardWork) -> bool:
        """Returns whether this work has used up its time."""
        return key in self._over

    def add_over(self, keys: Sequence[RewardWork]) -> None:
        """Notes work that has used up its time."""
        self._note.over = [*self._note.over, *keys][-_KEPT:]
        self._over = set(self._note.over)
        self._write()

    @contextlib.contextmanager
    def watch(self, keys: Collection[RewardWork], timeout_s: float) -> Iterator[None]:
        """Notes that this work runs in the block, for the agent, which bounds the block."""
        call = _Running(list(keys), timeout_s)
        self._note.running.append(call)
        self._note.number += 1
        self._write()
        try:
            yield
        finally:
            # By identity: the same work may run twice, as where a caller has lost its connection.
            self._note.running = [other for other in self._note.running if other is not call]
            if self._note.running:
                self._note.number += 1
                self._write()
            elif self._file >= 0:
                self._put(_IDLE)  # the note stays as it is, but nothing runs

    def _write(self) -> None:
        runs = _BUSY if self._note.running else _IDLE
        self._put(runs + msgspec.json.encode(self._note), whole=True)

    def _put(self, content: bytes, *, whole: bool = False) -> None:
        """Writes the beginning of the note; without room for it, work goes on.

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


def _read(content: bytes) -> _RunningCalls:
    """Decodes a note. Raises msgspec.DecodeError for half a note."""
    note = msgspec.json.decode(content[1:], type=_RunningCalls)
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
    """Measures, for an agent, for how long a scorer has begun and ended no call.

    Make it when the scorer's process starts: calls that the process before it has left in the note
    do not count.
    """

    def __init__(self, path: Path) -> None:
        """Takes the path of the scorer's note."""
        self._path = path
        note = _note_of_running(path)
        self._number_before = note.number if note else 0
        self._number = 0  # of the note at the last look; 0: nothing was running
        self._held_s = 0.0
        self._limit_s = 0.0

    def goes_on(self) -> bool:
        """Looks at the note; returns whether the same calls run as at the last look."""
        note = _note_of_running(self._path)
        number = 0 if note is None or note.number == self._number_before else note.number
        if number and number == self._number:
            return True
        self._number = number
        self._held_s = 0.0
        self._limit_s = note.limit_s if note is not None else 0.0
        return False

    def is_over(self, more_s: float) -> bool:
        """Adds seconds to the time of the calls; returns whether that is beyond their limit."""
        self._held_s += more_s
        return self._held_s > self._limit_s


def describe_running(path: Path) -> str:
    """Says which reward ran when the process that kept a note was ended; empty where none did."""
    note = _note_of_running(path)
    if note is None:
        return ""
    rewards, records = note.describe_running()
    limits = [f"{reward}.timeout_s" for reward in rewards]
    return (
        f"{' or '.join(rewards)} held the process for longer than {' and '.join(limits)}, with the "
        f"records {records}, which have timed out"
    )


def describe_called(path: Path) -> str:
    """Says which reward ran when a process that kept a note ended by itself; empty where none."""
    note = _note_of_running(path)
    if note is None:
        return ""
    rewards, records = note.describe_running()
    return f"{' or '.join(rewards)} was being called, with the records {records}"


def _note_of_running(path: Path) -> _RunningCalls | None:
    """Returns a note which says that something runs; None where it does not."""
    try:
        content = path.read_bytes()
        return _read(content) if content[:1] == _BUSY else None
    except (OSError, msgspec.DecodeError):  # no note, or half of one
        return None


def _shown(keys: Sequence[RewardWork]) -> str:
    names = [f"{key.ordinal}/{key.sample}" for key in keys[:3]]
    return ", ".join(names) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
