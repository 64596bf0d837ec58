"""Writes what a shard saw of every record and stage, with times: a JSON line each, in
``trace/controller.<shard>.jsonl``.

Times are seconds of the event loop's clock, which the processes of one machine share; the first
line of a file says how far that is from the time of day. ``gcore_core.contract.run_files`` has the
types of the lines and reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from gcore_core.contract.records import Header, RecordScore
from gcore_core.contract.run_files import Asked, Clock, Line, Record, Stage

_FLUSH_LINES = 1024


class Stopwatch:
    """Seconds of each stage of a step, by the clock of the event loop; they go into the trace."""

    def __init__(self, trace: Trace, step: int) -> None:
        self.laps_s: dict[str, float] = {}
        self._trace, self._step = trace, step
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()

    def lap(self, name: str) -> None:
        """The stage ``name`` ends here; it began where the one before it ended."""
        before_s = self._last_s
        self._last_s = self._loop.time()
        self.laps_s[name] = self._last_s - before_s
        self._trace.stage(self._step, name, before_s, self._last_s)

    def go_on(self) -> None:
        """What came since the last lap belongs to no stage."""
        self._last_s = self._loop.time()

    def metrics(self) -> dict[str, float]:
        """``seconds/STAGE``, and their sum without the evaluation, ``seconds/step``."""
        stages = {name: value for name, value in self.laps_s.items() if name != "evaluation"}
        seconds = {f"seconds/{name}": value for name, value in self.laps_s.items()}
        return seconds | {"seconds/step": sum(stages.values())}


class Trace:
    """Writes one shard's lines; without a directory it keeps nothing."""

    def __init__(self, directory: str, shard: int) -> None:
        self._path = Path(directory) / f"controller.{shard}.jsonl" if directory else None
        self._shard = shard
        self._encode = msgspec.json.Encoder().encode
        self._open: dict[tuple[int, int], Record] = {}
        self._lines: list[bytes] = []

    def finished(self, step: int, replica: str, sent_s: float, headers: Iterable[Header]) -> None:
        """Headers came from a replica. An evaluation's, which get no verdict, are left out."""
        if self._path is None:
            return
        now_s = asyncio.get_running_loop().time()
        record = partial(Record, step=step, replica=replica, sent_s=sent_s, finished_s=now_s)
        for h in (header for header in headers if header.ordinal >= 0):
            self._open[h.key] = record(ordinal=h.ordinal, sample=h.sample, attempt=h.attempt)

    def scored(self, scores: Iterable[RecordScore]) -> None:
        """Some rewards of some records came."""
        if self._open:
            now_s = asyncio.get_running_loop().time()
            for score in scores:
                if record := self._open.get((score.ordinal, score.sample)):
                    record.scored_s = now_s
                    record.asked = record.asked + [
                        Asked(
                            a.role,
                            a.replica,
                            a.n_prompt,
                            a.n_actions,
                            now_s - a.began_ago_s,
                            now_s - a.ended_ago_s,
                        )
                        for a in score.asked
                    ]

    def settled(self, group: Iterable[Header], verdict: str, reason: str) -> list[Record]:
        """A group got its verdict: its records are written, and returned."""
        found = []
        for h in group:
            record = self._open.pop(h.key, None)
            if record is not None:
                record.version, record.n_prompt, record.n_actions = (
                    h.versions[1],
                    h.n_prompt,
                    h.n_actions,
                )
                record.status, record.verdict, record.reason = h.status, verdict, h.reason or reason
                record.chunk_bytes = 0 if h.columns is None else h.columns.nbytes
                record.media_bytes = sum(ref.nbytes for ref in h.media.values())
                self._write(record)
                found.append(record)
        return found

    def stage(self, step: int, name: str, start_s: float, end_s: float) -> None:
        if self._path is not None:
            self._write(Stage(step, self._shard, name, start_s, end_s))

    def _write(self, line: Line) -> None:
        self._lines.append(self._encode(line))
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Appends what there is to the file. A disk that is full loses lines, not the run."""
        if self._path is None or not self._lines:
            return
        lines, self._lines = self._lines, []
        try:
            if not self._path.exists():
                self._path.parent.mkdir(exist_ok=True)
                ahead_s = time.time() - asyncio.get_running_loop().time()
                lines.insert(0, self._encode(Clock(self._shard, ahead_s)))
            with self._path.open("ab") as file:
                file.write(b"\n".join(lines) + b"\n")
        except OSError:
            self._path = None
