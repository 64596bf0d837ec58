"""Writes what a shard saw of every record and stage, with times.

Each is one JSON line of ``trace/controller.<shard>.jsonl``. ``gcore_core.contract.run_files`` has
the types of the lines and reads them.

Times are seconds of the event loop's clock. A line says how far that is from the time of day on the
supervisor's machine; each process that writes a file begins with one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.records import OK, Header, RecordScore
from gcore_core.contract.run_files import Asked, Clock, GroupAdvantages, Line, RecordTrace, Stage
from gcore_core.runtime.journal import Journal

_FLUSH_LINES = 1024


class Stopwatch:
    """Measures the seconds of each stage of a step, by the event loop's clock, for the trace.

    laps_s: stage -> its seconds.
    """

    def __init__(self, trace: Trace, step: int) -> None:
        self.laps_s: dict[str, float] = {}
        self._trace = trace
        self._step = step
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()

    def lap(self, name: str) -> None:
        """Ends the stage ``name`` here; it began where the one before it ended."""
        before_s = self._last_s
        self._last_s = self._loop.time()
        self.laps_s[name] = self._last_s - before_s
        self._trace.stage(self._step, name, before_s, self._last_s)

    def go_on(self) -> None:
        """Begins the next stage here: the time since the last lap belongs to no stage."""
        self._last_s = self._loop.time()

    def metrics(self) -> dict[str, float]:
        """Returns ``seconds/STAGE`` of each stage, and ``seconds/step``: all but the evaluation."""
        stages = {name: value for name, value in self.laps_s.items() if name != "evaluation"}
        seconds = {f"seconds/{name}": value for name, value in self.laps_s.items()}
        return seconds | {"seconds/step": sum(stages.values())}


class Trace:
    """Writes one shard's lines; without a directory it keeps nothing.

    Where its journal has ended, records are still kept until their verdict: placement measures by
    them.

    ahead_s: how far the time of day is from the event loop's clock. Until it is set, it is that of
        this machine.
    """

    def __init__(self, directory: str, shard: int) -> None:
        path = Path(directory) / f"controller.{shard}.jsonl"
        self._journal = Journal(path) if directory else None
        self._shard = shard
        self._encode = msgspec.json.Encoder().encode
        # By ``Header.key``, until their verdict.
        self._open: dict[tuple[int, int], RecordTrace] = {}
        self._lines: list[Any] = []
        self._has_begun = False
        self.ahead_s: float | None = None

    def finished(self, step: int, replica: str, sent_s: float, headers: Iterable[Header]) -> None:
        """Notes that headers came from a replica. An evaluation's are left out.

        sent_s: when the replica was asked.
        """
        if self._journal is None:
            return
        now_s = asyncio.get_running_loop().time()
        for h in headers:
            if h.ordinal >= 0:
                self._open[h.ordinal, h.sample] = RecordTrace(
                    step=step,
                    ordinal=h.ordinal,
                    sample=h.sample,
                    attempt=h.attempt,
                    replica=replica,
                    sent_s=sent_s,
                    finished_s=now_s,
                )

    def scored(self, scores: Iterable[RecordScore]) -> None:
        """Notes that scores of records came, and which answers of judges they rest on."""
        if self._open:
            now_s = asyncio.get_running_loop().time()
            for score in scores:
                if record := self._open.get((score.ordinal, score.sample)):
                    record.scored_s = now_s
                    if score.asked:
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

    def settled(self, group: Iterable[Header], verdict: str, reason: str) -> list[RecordTrace]:
        """Writes the records of a group that got its verdict, and returns them.

        They are returned whether they could be written or not.
        """
        headers = list(group)
        records = self.seen(headers, verdict, reason)
        for h in headers:
            self._open.pop(h.key, None)
        for record in records:
            self._write(record)
        return records

    def seen(self, group: Iterable[Header], verdict: str, reason: str) -> list[RecordTrace]:
        """Returns the records of a group that got its verdict, without what other processes know.

        They are written later, when a step takes the group (``settled``).
        """
        records = []
        for h in group:
            record = self._open.get(h.key)
            if record is not None:
                record.version = h.versions[1]
                record.n_prompt = h.n_prompt
                record.n_actions = h.n_actions
                record.status = h.status
                record.verdict = verdict
                record.reason = h.reason or reason
                record.chunk_bytes = 0 if h.columns is None else h.columns.nbytes
                if h.media:
                    record.media_bytes = sum(ref.nbytes for ref in h.media.values())
                record.row = h.row
                record.digests = _hex(h.prompt_digest), _hex(h.digests[0]), _hex(h.digests[1])
                record.rewards = h.rewards
                record.reward_status = {k: v for k, v in h.reward_status.items() if v != OK}
                records.append(record)
        return records

    def advantages(self, step: int, advantages: Mapping[tuple[int, int], float]) -> None:
        """Writes the advantages of the records that a step trains on, by (ordinal, sample)."""
        if self._journal is None:
            return
        groups: dict[int, dict[int, float]] = {}
        for (ordinal, sample), value in advantages.items():
            groups.setdefault(ordinal, {})[sample] = value
        for ordinal, values in groups.items():
            self._write(GroupAdvantages(step, ordinal, values))

    def stage(self, step: int, name: str, start_s: float, end_s: float) -> None:
        """Writes one stage of a step; times are by the event loop's clock."""
        if self._journal is not None:
            self._write(Stage(step, self._shard, name, start_s, end_s))

    def _write(self, line: Line) -> None:
        self._lines.append(msgspec.Raw(self._encode(line)))
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Appends the lines that wait to the file."""
        if self._journal is None or not self._lines:
            return
        lines = self._lines
        self._lines = []
        if not self._has_begun:
            with contextlib.suppress(OSError):  # the journal says it
                self._journal.path.parent.mkdir(exist_ok=True)
            ahead_s = self.ahead_s
            if ahead_s is None:
                ahead_s = time.time() - asyncio.get_running_loop().time()
            lines.insert(0, Clock(self._shard, ahead_s))
            self._has_begun = True
        self._journal.append(lines)


def _hex(digest: int) -> str:
    return f"{digest:016x}" if digest else ""
