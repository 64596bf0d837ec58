"""Work that holds its scorer is answered by the scorer that takes its place, and asked no more."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from gcore_core.workers.overruns import (
    GRACE_S,
    Hold,
    Overruns,
    RewardWork,
    describe_called,
    describe_running,
)


def keys(*records: tuple[int, int], reward: str = "slow") -> list[RewardWork]:
    return [RewardWork(reward, "train", ordinal, sample, 0) for ordinal, sample in records]


def dies(path: Path, *calls: list[RewardWork], was_held: bool) -> Overruns:
    """Returns what the next process knows when one ends while these calls run."""
    before = Overruns(path)
    running = [before.watch(work, 1.0) for work in calls]
    for block in running:
        block.__enter__()
    note = path.read_bytes()
    del running, block  # which leaves the blocks; a process that dies does not
    path.write_bytes(note)
    return Overruns(path, was_held=was_held)


def over(overruns: Overruns, work: list[RewardWork]) -> list[bool]:
    return [overruns.is_over(key) for key in work]


BATCH = keys((4, 0), (4, 1), (7, 0))


def test_all_that_ran_in_a_process_that_was_held_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is called again to find out which of it was to blame."""
    other = keys((9, 0), reward="asks")
    fresh = keys((9, 1))
    overruns = dies(tmp_path / "note", BATCH, other, was_held=True)
    assert over(overruns, [*BATCH, *other, *fresh]) == [True] * 4 + [False]
    assert over(Overruns(tmp_path / "note"), [*BATCH, *fresh]) == [True] * 3 + [False]
    assert (
        "rewards.slow, rewards.asks: held the process beyond the time limit while 4/0, 4/1, 7/0 "
        "and 1 more were scored, which have timed out; rewards.slow.timeout_s, "
        "rewards.asks.timeout_s bounds it"
    ) in caplog.text


def test_work_in_a_process_that_ended_otherwise_is_done_again(tmp_path: Path) -> None:
    """It was killed, stopped, or waited for somebody who is lost."""
    overruns = dies(tmp_path / "note", BATCH, was_held=False)
    assert over(overruns, BATCH) == [False] * 3
    assert over(Overruns(tmp_path / "note", was_held=True), BATCH) == [False] * 3


def test_a_note_does_not_grow_with_the_processes_that_end(tmp_path: Path) -> None:
    note = tmp_path / "note"
    for turn in range(4):
        work = keys(*((turn, sample) for sample in range(500)))
        assert all(over(dies(note, work, was_held=True), work))  # the latest are kept
    kept = msgspec.json.decode(note.read_bytes()[1:])["over"]
    assert len(kept) == 1024 and len({tuple(key) for key in kept}) == 1024


def test_a_note_names_the_rewards_that_were_running(tmp_path: Path) -> None:
    note = tmp_path / "note"
    assert describe_running(note) == describe_called(note) == ""
    overruns = Overruns(note)
    with overruns.watch(BATCH, 1.0):
        assert describe_running(note) == (
            "rewards.slow held the process for longer than rewards.slow.timeout_s, with the "
            "records 4/0, 4/1, 7/0, which have timed out"
        )
        with overruns.watch(keys((9, 0), reward="asks"), 1.0):
            assert describe_called(note) == (
                "rewards.slow or rewards.asks was being called, with the records 4/0, 4/1, 7/0 "
                "and 1 more"
            )
    assert describe_running(note) == describe_called(note) == ""


def test_the_same_record_under_other_weights_is_other_work(tmp_path: Path) -> None:
    overruns = dies(tmp_path / "note", keys((4, 0)), was_held=True)
    later = [RewardWork("slow", "train", 4, 0, 1)]
    assert over(overruns, [*keys((4, 0)), *later]) == [True, False]


