"""A run's trace in numbers, and as a timeline."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from gcore_core.contract.run_files import Line, Record, Stage


def numbers(lines: Iterable[Line]) -> dict[str, float]:
    """Records by verdict, their lengths and waits, and mean seconds of the stages."""
    told: dict[str, float] = {}
    records, stages = [], defaultdict(list)
    for line in lines:
        if isinstance(line, Record):
            records.append(line)
            told[f"records/{line.verdict}"] = told.get(f"records/{line.verdict}", 0) + 1
        elif isinstance(line, Stage):
            stages[line.name].append(line.end_s - line.start_s)
    told["records"] = len(records)
    if records:
        told["actions/median"] = statistics.median(r.n_actions for r in records)
        told["actions/max"] = max(r.n_actions for r in records)
        told["generation_s/median"] = statistics.median(r.finished_s - r.sent_s for r in records)
        told["generation_s/max"] = max(r.finished_s - r.sent_s for r in records)
    if scored := [r.scored_s - r.finished_s for r in records if r.scored_s]:
        told["rewarding_s/median"] = statistics.median(scored)
        told["rewarding_s/max"] = max(scored)
    return told | {f"stage_s/{name}": statistics.fmean(seconds) for name, seconds in stages.items()}


def timeline(lines: Iterable[Line]) -> Iterator[dict[str, Any]]:
    """Chrome trace events (microseconds): a process per shard for stages and per replica for
    records, where records that overlap lie on rows of their own; rewarding follows generation in
    the same row.
    """
    processes: dict[str, int] = {}
    rows: dict[str, list[float]] = defaultdict(list)  # of a replica -> when each row is free again

    def process(name: str) -> Iterator[dict[str, Any]]:
        if name not in processes:
            processes[name] = len(processes) + 1
            yield {
                "ph": "M",
                "name": "process_name",
                "pid": processes[name],
                "args": {"name": name},
            }

    def slice_(
        name: str, where: tuple[str, int], span: tuple[float, float], facts: dict[str, Any]
    ) -> dict[str, Any]:
        start_us, end_us = (1e6 * seconds for seconds in span)
        placed = {
            "pid": processes[where[0]],
            "tid": where[1],
            "ts": start_us,
            "dur": end_us - start_us,
        }
        return {"ph": "X", "name": name, "args": facts, **placed}

    for line in sorted(
        (x for x in lines if isinstance(x, Record)), key=lambda record: record.sent_s
    ):
        yield from process(line.replica)
        end_s = max(line.finished_s, line.scored_s)
        free = rows[line.replica]
        row = next((i for i, busy_s in enumerate(free) if busy_s <= line.sent_s), len(free))
        free[row : row + 1] = [end_s]
        facts = {
            name: getattr(line, name) for name in line.__struct_fields__ if not name.endswith("_s")
        }
        place = (line.replica, row)
        yield slice_(f"{line.ordinal}/{line.sample}", place, (line.sent_s, line.finished_s), facts)
        if line.scored_s:
            yield slice_("reward", place, (line.finished_s, line.scored_s), {})
    for stage in lines:
        if isinstance(stage, Stage):
            name = f"controller.{stage.shard}"
            yield from process(name)
            yield slice_(stage.name, (name, 0), (stage.start_s, stage.end_s), {"step": stage.step})
