"""Makes the timeline of every process that the trace knows, and says why each was idle.

Busy is what the trace has: a generator between the sending of a request and its record, the scorers
between a record and its last reward, the trainer in preparation, training and push. What is left of
a step's time is idle, and its cause is the stage that the run was in meanwhile.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract import run_files
from gcore_core.contract.run_files import Clock, Line, RecordTrace, Stage
from gcore_report.page import limits
from gcore_report.page.runs import Run

Span = tuple[float, float]

RULE = (
    f"Drawn are the last {limits.TIMELINE_STEPS} steps; idle time is summed over all steps that "
    f"the last {limits.TRACE_BYTES >> 20} MiB of each trace hold. Requests that overlap are one "
    "bar. Of an evaluation the trace has no requests: generators and scorers count as busy in it."
)
SCORERS = "scorers"
TRAINER = "policy"
#: Stage of the run -> what a process that does nothing in it waits for.
CAUSES = {
    "rollout": "waits in the rollout",
    "prepare": "while records are prepared",
    "train": "while the policy is trained",
    "push": "while weights are pushed",
    "evaluation": "in an evaluation",
    "": "between steps",
}
#: Stages in which the trainer works.
_TRAINS = ("prepare", "train", "push")


@dataclass
class _Step:
    """Gathers the spans of one step.

    busy: process -> spans that it was busy in.
    stages: of all shards.
    """

    busy: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    stages: list[Stage] = field(default_factory=list)


def timeline(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the bars and the idle time of each run that has a trace, and the rule."""
    return {"runs": [_of_run(run) for run in runs], "rule": RULE, "causes": list(CAUSES.values())}


def _of_run(run: Run) -> dict[str, Any]:
    """Returns the timeline of one run.

    processes: in the order in which they stand.
    bars: each [process, what, step, start, end], seconds since the first bar.
    idle: process -> cause -> seconds; busy_s: process -> seconds.
    """
    steps, shards = _read(run)
    lead = min(shards, default=0)
    idle: dict[str, dict[str, float]] = {}
    busy_s: dict[str, float] = {}
    bars: list[list[Any]] = []
    drawn = set(sorted(steps)[-limits.TIMELINE_STEPS :])
    names = {name for step in steps.values() for name in step.busy}
    before_s: float | None = None
    for number in sorted(steps):
        step = steps[number]
        own = sorted((s for s in step.stages if s.shard == lead), key=lambda stage: stage.start_s)
        if not own:
            continue
        _add_known_work(step, own, names)
        windows = _windows(own, before_s)
        before_s = max(stage.end_s for stage in own)
        for name in [*sorted(names), TRAINER]:
            spans = united(step.busy.get(name, []))
            whole = (windows[0][1], windows[-1][2])
            busy_s[name] = busy_s.get(name, 0.0) + covered(spans, whole)
            causes = idle.setdefault(name, dict.fromkeys(CAUSES.values(), 0.0))
            for what, start_s, end_s in windows:
                seconds = max(0.0, end_s - start_s)
                causes[CAUSES.get(what, what)] = (
                    causes.get(CAUSES.get(what, what), 0.0) + seconds
                ) - covered(spans, (start_s, end_s))
        if number in drawn:
            bars += _bars(number, step)
    start_s = min((bar[3] for bar in bars), default=0.0)
    for bar in bars:
        bar[3] = round(bar[3] - start_s, 5)
        bar[4] = round(bar[4] - start_s, 5)
    return {
        "label": run.label,
        "processes": list(dict.fromkeys(bar[0] for bar in sorted(bars, key=_order))),
        "bars": bars,
        "idle": {
            name: {cause: round(max(0.0, s), 4) for cause, s in causes.items()}
            for name, causes in idle.items()
        },
        "busy_s": {name: round(seconds, 4) for name, seconds in busy_s.items()},
        "steps": len(steps),
    }


def _order(bar: Sequence[Any]) -> tuple[int, str]:
    """Sorts processes as a step goes through them: controllers, generators, scorers, trainer."""
    name = str(bar[0])
    ranks = {"controller": 0, SCORERS: 2, TRAINER: 3}
    return ranks.get(name.partition(".")[0], 1), name


