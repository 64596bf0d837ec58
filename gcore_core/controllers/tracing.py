"""What a shard saw of every record and stage, with times: a JSON line each, in
``trace/controller.<shard>.jsonl``.

Times are seconds of the event loop's clock, which the processes of one machine share; the first
line of a file says how far that is from the time of day. Lines have a ``what``: "clock", "record"
or "stage"; docs/how-to/trace.md lists their fields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Header, RecordScore

_FLUSH_LINES = 1024


class Clock(msgspec.Struct, tag="clock", tag_field="what", frozen=True):
    """First line of every start of a shard. wall_s: what to add to a time to get seconds since
    1970.
    """

    shard: int
    wall_s: float


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """One answer that a reward got about a record from a replica of a generator role, and when."""

    role: str
    replica: int
    n_prompt: int
    n_actions: int
    sent_s: float
    finished_s: float


class Record(msgspec.Struct, tag="record", tag_field="what", kw_only=True, omit_defaults=True):
    """One sampled record. sent_s: its lease left for the replica; finished_s: its header came;
    scored_s: its last reward came, or never (0). chunk_bytes: of the chunk its columns lie in, with
    others; media_bytes: of its media.
    verdict: "trained", "filtered", "quarantined", or "surplus" of one that its step did not need.
    asked: what judges answered about it. Fields that have their default are left out.
    """

    step: int
    ordinal: int
    sample: int
    attempt: int
    replica: str
    sent_s: float
    finished_s: float
    scored_s: float = 0.0
    version: int = 0
    n_prompt: int = 0
    n_actions: int = 0
    status: str = ""
    verdict: str = ""
    reason: str = ""
    chunk_bytes: int = 0
    media_bytes: int = 0
    asked: list[Asked] = []


class Stage(msgspec.Struct, tag="stage", tag_field="what", frozen=True):
    """One stage of a step on one shard: "rollout", "prepare", "train", "push" or "evaluation"."""

    step: int
    shard: int
    name: str
    start_s: float
    end_s: float


Line = Clock | Record | Stage


def read_trace(directory: Path) -> Iterator[Line]:
    """The lines of all shards' files in a run's directory, each file from its start; times are
    those of day.

    Raises DataError for a run without a trace, or a line that is none (the last one of a killed run
    is left out).
    """
    files = sorted((directory / "trace").glob("*.jsonl"))
    if not files:
        raise DataError(
            "the run has no trace.", where=str(directory), todo="give the directory of a run"
        )
    decode = msgspec.json.Decoder(Line).decode
    for path in files:
        ahead_s, lines = 0.0, path.read_bytes().split(b"\n")
        for number, text in enumerate(
            lines[:-1], 1
        ):  # behind the last newline is nothing, or half a line
            try:
                line = decode(text)
            except msgspec.MsgspecError as error:
                raise DataError(
                    "a line of the trace cannot be read.", where=f"{path}:{number}", why=str(error)
                ) from None
            if isinstance(line, Clock):
                ahead_s = line.wall_s
            yield _of_day(line, ahead_s)


def _of_day(line: Line, ahead_s: float) -> Line:
    times = {
        name: getattr(line, name)
        for name in line.__struct_fields__
        if name.endswith("_s") and name != "wall_s"
    }
    if isinstance(line, Record):
        line.asked = [
            msgspec.structs.replace(a, sent_s=a.sent_s + ahead_s, finished_s=a.finished_s + ahead_s)
            for a in line.asked
        ]
    return msgspec.structs.replace(
        line, **{name: value + ahead_s for name, value in times.items() if value}
    )


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