def test_half_a_note_says_nothing(tmp_path: Path) -> None:
    note = tmp_path / "note"
    dies(note, keys((4, 0)), was_held=False)
    with Overruns(note).watch(keys((4, 0)), 1.0):
        half = note.read_bytes()
    note.write_bytes(half[: len(half) // 2])
    assert describe_running(note) == ""
    assert over(Overruns(note, was_held=True), keys((4, 0))) == [False]


def test_work_that_ended_in_time_is_not_over_where_the_process_is_held_later(
    tmp_path: Path,
) -> None:
    note = tmp_path / "note"
    before = Overruns(note)
    with before.watch(keys((4, 0)), 10.0), before.watch(keys((5, 0)), 10.0):
        pass
    assert over(Overruns(note, was_held=True), keys((4, 0), (5, 0))) == [False, False]


# -- what the agent sees ---------------------------------------------------------------------------


def held(hold: Hold, *looks_s: float) -> list[bool]:
    """Looks so often, after so many seconds each; says each time whether the call is over."""
    return [hold.goes_on() and hold.is_over(look_s) for look_s in looks_s]


def test_a_call_is_over_behind_its_limit(tmp_path: Path) -> None:
    note = tmp_path / "note"
    hold = Hold(note)
    assert held(hold, 100.0) == [False], "there is no note yet"
    overruns = Overruns(note)
    with overruns.watch(keys((4, 0)), 3.0):
        looks = held(hold, 100.0, 3.0, GRACE_S, 0.5)
    assert looks == [False, False, False, True], "the first look only finds it"
    assert held(hold, 100.0, 100.0) == [False, False]


def test_calls_that_follow_each_other_are_not_added_up(tmp_path: Path) -> None:
    overruns = Overruns(tmp_path / "note")
    hold = Hold(tmp_path / "note")
    for _ in range(4):
        with overruns.watch(keys((4, 0)), 1.0):
            assert held(hold, 2.0, 2.0) == [False, False]


def test_a_call_of_the_process_before_is_not_held_against_the_next_one(tmp_path: Path) -> None:
    """It stands in the note until the next process has read it, which may take long to start."""
    note = tmp_path / "note"
    before = Overruns(note)
    running = before.watch(keys((4, 0)), 1.0)
    running.__enter__()
    hold = Hold(note)
    assert held(hold, 100.0, 100.0) == [False, False]
    with Overruns(note, was_held=True).watch(keys((4, 1)), 1.0):
        assert held(hold, 100.0, 100.0) == [False, True]
    del running


def test_a_process_in_which_calls_begin_and_end_is_not_held(tmp_path: Path) -> None:
    """Coroutines wait beside others. While one begins or ends, the event loop runs."""
    overruns = Overruns(tmp_path / "note")
    hold = Hold(tmp_path / "note")
    with overruns.watch(keys((4, 0)), 3.0):
        assert held(hold, 1.0, 4.0) == [False, False]
        with overruns.watch(keys((4, 1)), 10.0):
            assert held(hold, 4.0, 10.0) == [False, False]
        assert held(hold, 4.0, 4.0, GRACE_S) == [False, False, True]


def test_the_longest_limit_of_what_runs_bounds_a_process(tmp_path: Path) -> None:
    """A function that may compute for long lets no coroutine return meanwhile."""
    overruns = Overruns(tmp_path / "note")
    hold = Hold(tmp_path / "note")
    with overruns.watch(keys((4, 0)), 1.0), overruns.watch(keys((4, 1)), 60.0):
        assert held(hold, 1.0, 60.0, GRACE_S, 0.5) == [False, False, False, True]


# -- the file -----------------------------------------------------------------------------------


def test_a_call_writes_its_note_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written behind the call is one byte, however much is over."""
    overruns = Overruns(tmp_path / "note")
    overruns.add_over([key for ordinal in range(300) for key in keys((ordinal, 0))])
    nbytes: list[int] = []
    pwrite = os.pwrite

    def counted(file: int, content: bytes, at: int) -> int:
        nbytes.append(len(content))
        return pwrite(file, content, at)

    monkeypatch.setattr(os, "pwrite", counted)
    with overruns.watch(keys((1000, 0)), 10.0):
        assert len(nbytes) == 1
    assert nbytes[1:] == [1]
    assert (tmp_path / "note").stat().st_mode & 0o777 == 0o600


def test_work_goes_on_where_there_is_no_room_for_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in shared memory, which the records of a step may fill; no reward has failed then."""
    assert all(over(dies(tmp_path / "note", BATCH, was_held=True), BATCH))

    def full(file: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    overruns = Overruns(tmp_path / "note")
    late = keys((8, 0))
    with overruns.watch(late, 1.0):
        overruns.add_over(late)
    assert all(over(overruns, [*BATCH, *late]))
