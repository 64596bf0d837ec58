from __future__ import annotations

import errno
import json
import math
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gcore_core.contract import run_files
from gcore_core.contract.errors import ConfigError, RunExists
from gcore_core.contract.records import StepReport
from gcore_core.run import directory as d
from gcore_core.run.supervised import hold_run


def _report(step: int, **metrics: float) -> StepReport:
    return StepReport(step=step, version=step, metrics=metrics)


# -- create ----------------------------------------------------------------------------------------


def test_runs_are_numbered_and_latest_points_at_the_newest(tmp_path: Path) -> None:
    first, second = d.create(tmp_path / "runs", "digits"), d.create(tmp_path / "runs", "digits")
    assert [first.name, second.name] == ["001", "002"]
    assert os.readlink(tmp_path / "runs/digits/latest") == "002"
    assert first.is_absolute() and (first / "logs").is_dir() and (first / "samples").is_dir()


def test_a_new_run_says_how_to_go_on_with_one_that_was_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    d.create(tmp_path, "digits")
    d.create(tmp_path, "digits")  # the first has no checkpoint
    assert caplog.messages == []
    (tmp_path / "digits/002/checkpoints/step-000020").mkdir(parents=True)
    with hold_run(tmp_path / "digits/002"):
        (tmp_path / "digits/002/logs/supervisor.log").touch()
        d.create(tmp_path, "digits")  # that one goes on
    assert caplog.messages == []
    (tmp_path / "digits/003/checkpoints/step-000020").mkdir(parents=True)
    assert d.create(tmp_path, "digits").name == "004"
    run = tmp_path / "digits/003"
    told = [f"note: a new run begins; to go on with {run} from step 20: g-core resume {run}"]
    assert caplog.messages == told
    (tmp_path / "digits/004/checkpoints/step-000020").mkdir(parents=True)
    (tmp_path / "digits/004/weights").mkdir()
    d.create(tmp_path, "digits")  # that one ended well
    assert caplog.messages == told


def test_a_number_is_never_given_again_to_fill_a_gap(tmp_path: Path) -> None:
    (tmp_path / "digits/017").mkdir(parents=True)
    (tmp_path / "digits/notes").mkdir()
    assert d.create(tmp_path, "digits").name == "018"


def test_processes_that_start_together_get_different_directories(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from gcore_core.run.directory import create\n"
        "sys.stdin.read()\n"  # all wait here, so that they run at the same time
        "for _ in range(25): print(create(Path(sys.argv[1]), 'same').name)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        names = " ".join(out for out, _ in pool.map(subprocess.Popen.communicate, children)).split()
    assert sorted(names) == [f"{number:03d}" for number in range(1, 76)]


@pytest.mark.parametrize(
    "held", ["config.yaml", "metrics.jsonl", "checkpoints", "checkpoint.key", "weights"]
)
def test_an_explicit_directory_with_a_run_is_refused_with_advice(tmp_path: Path, held: str) -> None:
    (tmp_path / held).touch()
    with pytest.raises(RunExists) as caught:
        d.create(Path("unused"), "digits", str(tmp_path))
    assert str(caught.value).splitlines() == [
        f"run.dir: {tmp_path} already holds a run.",
        f"  found in it: {held}",
        "  name another directory, or leave run.dir out for a fresh numbered one",
    ]


def test_an_explicit_directory_may_exist_when_it_holds_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert d.create(Path("unused"), "digits", str(tmp_path)) == tmp_path
    assert d.create(Path("unused"), "digits", str(tmp_path / "a/b")) == tmp_path / "a/b"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_name_that_is_no_directory_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: .* cannot name a directory") as caught:
        d.create(tmp_path, name)
    assert caught.value.todo and not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_made_names_itself_and_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for root, explicit in ((tmp_path / "file", None), (tmp_path, str(tmp_path / "file/x"))):
        with pytest.raises(
            ConfigError, match=r"run\.dir: .*file.* cannot be made or written"
        ) as caught:
            d.create(root, "digits", explicit)
        assert "Not a directory" in caught.value.why


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_called_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="is not writable"):
        d.create(tmp_path, "digits")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space is left"),
        (errno.EROFS, "not writable"),
        (errno.EACCES, "not writable"),
    ],
)
def test_the_system_error_determines_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=words) as caught:
        d.create(tmp_path, "digits")
    assert os.strerror(number) in caught.value.why and caught.value.todo


