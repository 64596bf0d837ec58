"""``g-core trace``: a trace becomes numbers, and a timeline without overlaps."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from gcore_report.trace import numbers, timeline

from gcore_core import cli
from gcore_core.contract.run_files import Clock, Line, RecordTrace, Stage, read_trace

RECORD = RecordTrace(
    step=4,
    ordinal=10,
    sample=0,
    attempt=0,
    replica="rollout.0",
    sent_s=5.0,
    finished_s=6.0,
    n_actions=7,
    verdict="trained",
)
LINES: list[Line] = [
    Clock(1, 1000.0),
    RECORD,
    msgspec.structs.replace(RECORD, ordinal=11),
    Stage(4, 1, "rollout", 5.0, 6.0),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose trace has two records and one stage."""
    (tmp_path / "trace").mkdir()
    content = b"".join(msgspec.json.encode(line) + b"\n" for line in LINES)
    (tmp_path / "trace" / "controller.1.jsonl").write_bytes(content)
    return tmp_path


def test_slices_of_one_row_never_overlap_and_include_all_records() -> None:
    records = [
        RecordTrace(
            step=0,
            ordinal=i,
            sample=0,
            attempt=0,
            replica=f"rollout.{i % 2}",
            sent_s=i * 0.3,
            finished_s=i * 0.3 + 1,
        )
        for i in range(12)
    ]
    events = [event for event in timeline(records) if event["ph"] == "X"]
    assert len(events) == 12
    json.dumps(events)
    for row in {(event["pid"], event["tid"]) for event in events}:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["tid"]) == row)
        assert all(
            end <= start + 1e-6 for (_, end), (start, _) in zip(spans, spans[1:], strict=False)
        )


def test_a_timeline_that_cannot_be_written_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / "gone" / "timeline.json"
    assert cli.main(["trace", str(run_dir), "--perfetto", str(file)]) == 2
    assert capsys.readouterr().err.startswith(
        f"--perfetto: {file} cannot be written: No such file or directory."
    )


def test_the_numbers_count_verdicts_and_stages(run_dir: Path) -> None:
    told = numbers(list(read_trace(run_dir)))
    assert (told["records"], told["records/trained"], told["actions/median"]) == (2, 2, 7)
    assert told["stage_s/rollout"] == pytest.approx(1.0)
    assert told["generation_s/median"] >= 1.0
