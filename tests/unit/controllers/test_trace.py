"""What a trace holds is read back, whole or cut off."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gcore_core.contract.errors import DataError, WorkerDied
from gcore_core.contract.records import Header, Inquiry, RecordScore, Ref
from gcore_core.contract.run_files import Clock, RecordTrace, Stage, read_trace
from gcore_core.controllers.tracing import Trace
from gcore_core.node.worker import Worker
from gcore_core.runtime.messages import Nothing, TimeOfDay


def header(ordinal: int, sample: int = 0) -> Header:
    ref = Ref("node0", "slab", 0, 640, 1, b"")
    return Header(
        ordinal,
        sample,
        0,
        0,
        versions=(2, 3),
        n_prompt=5,
        n_actions=7,
        columns=ref,
        media={"image": ref},
    )


async def _write(directory: Path, ordinals: list[int]) -> None:
    trace = Trace(str(directory / "trace"), 1)
    headers = [header(ordinal) for ordinal in ordinals]
    now_s = asyncio.get_running_loop().time()
    trace.finished(4, "rollout.0", now_s - 1.0, headers)
    asked = [Inquiry("judge", 2, 30, 4, began_ago_s=0.5, ended_ago_s=0.25)]
    trace.scored([RecordScore(ordinals[0], 0, {"judged": 1.0}, {"judged": "ok"}, asked=asked)])
    for one in headers:
        trace.settled([one], "trained", "")
    trace.stage(4, "rollout", now_s - 1.0, now_s)
    trace.flush()


def test_records_and_stages_are_read_back_with_times_of_day(tmp_path: Path) -> None:
    before_s = time.time()
    asyncio.run(_write(tmp_path, [10, 11]))
    clock, first, second, stage = read_trace(tmp_path)
    assert isinstance(clock, Clock) and clock.shard == 1
    assert (
        isinstance(first, RecordTrace)
        and isinstance(second, RecordTrace)
        and isinstance(stage, Stage)
    )
    assert (first.step, first.ordinal, first.replica, first.verdict) == (
        4,
        10,
        "rollout.0",
        "trained",
    )
    assert (first.n_prompt, first.n_actions, first.version) == (5, 7, 3)
    assert (first.chunk_bytes, first.media_bytes) == (640, 640)
    assert before_s - 2 < first.sent_s < first.finished_s <= first.scored_s <= time.time() + 1
    assert second.scored_s == 0, "it was not scored, so it has no such time"
    (asked,) = first.asked
    assert (asked.role, asked.replica, asked.n_prompt, asked.n_actions) == ("judge", 2, 30, 4)
    assert asked.finished_s - asked.sent_s == pytest.approx(0.25)
    assert first.sent_s < asked.sent_s < asked.finished_s < first.scored_s
    assert stage.end_s - stage.start_s == pytest.approx(1.0)


def test_records_of_an_evaluation_are_left_out(tmp_path: Path) -> None:
    asyncio.run(_write(tmp_path, [-3]))
    assert not [line for line in read_trace(tmp_path) if isinstance(line, RecordTrace)]


def test_a_truncated_last_line_is_left_out_and_a_broken_line_is_named(tmp_path: Path) -> None:
    asyncio.run(_write(tmp_path, [10]))
    (file,) = (tmp_path / "trace").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert len(list(read_trace(tmp_path))) == 2
    file.write_bytes(b"{}\n" + whole)
    with pytest.raises(DataError, match=r"controller\.1\.jsonl:1"):
        list(read_trace(tmp_path))
    with pytest.raises(DataError, match="the run has no trace"):
        list(read_trace(tmp_path / "nowhere"))


def test_a_trace_that_cannot_be_written_is_told_and_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace").write_text("a file where the directory should be")
    asyncio.run(_write(tmp_path, [10]))
    (message,) = caplog.messages
    assert "controller.1.jsonl cannot be written: Not a directory; it ends here" in message


async def _two_steps_on_a_full_disk(directory: Path) -> list[RecordTrace]:
    """Returns the records of a second step, after the trace of the first could not be written."""
    trace = Trace(str(directory / "trace"), 1)
    trace.finished(0, "rollout.0", 0.0, [header(10)])
    trace.settled([header(10)], "trained", "")
    trace.flush()
    trace.finished(1, "rollout.0", 0.0, [header(11)])
    return trace.settled([header(11)], "trained", "")


def test_records_are_still_measured_when_the_trace_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file where the directory would be")
    records = asyncio.run(_two_steps_on_a_full_disk(tmp_path))
    assert [record.ordinal for record in records] == [11], "the placement policy sees none of them"


def test_a_process_that_goes_on_says_how_its_clock_goes(tmp_path: Path) -> None:
    """It may be on another machine than the one before it, with a clock of its own."""

    async def stage(step: int, ahead_s: float) -> None:
        trace = Trace(str(tmp_path / "trace"), 1)
        trace.ahead_s = ahead_s
        trace.stage(step, "rollout", 10.0, 11.0)
        trace.flush()
        trace.stage(step, "training", 11.0, 12.0)
        trace.flush()

    asyncio.run(stage(1, 1000.0))
    asyncio.run(stage(2, 5000.0))
    lines = list(read_trace(tmp_path))
    assert [line.shard for line in lines if isinstance(line, Clock)] == [1, 1]
    began_s = [line.start_s for line in lines if isinstance(line, Stage)]
    assert began_s == [1010.0, 1011.0, 5010.0, 5011.0]


class LateSupervisor:
    """Loses the first answer after a while, and then tells a time that is 1000 s ahead."""

    def __init__(self) -> None:
        self.calls = 0

    def peer(self, name: str) -> LateSupervisor:
        return self

    async def call(self, endpoint: Any, request: Nothing, **_: Any) -> TimeOfDay:
        self.calls += 1
        if self.calls == 1:
            await asyncio.sleep(1.0)
            raise WorkerDied("the answer is lost")
        return TimeOfDay(asyncio.get_running_loop().time() + 1000.0)


async def test_a_lost_answer_does_not_move_the_clock_of_a_trace() -> None:
    network: Any = LateSupervisor()
    ahead_s = await Worker._time_of_day(cast(Worker, SimpleNamespace(_network=network)))
    assert network.calls == 2
    assert ahead_s == pytest.approx(1000.0, abs=0.25)