def test_a_foreign_file_named_latest_is_kept_and_the_run_continues(tmp_path: Path) -> None:
    (tmp_path / "digits/latest").mkdir(parents=True)
    assert d.create(tmp_path, "digits").name == "001"
    assert not (tmp_path / "digits/latest").is_symlink()
    assert sorted(child.name for child in (tmp_path / "digits").iterdir()) == ["001", "latest"]


# -- metrics ---------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_reported(tmp_path: Path) -> None:
    metrics = d.MetricsFile(tmp_path)
    metrics.append(StepReport(step=0, version=0, metrics={}, evaluation={"greedy/exact": 0.25}))
    metrics.append(_report(1, **{"reward/exact": np.float64(0.5), "kl": 0.0}))
    first, second = run_files.read_metrics(
        tmp_path
    )  # not closed yet: rows are on their way as soon as append returns
    metrics.close()
    assert first["evaluation"] == {"greedy/exact": 0.25} and first["step"] == 0
    assert second["metrics"] == {"reward/exact": 0.5, "kl": 0.0} and second["version"] == 1
    assert second["time_unix_s"] >= first["time_unix_s"] > 1.7e9


def test_every_line_is_strict_json_and_nan_comes_back_as_nan(tmp_path: Path) -> None:
    metrics = d.MetricsFile(tmp_path)
    metrics.append(_report(1, loss=math.nan, kl=math.inf))
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / run_files.METRICS).read_text(), parse_constant=refuse)
    assert all(
        math.isnan(value) for value in run_files.read_metrics(tmp_path)[0]["metrics"].values()
    )


def test_a_resumed_run_replaces_the_steps_it_makes_again(tmp_path: Path) -> None:
    for steps, reward in (((1, 2, 3, 4), 0.1), ((3,), 0.9)):
        metrics = d.MetricsFile(tmp_path)
        for step in steps:
            metrics.append(_report(step, reward=reward))
        metrics.close()
    assert [
        (row["step"], row["metrics"]["reward"]) for row in run_files.read_metrics(tmp_path)
    ] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.9),
    ]


def test_an_evaluation_after_a_resume_completes_the_row_of_its_step(tmp_path: Path) -> None:
    metrics = d.MetricsFile(tmp_path)
    for report in (
        _report(2, reward=0.5),
        _report(3),
        StepReport(step=2, version=2, metrics={}, evaluation={"a": 1.0}),
    ):
        metrics.append(report)
    metrics.close()
    (row,) = run_files.read_metrics(tmp_path)
    assert row["metrics"] == {"reward": 0.5} and row["evaluation"] == {"a": 1.0}


def test_a_truncated_last_line_of_a_killed_run_is_skipped_alone(tmp_path: Path) -> None:
    (tmp_path / run_files.METRICS).write_text(
        '{"step":1,"version":1,"time_unix_s":1.0,"metrics":{}}\n{"step":2,"ver'
    )
    metrics = d.MetricsFile(tmp_path)
    metrics.append(_report(2))
    metrics.close()
    assert [row["step"] for row in run_files.read_metrics(tmp_path)] == [1, 2]


def test_a_hash_joins_the_row_of_its_step_before_and_after_that_is_written(tmp_path: Path) -> None:
    metrics = d.MetricsFile(tmp_path)
    metrics.append(_report(1, reward=0.5))
    file = tmp_path / run_files.METRICS
    before = file.read_bytes()
    metrics.hashed(1, "aa")
    assert file.read_bytes() == before[:-2] + b',"weights_sha256":"aa"}\n'
    metrics.hashed(2, "bb")
    for step in (2, 3):
        metrics.append(_report(step))
    metrics.hashed(3, "cc")
    metrics.append(_report(4))
    metrics.close()
    rows = run_files.read_metrics(tmp_path)
    assert [row.get("weights_sha256") for row in rows] == ["aa", "bb", "cc", None]
    assert steps_in_file(tmp_path) == [1, 2, 3, 4]


def test_a_resumed_run_keeps_the_hash_of_the_step_it_goes_on_from(tmp_path: Path) -> None:
    metrics = d.MetricsFile(tmp_path)
    for step in (1, 2):
        metrics.append(_report(step))
        metrics.hashed(step, str(step))
    metrics.close()
    again = d.MetricsFile(tmp_path, resumed_from=1)
    assert again.unwritten(_report(1)) is None
    again.append(_report(2))
    again.close()
    rows = run_files.read_metrics(tmp_path)
    assert [row.get("weights_sha256") for row in rows] == ["1", None]


