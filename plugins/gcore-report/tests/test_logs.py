"""``g-core logs``: every line of a run's logs is printed once, also while the run goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from gcore_report import logs as module

from gcore_core import cli
from gcore_core.run.supervised import hold_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    for name in ("policy.0", "rollout.0", "rollout.2", "rollout.10", "supervisor"):
        path = directory / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name} line {number}\n" for number in range(30)))
    return directory


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["logs", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_without_a_worker_it_lists_what_there_is(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *rows = lines(capsys, str(run_dir))
    assert head.split() == ["PROCESS", "KB", "WRITTEN"]
    names = [row.split()[0] for row in rows]
    assert names == ["supervisor", "policy.0", "rollout.0", "rollout.2", "rollout.10"]


def test_one_worker_is_printed_whole_or_its_last_lines(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(lines(capsys, str(run_dir), "policy.0")) == 30
    last = ["policy.0 line 28", "policy.0 line 29"]
    assert lines(capsys, str(run_dir), "policy.0", "-n", "2") == last
    assert lines(capsys, str(run_dir), "pol", "-n", "2") == last


def test_the_beginning_of_a_name_means_all_that_begin_so(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = lines(capsys, str(run_dir), "rollout", "-n", "1")
    assert shown == [f"rollout.{number}: rollout.{number} line 29" for number in (0, 2, 10)]
    assert len(lines(capsys, str(run_dir), "rollout")) == 60
    assert len(lines(capsys, str(run_dir), "rollout.1")) == 30
    assert len(lines(capsys, str(run_dir), "-n", "1")) == 5


def test_a_last_line_without_an_end_is_shown(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run_dir / "logs" / "policy.0.log").open("ab") as file:
        file.write(b"killed here \xff")
    assert lines(capsys, str(run_dir), "policy.0", "-n", "1") == ["killed here \ufffd"]


def test_a_process_that_is_not_there_is_told_with_those_that_are(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", str(run_dir), "polcy.0"]) == 4
    told = capsys.readouterr().err
    assert "no process of the run is called 'polcy.0' (did you mean 'policy.0'?)" in told
    assert "supervisor, policy.0, rollout.0, rollout.2, rollout.10" in told
    assert cli.main(["logs", str(run_dir / "logs")]) == 4
    assert "there are no logs here" in capsys.readouterr().err


def test_following_prints_what_is_written_until_the_run_has_ended(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a process whose log appears meanwhile, and of a line that comes in two pieces."""
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_OVER_S", 0.05)
    log = run_dir / "logs" / "rollout.0.log"
    shown: list[str] = []

    def comes(line: str) -> None:
        for _ in range(3000):
            shown.extend(capsys.readouterr().out.splitlines())
            if line in shown:
                return
            threading.Event().wait(0.01)
        raise AssertionError(f"{line!r} never came: {shown}")

    following = threading.Thread(
        target=cli.main, args=(["logs", str(run_dir), "rollout", "--follow", "-n", "1"],)
    )
    with hold_run(run_dir):
        following.start()
        comes("rollout.0: rollout.0 line 29")
        with log.open("ab", buffering=0) as file:
            file.write(b"one ")
            (run_dir / "logs" / "rollout.11.log").write_text("another\n")
            comes("rollout.11: another")
            file.write(b"line\nlast, without an end")
            comes("rollout.0: one line")
        assert following.is_alive()
    following.join(30)
    assert not following.is_alive()
    shown += capsys.readouterr().out.splitlines()
    assert shown[-1] == "rollout.0: last, without an end"
    assert len(shown) == len(set(shown))
