"""The plugin ``trace`` sums up a run's trace, or writes it as a timeline: ``g-core trace RUN``."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider

if TYPE_CHECKING:
    from gcore_core.contract.run_files import Line, RecordTrace, Stage

_US_PER_S = 1e6


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="sum up a run's trace, or write it as a timeline",
        factory="gcore_report.trace:trace",
        parser="gcore_report.trace:make_parser",
    )


def trace(words: list[str]) -> int:
    """Runs ``g-core trace`` with these words; returns the exit code."""
    args = make_parser().parse_intermixed_args(words)
    import msgspec

    from gcore_core.contract.run_files import read_trace
    from gcore_core.kits.commands import write_file

    lines = list(read_trace(args.run_dir))
    if args.perfetto is not None:
        shown = {"traceEvents": list(timeline(lines)), "displayTimeUnit": "ms"}
        text = msgspec.json.encode(shown).decode()  # records of judges hold structs
        write_file(args.perfetto, text, option="--perfetto")
        print(f"{args.perfetto}: open it in ui.perfetto.dev")
        return 0
    values = numbers(lines)
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        for name, value in values.items():
            print(f"{name:<28} {value:12.4g}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of ``g-core trace``."""
    parser = argparse.ArgumentParser(
        prog="g-core trace",
        description="Sum up a run's trace, or write it as a timeline.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  g-core trace runs/quickstart/001 --perfetto timeline.json",
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="the run's directory, e.g. runs/quickstart/001",
    )
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a timeline that ui.perfetto.dev opens"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    return parser


def numbers(lines: Iterable[Line]) -> dict[str, float]:
    """Counts of records by verdict, their lengths and waits, and the mean seconds of each stage."""
    records, stages = _records_and_stages(lines)
    values: dict[str, float] = {}
    for record in records:
        name = f"records/{record.verdict}"
        values[name] = values.get(name, 0) + 1
    values["records"] = len(records)
    if records:
        generation_s = [record.finished_s - record.sent_s for record in records]
        values["actions/median"] = statistics.median(record.n_actions for record in records)
        values["actions/max"] = max(record.n_actions for record in records)
        values["generation_s/median"] = statistics.median(generation_s)
        values["generation_s/max"] = max(generation_s)
    rewarding_s = [record.scored_s - record.finished_s for record in records if record.scored_s]
    if rewarding_s:
        values["rewarding_s/median"] = statistics.median(rewarding_s)
        values["rewarding_s/max"] = max(rewarding_s)
    seconds_of = defaultdict(list)
    for stage in stages:
        seconds_of[stage.name].append(stage.end_s - stage.start_s)
    for name, seconds in seconds_of.items():
        values[f"stage_s/{name}"] = statistics.fmean(seconds)
    return values


def timeline(lines: Iterable[Line]) -> Iterator[dict[str, Any]]:
    """Yields Chrome trace events, in microseconds.

    A process for each replica holds its records: records that overlap lie in rows of their own, and
    rewarding follows generation in the same row. A process for each shard holds its stages.
    """
    records, stages = _records_and_stages(lines)
    processes: dict[str, int] = {}  # name -> its number in the timeline
    rows: dict[str, list[float]] = defaultdict(list)  # replica -> when each of its rows is free

    for record in sorted(records, key=lambda record: record.sent_s):
        yield from _process(record.replica, processes)
        busy_until_s = rows[record.replica]
        row = _free_row(busy_until_s, record.sent_s)
        busy_until_s[row : row + 1] = [max(record.finished_s, record.scored_s)]
        place = {"pid": processes[record.replica], "tid": row}
        facts = {
            name: getattr(record, name)
            for name in record.__struct_fields__
            if not name.endswith("_s")
        }
        generation = f"{record.ordinal}/{record.sample}"
        yield _slice(generation, place, record.sent_s, record.finished_s, facts)
        if record.scored_s:
            yield _slice("reward", place, record.finished_s, record.scored_s, {})
    for stage in stages:
        name = f"controller.{stage.shard}"
        yield from _process(name, processes)
        place = {"pid": processes[name], "tid": 0}
        yield _slice(stage.name, place, stage.start_s, stage.end_s, {"step": stage.step})


def _records_and_stages(lines: Iterable[Line]) -> tuple[list[RecordTrace], list[Stage]]:
    from gcore_core.contract.run_files import RecordTrace, Stage

    records = []
    stages = []
    for line in lines:
        if isinstance(line, RecordTrace):
            records.append(line)
        elif isinstance(line, Stage):
            stages.append(line)
    return records, stages


def _free_row(busy_until_s: list[float], start_s: float) -> int:
    """Returns the first row that is free at ``start_s``, else the number of a new one."""
    for row, until_s in enumerate(busy_until_s):
        if until_s <= start_s:
            return row
    return len(busy_until_s)


def _process(name: str, processes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Numbers a process at its first event, and yields the event that names it."""
    if name in processes:
        return
    processes[name] = len(processes) + 1
    yield {"ph": "M", "name": "process_name", "pid": processes[name], "args": {"name": name}}


def _slice(
    name: str, place: dict[str, int], start_s: float, end_s: float, facts: dict[str, Any]
) -> dict[str, Any]:
    """Makes a bar from ``start_s`` to ``end_s`` in the row and process of ``place``."""
    start_us = _US_PER_S * start_s
    end_us = _US_PER_S * end_s
    return {
        "ph": "X",
        "name": name,
        "args": facts,
        **place,
        "ts": start_us,
        "dur": end_us - start_us,
    }