def steps_in_file(run_dir: Path, name: str = run_files.METRICS) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / name).read_text().splitlines()]


def test_the_file_of_a_resumed_run_has_each_step_once_and_the_undone_ones_beside_it(
    tmp_path: Path,
) -> None:
    for resumed_from, steps in ((None, (0, 1, 2, 3, 4)), (2, (3, 4, 5)), (3, (4,))):
        metrics = d.MetricsFile(tmp_path, resumed_from=resumed_from)
        assert steps_in_file(tmp_path) == list(range(steps[0]))
        for step in steps:
            metrics.append(_report(step, reward=float(resumed_from or 0)))
        metrics.close()
    assert steps_in_file(tmp_path) == [0, 1, 2, 3, 4]
    assert steps_in_file(tmp_path, run_files.METRICS_UNDONE) == [3, 4, 4, 5]
    rewards = [row["metrics"]["reward"] for row in run_files.read_metrics(tmp_path)]
    assert rewards == [0.0, 0.0, 0.0, 2.0, 3.0]


def test_the_step_that_a_run_goes_on_from_keeps_its_row_and_gets_a_missing_evaluation(
    tmp_path: Path,
) -> None:
    first = d.MetricsFile(tmp_path)
    first.append(_report(1))
    first.append(_report(2, reward=0.5, cpu_seconds=60.0))
    first.close()
    report = StepReport(
        step=2, version=2, metrics={"cpu_seconds": 3.0}, evaluation={"greedy/exact": 1.0}
    )
    second = d.MetricsFile(tmp_path, resumed_from=2)
    assert second.unwritten(_report(2, cpu_seconds=3.0)) is None
    news = second.unwritten(report)
    assert news is not None
    assert (news.metrics, news.evaluation) == ({}, {"greedy/exact": 1.0})
    second.append(news)
    second.append(_report(3))
    second.close()
    assert steps_in_file(tmp_path) == [1, 2, 3]
    row = run_files.read_metrics(tmp_path)[1]
    assert row["metrics"] == {"reward": 0.5, "cpu_seconds": 60.0}
    assert row["evaluation"] == {"greedy/exact": 1.0}
    third = d.MetricsFile(tmp_path, resumed_from=2)
    assert third.unwritten(report) is None, "it has been evaluated"
    third.close()


def test_a_step_whose_row_is_missing_is_reported_whole(tmp_path: Path) -> None:
    first = d.MetricsFile(tmp_path)
    first.append(_report(1))
    first.close()
    second = d.MetricsFile(tmp_path, resumed_from=2)
    report = _report(2, cpu_seconds=3.0)
    assert second.unwritten(report) is report
    second.close()


def test_half_a_line_goes_and_a_step_that_stands_twice_is_read_once(tmp_path: Path) -> None:
    lines = [
        '{"step":1,"version":1,"time_unix_s":1.0,"metrics":{"a":1.0}}',
        '{"step":2,"version":2,"time_unix_s":2.0,"metrics":{}}',
        '{"step":1,"version":1,"time_unix_s":3.0,"metrics":{"b":3.0}}',
        '{"step":2,"ver',
    ]
    (tmp_path / run_files.METRICS).write_text("\n".join(lines))
    d.MetricsFile(tmp_path, resumed_from=1).close()
    (row,) = run_files.read_metrics(tmp_path)
    assert row["metrics"] == {"a": 1.0, "b": 3.0}
    assert steps_in_file(tmp_path) == [1, 1]
    undone = (tmp_path / run_files.METRICS_UNDONE).read_text().splitlines()
    assert undone == [lines[1], lines[3]]


def test_a_full_disk_at_a_resume_gives_an_alarm_and_readers_see_each_step_once(
    tmp_path: Path,
) -> None:
    first = d.MetricsFile(tmp_path)
    for step in (1, 2, 3):
        first.append(_report(step, reward=0.1))
    first.close()
    (tmp_path / run_files.METRICS_UNDONE).symlink_to("/dev/full")
    alarms: list[str] = []
    second = d.MetricsFile(tmp_path, alarms.append, resumed_from=2)
    second.append(_report(3, reward=0.9))
    second.close()
    assert len(alarms) == 1 and "No space left on device" in alarms[0]
    assert [row["metrics"]["reward"] for row in run_files.read_metrics(tmp_path)] == [0.1, 0.1, 0.9]


