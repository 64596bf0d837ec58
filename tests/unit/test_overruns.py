"""Work that ends its scorer is answered by the scorer that takes its place, and only that work."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from gcore_core.runtime.messages import ENDED_BY_LIMIT, ENDED_HUNG
from gcore_core.runtime.shells.overruns import (
    GRACE_S,
    Hold,
    Key,
    Overruns,
    describe_running,
)


def keys(*records: tuple[int, int]) -> list[Key]:
    return [Key("slow", "train", ordinal, sample, 0) for ordinal, sample in records]


def dies(path: Path, work: list[Key], ending: str) -> Overruns:
    """Returns what the next process knows when one ends in the middle of this work."""
    before = Overruns(path)
    running = before.watch(work, 1.0)
    running.__enter__()
    note = path.read_bytes()
    del running  # which leaves the block; a process that dies does not
    path.write_bytes(note)
    return Overruns(path, ending)


BATCH = keys((4, 0), (4, 1), (7, 0))


def test_a_batch_that_overran_is_scored_group_by_group(tmp_path: Path) -> None:
    overruns = dies(tmp_path / "note", BATCH, ENDED_BY_LIMIT)
    fresh = keys((9, 0))
    assert overruns.parts([*fresh, *BATCH]) == [[0], [1, 2], [3]]


def test_a_group_that_overran_alone_is_scored_no_more(tmp_path: Path) -> None:
    dies(tmp_path / "note", BATCH, ENDED_BY_LIMIT)
    overruns = dies(tmp_path / "note", BATCH[:2], ENDED_BY_LIMIT)
    assert overruns.parts(BATCH) == [[2]]


def test_a_note_does_not_grow_with_the_processes_that_end(tmp_path: Path) -> None:
    note = tmp_path / "note"
    for turn in range(4):
        work = [*keys((2 * turn, 0)), *keys(*((2 * turn + 1, sample) for sample in range(500)))]
        overruns = dies(note, work, ENDED_BY_LIMIT)
        assert overruns.suspects(work)  # the latest are kept
        dies(note, work, ENDED_BY_LIMIT)
    kept = msgspec.json.decode(note.read_bytes()[1:])["suspects"]
    assert len(kept) == 1024 and len({tuple(key) for key in kept}) == 1024


@pytest.mark.parametrize("ending", ["", ENDED_HUNG])
def test_work_in_a_process_that_was_killed_or_stopped_once_is_done_again(
    ending: str, tmp_path: Path
) -> None:
    overruns = dies(tmp_path / "note", BATCH[:2], ending)
    assert overruns.parts(BATCH[:2]) == [[0, 1]]


def test_a_group_that_hung_twice_alone_is_scored_no_more(tmp_path: Path) -> None:
    dies(tmp_path / "note", BATCH[:2], ENDED_HUNG)
    overruns = dies(tmp_path / "note", BATCH[:2], ENDED_HUNG)
    assert overruns.parts(BATCH[:2]) == []


def test_suspects_that_are_scored_well_are_no_suspects_any_more(tmp_path: Path) -> None:
    overruns = dies(tmp_path / "note", BATCH, ENDED_BY_LIMIT)
    with overruns.watch(BATCH[:2], 1.0):
        pass
    assert overruns.parts([*BATCH, *keys((9, 0))]) == [[0, 1, 3], [2]]


def test_a_note_names_the_reward_that_was_running(tmp_path: Path) -> None:
    note = tmp_path / "note"
    assert describe_running(note) == ""
    with Overruns(note).watch(BATCH, 1.0):
        assert describe_running(note) == (
            "rewards.slow held the process for longer than rewards.slow.timeout_s, with the "
            "records 4/0, 4/1, 7/0"
        )
    assert describe_running(note) == ""


def test_the_same_record_under_other_weights_is_other_work(tmp_path: Path) -> None:
    overruns = dies(tmp_path / "note", keys((4, 0)), ENDED_BY_LIMIT)
    later = [Key("slow", "train", 4, 0, 1)]
    assert overruns.parts(keys((4, 0))) == []
    assert overruns.parts(later) == [[0]]


def test_half_a_note_says_nothing(tmp_path: Path) -> None:
    dies(tmp_path / "note", keys((4, 0)), "")
    note = (tmp_path / "note").read_bytes()
    (tmp_path / "note").write_bytes(note[: len(note) // 2])
    assert describe_running(tmp_path / "note") == ""
    assert Overruns(tmp_path / "note", ENDED_BY_LIMIT).parts(keys((4, 0))) == [[0]]


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
    with Overruns(note, ENDED_BY_LIMIT).watch(keys((4, 1)), 1.0):
        assert held(hold, 100.0, 100.0) == [False, True]
    del running


# -- coroutines ------------------------------------------------------------------------------------


def blocks(path: Path, *calls: list[Key]) -> Overruns:
    """Returns what the next process knows when one of these coroutines stops its event loop."""
    before = Overruns(path)
    waiting = [before.watch_waiting(work) for work in calls]
    for block in waiting:
        block.__enter__()
    note = path.read_bytes()
    del waiting, block  # which leaves the blocks; a process that dies does not
    path.write_bytes(note)
    return Overruns(path, ENDED_HUNG)


def test_a_coroutine_that_stops_its_process_twice_alone_is_asked_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = tmp_path / "note"
    first = blocks(note, BATCH[:2])
    assert first.suspects(BATCH[:2]) and first.parts(BATCH[:2]) == [[0, 1]]
    assert blocks(note, BATCH[:2]).parts(BATCH[:2]) == []
    assert "rewards.slow: ended the process while 4/0, 4/1 were scored" in caplog.text


def test_coroutines_that_were_in_the_same_process_are_scored_group_by_group(
    tmp_path: Path,
) -> None:
    overruns = blocks(tmp_path / "note", BATCH[:2], BATCH[2:])
    assert overruns.parts(BATCH) == [[0, 1], [2]]


def test_a_limit_is_not_held_against_coroutines(tmp_path: Path) -> None:
    note = tmp_path / "note"
    before = Overruns(note)
    with before.watch_waiting(keys((9, 0))), before.watch(keys((4, 0)), 1.0):
        left = note.read_bytes()
    note.write_bytes(left)
    overruns = Overruns(note, ENDED_BY_LIMIT)
    assert overruns.parts(keys((4, 0), (9, 0))) == [[1]]
    assert not overruns.suspects(keys((9, 0)))


def test_coroutines_that_end_leave_nothing_in_the_note(tmp_path: Path) -> None:
    note = tmp_path / "note"
    first = Overruns(note)
    with first.watch_waiting(BATCH[:2]), first.watch_waiting(BATCH[2:]):
        pass
    overruns = Overruns(note, ENDED_HUNG)
    assert not overruns.suspects(BATCH)
    assert overruns.parts(BATCH) == [[0, 1, 2]]


def test_work_that_ended_in_time_is_no_suspect_of_a_process_that_hangs_later(
    tmp_path: Path,
) -> None:
    before = Overruns(tmp_path / "note")
    with before.watch(keys((4, 0)), 10.0):
        pass
    assert Overruns(tmp_path / "note", ENDED_HUNG).parts(keys((4, 0), (5, 0))) == [[0, 1]]


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
    before = dies(tmp_path / "note", BATCH, ENDED_BY_LIMIT)
    assert before.suspects(BATCH)

    def full(file: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    overruns = Overruns(tmp_path / "note", ENDED_HUNG)
    with overruns.watch(BATCH, 1.0), overruns.watch_waiting(BATCH):
        overruns.add_over(BATCH)
    assert overruns.parts(BATCH) == []