def _add_known_work(step: _Step, stages: Iterable[Stage], names: Iterable[str]) -> None:
    """Adds what the stages alone say: the trainer's work, and generators' in an evaluation."""
    for stage in stages:
        span = (stage.start_s, stage.end_s)
        if stage.name in _TRAINS:
            step.busy[TRAINER].append(span)
        if stage.name == "evaluation":
            for name in names:
                step.busy[name].append(span)


def _windows(stages: Sequence[Stage], before_s: float | None) -> list[tuple[str, float, float]]:
    """Cuts a step's time at its stages: (stage, start, end); "" between them."""
    windows = []
    now_s = stages[0].start_s if before_s is None else before_s
    for stage in stages:
        if stage.start_s > now_s:
            windows.append(("", now_s, stage.start_s))
        windows.append((stage.name, max(now_s, stage.start_s), stage.end_s))
        now_s = max(now_s, stage.end_s)
    return windows


def _bars(number: int, step: _Step) -> Iterator[list[Any]]:
    for stage in step.stages:
        if stage.end_s - stage.start_s > 1e-3:
            name = f"controller.{stage.shard}"
            yield [name, stage.name, number, stage.start_s, stage.end_s]
            if stage.name in _TRAINS and stage.shard == min(s.shard for s in step.stages):
                yield [TRAINER, stage.name, number, stage.start_s, stage.end_s]
    for name, spans in step.busy.items():
        if name != TRAINER:
            what = "rewards" if name == SCORERS else "generation"
            yield from ([name, what, number, start, end] for start, end in united(spans))


def united(spans: Iterable[Span]) -> list[Span]:
    """Returns spans that do not overlap and cover the same time, in order."""
    joined: list[Span] = []
    for start_s, end_s in sorted(spans):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
        else:
            joined.append((start_s, end_s))
    return joined


def covered(spans: Iterable[Span], window: Span) -> float:
    """Returns how many seconds of a window are within spans that do not overlap."""
    start_s, end_s = window
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in spans)


# -- reading ---------------------------------------------------------------------------------------


def _read(run: Run) -> tuple[dict[int, _Step], set[int]]:
    """Returns what each step was busy with, and the shards that have stages."""
    steps: dict[int, _Step] = defaultdict(_Step)
    shards: set[int] = set()
    for path in sorted((run.directory / run_files.TRACE).glob("*.jsonl")):
        for line, ahead_s in lines_of(path, limits.TRACE_BYTES):
            if isinstance(line, Stage):
                step = steps[line.step]
                step.stages.append(
                    msgspec.structs.replace(
                        line, start_s=line.start_s + ahead_s, end_s=line.end_s + ahead_s
                    )
                )
                shards.add(line.shard)
            elif isinstance(line, RecordTrace):
                _add_record(steps[line.step], line, ahead_s)
    return steps, shards


def _add_record(step: _Step, record: RecordTrace, ahead_s: float) -> None:
    finished_s = record.finished_s + ahead_s
    step.busy[record.replica].append((record.sent_s + ahead_s, finished_s))
    if record.scored_s:
        step.busy[SCORERS].append((finished_s, record.scored_s + ahead_s))
    for asked in record.asked:
        span = (asked.sent_s + ahead_s, asked.finished_s + ahead_s)
        step.busy[f"{asked.role}.{asked.replica}"].append(span)


def lines_of(path: Path, most_bytes: int) -> Iterator[tuple[Line, float]]:
    """Yields the lines at the end of a trace, each with what makes its times those of the day.

    A line that cannot be read is left out: the run may be writing it.
    """
    decode = msgspec.json.Decoder(Line).decode
    if not path.stat().st_size:
        return
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        start = max(0, len(content) - most_bytes)
        if start:
            start = content.find(b"\n", start) + 1
        ahead_s = _clock_before(content, start)
        content.seek(start)
        for text in iter(content.readline, b""):
            try:
                line = decode(text)
            except msgspec.MsgspecError:
                continue
            if isinstance(line, Clock):
                ahead_s = line.wall_s
            yield line, ahead_s


def _clock_before(content: mmap.mmap, start: int) -> float:
    """Returns the clock that the last start of the process before a place has written."""
    place = content.rfind(b'{"what":"clock"', 0, start)
    if place < 0:
        return 0.0
    end = content.find(b"\n", place)
    return msgspec.json.decode(content[place:end], type=Clock).wall_s