def test_a_full_disk_gives_one_alarm_and_the_run_continues(tmp_path: Path) -> None:
    (tmp_path / run_files.METRICS).symlink_to("/dev/full")
    alarms: list[str] = []
    metrics = d.MetricsFile(tmp_path, alarms.append)
    for step in range(1, 6):
        metrics.append(_report(step))
    assert len(alarms) == 1 and "No space left on device" in alarms[0]
    metrics.close()
    metrics.close()
    assert len(alarms) == 2 and "are lost" in alarms[1]


def test_rows_without_disk_space_are_written_when_there_is_some(tmp_path: Path) -> None:
    """A file size limit stands for the disk: it too takes the first half of a row and refuses the
    rest.
    """
    alarms: list[str] = []
    metrics = d.MetricsFile(tmp_path, alarms.append)
    metrics.append(_report(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((tmp_path / run_files.METRICS).stat().st_size + 20, hard)
    )
    try:
        metrics.append(_report(2, reward=0.5))
        metrics.append(_report(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(alarms) == 1
    metrics.append(_report(4))
    metrics.close()
    rows = run_files.read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[1]["metrics"] == {"reward": 0.5}
    assert len((tmp_path / run_files.METRICS).read_bytes().splitlines()) == 4 and len(alarms) == 1


def test_a_hash_for_which_there_is_no_space_leaves_its_row_whole(tmp_path: Path) -> None:
    """Rows that follow would stick to a torn one."""
    alarms: list[str] = []
    metrics = d.MetricsFile(tmp_path, alarms.append)
    metrics.append(_report(1, reward=0.5))
    file = tmp_path / run_files.METRICS
    before = file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        metrics.hashed(1, "aa" * 32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(alarms) == 1 and file.read_bytes() == before
    metrics.append(_report(2))
    metrics.close()
    assert steps_in_file(tmp_path) == [1, 2]


def test_metrics_that_cannot_be_opened_are_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / run_files.METRICS).mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be made or written"):
        d.MetricsFile(tmp_path)


# -- other files -----------------------------------------------------------------------------------


def test_a_run_without_files_reads_as_empty(tmp_path: Path) -> None:
    assert (
        run_files.read_metrics(tmp_path) == []
        and run_files.read_samples(tmp_path, 0) == []
        and run_files.read_lock(tmp_path) == {}
    )


def test_config_lock_and_samples_come_back(tmp_path: Path) -> None:
    run_dir = d.create(tmp_path, "digits")
    d.write_config(run_dir, "run: {name: 'Größe'}\n")
    d.write_origins(run_dir, {"run.name": "job.yaml, line 2"})
    d.write_lock(run_dir, {"torch": {"version": "0.1.0"}, "core": {"version": "0.1.0"}})
    rows = [{"prompt": "1+1=", "text": "2\n\u2028", "rewards": {"exact": 1.0}, "mode": "greedy"}]
    d.write_samples(run_dir, 20, rows)
    d.write_position(run_dir, {"step": 19})
    d.write_position(run_dir, {"step": 20, "consumed": [1, 2]})
    assert json.loads((run_dir / run_files.POSITION).read_text()) == {
        "step": 20,
        "consumed": [1, 2],
    }
    assert (run_dir / "config.yaml").read_text(encoding="utf-8") == "run: {name: 'Größe'}\n"
    assert list(run_files.read_lock(run_dir)) == ["core", "torch"]
    assert run_files.read_origins(run_dir) == {"run.name": "job.yaml, line 2"}
    assert run_files.read_origins(tmp_path / "none") == {}
    assert (
        run_files.read_samples(run_dir, 20) == rows
        and (run_dir / "samples/step_000020.jsonl").exists()
    )
    assert run_files.log_path(run_dir, "controller-0") == run_dir / "logs/controller-0.log"
    assert not list(run_dir.rglob("*.new"))


def test_samples_and_position_that_cannot_be_written_are_logged_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    d.write_samples(tmp_path / "gone", 20, [])
    d.write_position(tmp_path / "gone", {"step": 20})
    assert [line.partition("gone/")[2].split()[0] for line in caplog.messages] == [
        "samples/step_000020.jsonl",
        "position.json",
    ]
    with pytest.raises(ConfigError, match="cannot be made or written"):
        d.write_config(tmp_path / "gone", "")
