"""A checkpoint is whole or refused; what was there before a save is there after it."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gcore_core.contract import job_settings
from gcore_core.contract.errors import CheckpointError
from gcore_core.contract.records import StepReport
from gcore_core.run import checkpoints as module
from gcore_core.run.checkpoint_service import CheckpointService, newest, saved_config
from gcore_core.run.checkpoints import CheckpointFacts, Checkpoints, Retention
from gcore_core.run.directory import MetricsFile
from gcore_core.run.manifest import KEY, MANIFEST, Manifest, inspect, seal, unseal
from gcore_core.runtime.messages import CommitCheckpoint, OpenCheckpoint
from gcore_core.wire.service import Call

PARTS = {
    "policy/state-00000-00000.safetensors": bytes(range(256)) * 8,
    "policy/state-00001-00000.safetensors": bytes(reversed(range(256))) * 8,
    "policy/state.json": b'{"version": 3}',
    "ledger.json": b"{}",
    "empty": b"",
}
FACTS = CheckpointFacts(
    run="digits", lock={"gcore-core": "0.1.0"}, config_hash="ab" * 32, metrics={"reward": 0.5}
)


def save(
    checkpoints: Checkpoints, step: int, facts: CheckpointFacts = FACTS, more: bytes = b""
) -> Path:
    directory = checkpoints.begin(step)
    for name, content in PARTS.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content + (more if name.startswith("policy/") else b""))
    return checkpoints.commit(step, facts)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def two(run: Path) -> Checkpoints:
    checkpoints = Checkpoints(run)
    save(checkpoints, 10)
    save(checkpoints, 20, more=b"20")
    return checkpoints


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }


# -- whole -----------------------------------------------------------------------------------------


def test_an_opened_checkpoint_equals_the_saved_one(two: Checkpoints, run: Path) -> None:
    opened = two.open()
    assert (opened.path, opened.notes, opened.manifest.step) == (
        run / "checkpoints/step-000020",
        (),
        20,
    )
    assert {name: part.nbytes for name, part in opened.manifest.parts.items()} == {
        name: len(content) + 2 * name.startswith("policy/") for name, content in PARTS.items()
    }
    assert (opened.manifest.run, opened.manifest.lock, opened.manifest.metrics) == (
        "digits",
        {"gcore-core": "0.1.0"},
        {"reward": 0.5},
    )
    found = content(two.open(10).path)
    assert {name: found[name] for name in PARTS} == PARTS
    assert two.steps() == [10, 20]


def test_only_the_owner_may_read_the_key(two: Checkpoints, run: Path) -> None:
    assert stat.S_IMODE((run / KEY).stat().st_mode) == 0o600
    assert [file.name for file in run.iterdir() if file.is_file()] == [KEY]


def test_checkpoints_of_a_copied_run_can_be_opened(
    two: Checkpoints, run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(run)
    assert Checkpoints(tmp_path / "copy").open().manifest.step == 20


def test_a_metric_that_is_not_finite_is_left_out(run: Path) -> None:
    save(
        Checkpoints(run),
        1,
        CheckpointFacts(run="a", metrics={"x": float("nan"), "y": float("inf"), "z": 1}),
    )
    assert Checkpoints(run).open().manifest.metrics == {"z": 1.0}


def test_saving_a_step_again_replaces_it(two: Checkpoints) -> None:
    save(two, 20, more=b"again")
    assert (two.open(20).path / "policy/state.json").read_bytes().endswith(b"again")
    assert sorted(child.name for child in two.directory.iterdir()) == ["step-000010", "step-000020"]


# -- 1,000 corruptions -----------------------------------------------------------------------------


def _flip(draw: random.Random, files: list[Path]) -> None:
    file = draw.choice([file for file in files if file.stat().st_size])
    raw = bytearray(file.read_bytes())
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    file.write_bytes(raw)


def _truncate(draw: random.Random, files: list[Path]) -> None:
    file = draw.choice([file for file in files if file.stat().st_size])
    os.truncate(file, draw.randrange(file.stat().st_size))


def _append(draw: random.Random, files: list[Path]) -> None:
    with draw.choice(files).open("ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 9)))


def _drop(draw: random.Random, files: list[Path]) -> None:
    draw.choice(files).unlink()


def _swap(draw: random.Random, files: list[Path]) -> None:
    one, other = draw.sample(files, 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _add(draw: random.Random, files: list[Path]) -> None:
    draw.choice(files).with_name(f"state-{draw.randrange(99):05d}.more").write_bytes(
        draw.randbytes(draw.randrange(9))
    )


def _link(draw: random.Random, files: list[Path]) -> None:
    """The same bytes, but they lie elsewhere."""
    file = draw.choice(files)
    checkpoint = next(folder for folder in file.parents if folder.name.startswith("step-"))
    moved = file.rename(checkpoint.with_name(f"moved-{file.name}"))
    file.symlink_to(moved)


def _zeros(draw: random.Random, files: list[Path]) -> None:
    file = draw.choice([file for file in files if file.stat().st_size > 64])
    raw = bytearray(file.read_bytes())
    start = draw.randrange(len(raw) - 32)
    raw[start : start + 32] = bytes(32) if any(raw[start : start + 32]) else b"\1" * 32
    file.write_bytes(raw)


def _edit(draw: random.Random, files: list[Path]) -> None:
    """Somebody without the key writes a manifest for what is there now."""
    file = next(file for file in files if file.name == MANIFEST)
    told = msgspec.json.decode(file.read_bytes(), type=Manifest)
    changed = draw.choice(
        [
            msgspec.structs.replace(told, config_hash="00"),
            msgspec.structs.replace(told, metrics={"reward": draw.random()}),
            msgspec.structs.replace(told, lock={}),
            msgspec.structs.replace(
                told, parts={n: p for n, p in told.parts.items() if n != "ledger.json"}
            ),
            msgspec.structs.replace(told, parts=told.parts | {"../../../x": told.parts["empty"]}),
        ]
    )
    file.write_bytes(draw.choice([seal(changed, draw.randbytes(32)), msgspec.json.encode(changed)]))


def _respell(draw: random.Random, files: list[Path]) -> None:
    """The same values in other words."""
    file = next(file for file in files if file.name == MANIFEST)
    told = file.read_bytes()
    file.write_bytes(
        draw.choice(
            [
                told + b" ",
                told.strip(),
                msgspec.json.format(told, indent=2),
                told.replace(b'"', b' "', 1),
            ]
        )
    )


CORRUPTIONS: list[Callable[[random.Random, list[Path]], None]] = [
    *(_flip, _truncate, _append, _drop, _swap, _add, _link, _zeros, _edit, _respell),
]


def test_a_thousand_random_corruptions_are_refused(
    two: Checkpoints, run: Path, tmp_path: Path
) -> None:
    """And each time the checkpoint before is opened instead, with a note that names a file."""
    good = tmp_path / "good"
    shutil.copytree(run / "checkpoints/step-000020", good)
    target = two.directory / "step-000020"
    for seed in range(1000):
        draw = random.Random(seed)
        corruption = CORRUPTIONS[seed % len(CORRUPTIONS)]
        corruption(draw, sorted(file for file in target.rglob("*") if file.is_file()))
        opened = two.open()
        told = f"seed {seed}, {corruption.__name__}"
        assert opened.manifest.step == 10, told
        assert len(opened.notes) == 1 and opened.notes[0].startswith("step-000020 is refused: "), (
            told
        )
        shutil.rmtree(target)
        shutil.copytree(good, target)
    assert two.open().notes == ()


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda path: (path / "ledger.json").unlink(), "ledger.json: it is missing"),
        (
            lambda path: (path / "ledger.json").write_text("[]"),
            "ledger.json: its bytes are not those that were saved",
        ),
        (
            lambda path: (path / "ledger.json").write_text("[1]"),
            "ledger.json: it has 3 bytes, 2 were saved",
        ),
        (lambda path: (path / "more").touch(), "'more': it is not part of this checkpoint"),
        (lambda path: (path / MANIFEST).unlink(), "manifest.json: No such file or directory"),
        (
            lambda path: (path / MANIFEST).write_text("{}"),
            "manifest.json: Object missing required field `run`",
        ),
        (lambda path: (path.parents[1] / KEY).unlink(), "checkpoint.key of the run cannot be read"),
        (
            lambda path: (path.parents[1] / KEY).write_bytes(b"1"),
            "checkpoint.key of the run has 1 bytes instead of 32",
        ),
        (
            lambda path: (path.parents[1] / KEY).write_bytes(bytes(32)),
            "its MAC is not that of this run's key",
        ),
    ],
)
def test_a_problem_names_the_file_and_the_reason(
    two: Checkpoints, change: Callable[[Path], None], problem: str
) -> None:
    path = two.directory / "step-000020"
    change(path)
    _, problems = inspect(path)
    assert len(problems) == 1 and problem in problems[0]


def test_a_checkpoint_under_another_name_is_refused(two: Checkpoints) -> None:
    (two.directory / "step-000020").rename(two.directory / "step-000030")
    assert inspect(two.directory / "step-000030")[1] == ["manifest.json: it belongs to step-000020"]


def test_a_path_outside_the_checkpoint_is_refused_even_with_a_valid_key(
    two: Checkpoints, run: Path
) -> None:
    path = two.directory / "step-000020"
    key = (run / KEY).read_bytes()
    told = unseal((path / MANIFEST).read_bytes(), key)
    (run / "outside").write_bytes(b"")
    for name in ("../../outside", f"{run}/outside", "policy/../empty", "./empty", "a//b"):
        (path / MANIFEST).write_bytes(
            seal(msgspec.structs.replace(told, parts=told.parts | {name: told.parts["empty"]}), key)
        )
        assert inspect(path)[1] == [f"{name!r}: a part must lie in the checkpoint"]


def test_a_manifest_from_before_weights_were_hashed_is_still_whole(
    two: Checkpoints, run: Path
) -> None:
    key = (run / KEY).read_bytes()
    file = run / "checkpoints" / "step-000020" / MANIFEST
    raw = file.read_bytes()
    assert b"weights_sha256" not in raw  # as it was written without one
    assert not two.verify(20)
    hashed = msgspec.structs.replace(unseal(raw, key), weights_sha256="ab")
    file.write_bytes(seal(hashed, key))
    assert not two.verify(20) and unseal(file.read_bytes(), key).weights_sha256 == "ab"


@pytest.mark.parametrize("other", [1, 3])
def test_a_manifest_of_another_format_is_refused(two: Checkpoints, run: Path, other: int) -> None:
    file = two.directory / "step-000020" / MANIFEST
    key = (run / KEY).read_bytes()
    manifest = msgspec.structs.replace(unseal(file.read_bytes(), key), format=other)
    file.write_bytes(seal(manifest, key))
    assert f"it has format {other}, this version" in inspect(file.parent)[1][0]


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 99, b"[" * 100_000, b'{"x":' * 100_000, b"\xff\xfe{}", b"null", b"1e999"]
)
def test_a_malformed_manifest_is_a_reported_problem_and_no_crash(
    two: Checkpoints, raw: bytes
) -> None:
    (two.directory / "step-000020" / MANIFEST).write_bytes(raw)
    assert two.open().manifest.step == 10


def test_without_a_whole_checkpoint_every_reason_is_reported(two: Checkpoints) -> None:
    for step in two.steps():
        (two.directory / f"step-{step:06d}" / "ledger.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint that is whole") as caught:
        two.open()
    assert caught.value.why.splitlines() == [
        "step-000020 is refused: ledger.json: it is missing",
        "step-000010 is refused: ledger.json: it is missing",
    ]


def test_a_named_step_is_never_replaced_by_another(two: Checkpoints) -> None:
    (two.directory / "step-000020" / "ledger.json").unlink()
    with pytest.raises(CheckpointError, match="step 20 is not whole"):
        two.open(20)


# -- saves that do not end -------------------------------------------------------------------------


def test_an_uncommitted_checkpoint_does_not_count_and_the_next_save_removes_it(
    two: Checkpoints, run: Path
) -> None:
    (two.begin(30) / "half").touch()
    again = Checkpoints(run)
    assert (again.steps(), again.open().manifest.step) == ([10, 20], 20)
    assert list(again.begin(40).iterdir()) == []
    assert sorted(child.name for child in again.directory.iterdir()) == [
        *("step-000010", "step-000020", "step-000040.partial")
    ]


def test_a_save_in_progress_survives_the_start_of_another(two: Checkpoints) -> None:
    (two.begin(30) / "half").touch()
    two.begin(40)
    assert (two.directory / "step-000030.partial/half").exists()


KILLED = """
import os, sys
from pathlib import Path
from gcore_core.run import manifest, checkpoints

left = int(sys.argv[2])
def count(act):
    def counted(*args, **named):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return act(*args, **named)
    return counted
for name in ("fsync", "mkdir", "rename", "rmdir", "unlink", "link", "scandir", "open"):
    setattr(os, name, count(getattr(os, name)))
run = checkpoints.Checkpoints(Path(sys.argv[1]))
directory = run.begin(20)
(directory / "part").write_bytes(b"20")
run.commit(20, checkpoints.CheckpointFacts(run="a"))
run.keep(checkpoints.Retention(last=1))
"""


def test_a_kill_at_any_system_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The one before, or the new one."""
    seen = set()
    for calls in range(0, 200, 4):
        run = tmp_path / str(calls)
        run.mkdir()
        save(Checkpoints(run), 10)
        done = subprocess.run(
            [sys.executable, "-S", "-c", KILLED, str(run), str(calls)], check=False, env=_path()
        )
        opened = Checkpoints(run).open()
        assert opened.notes == ()
        assert (done.returncode, opened.manifest.step) in {(9, 10), (9, 20), (0, 20)}
        seen.add((done.returncode, opened.manifest.step))
        if done.returncode == 0:
            break
    assert seen == {(9, 10), (9, 20), (0, 20)}


class Killed(BaseException):
    """Stands for the end of the process: nothing of the core handles it."""


@pytest.mark.parametrize("n_renames, content_after", [(0, b"old"), (1, b"old"), (2, b"new")])
def test_a_kill_at_any_rename_of_a_replacement_leaves_one_of_both(
    run: Path, monkeypatch: pytest.MonkeyPatch, n_renames: int, content_after: bytes
) -> None:
    """The run had gone back before step 20, has come there again, and saves it anew."""
    save(Checkpoints(run), 10)
    replace_step_20(Checkpoints(run), b"old")
    rename = os.rename
    done: list[str] = []

    def killed(source: Any, target: Any) -> None:
        if len(done) == n_renames:
            raise Killed
        rename(source, target)
        done.append(Path(target).name)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "rename", killed)
        replace_step_20(Checkpoints(run), b"new")
    assert len(done) == n_renames
    assert Checkpoints(run).steps() == [10, 20]  # what decides whether a run can go on
    resumed = newest(run)
    assert (resumed.step, resumed.notes) == (20, ())
    assert (Path(resumed.path) / "part").read_bytes() == content_after
    Checkpoints(run).begin(30)
    left = sorted(child.name for child in (run / "checkpoints").iterdir())
    assert left == ["step-000010", "step-000020", "step-000030.partial"]


def replace_step_20(checkpoints: Checkpoints, part: bytes) -> None:
    directory = checkpoints.begin(20)
    (directory / "part").write_bytes(part)
    (directory / "state.json").write_text("{}")
    checkpoints.commit(20, FACTS)


def test_a_checkpoint_that_cannot_be_replaced_stays(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one's own rename fails, when the old one is set aside."""
    before = content(two.directory)
    rename = os.rename

    def refused(source: Any, target: Any) -> None:
        if Path(source).name == "step-000020.partial":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refused)
        with pytest.raises(CheckpointError, match="step-000020 could not be written"):
            save(two, 20, more=b"new")
    assert content(two.directory) == before
    assert two.open().notes == ()


def test_a_checkpoint_that_is_half_removed_does_not_come_back(
    two: Checkpoints, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):

        def killed(path: Path, ignore_errors: bool = False) -> None:
            if path.exists():
                next(path.rglob("ledger.json")).unlink()
                raise Killed

        patch.setattr(shutil, "rmtree", killed)
        two.keep(Retention(last=1))
    again = Checkpoints(run)
    again.restore()
    assert again.steps() == [20]
    again.begin(30)
    assert again.steps() == [20]


def test_a_checkpoint_that_waits_to_be_moved_back_is_named(two: Checkpoints, run: Path) -> None:
    """For those who only read, and must not move what a running process may be replacing."""
    (two.directory / "step-000020").rename(two.directory / "step-000020.replaced.partial")
    opened = Checkpoints(run).open()
    assert opened.manifest.step == 10
    assert opened.notes == (
        "step-000020 is refused: it was being replaced when the run ended; g-core resume moves it "
        "back",
    )


def _path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# -- full disks ------------------------------------------------------------------------------------


def test_a_full_disk_at_commit_leaves_the_checkpoint_before(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(two.directory)

    def full(file: Path, raw: bytes, mode: int = 0o644) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    monkeypatch.setattr(module, "write_durably", full)
    with pytest.raises(CheckpointError, match="no space is left for step-000030") as caught:
        save(two, 30)
    assert (
        "the newest one that is there: step-000020" in caught.value.todo
        and caught.value.facts["full_disk"]
    )
    assert content(two.directory) == before
    assert two.open().manifest.step == 20


def test_too_little_disk_space_is_reported_before_anything_is_written(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointError, match="no space is left for step-000030"):
        two.begin(30)
    assert two.steps() == [10, 20] and two.open().manifest.step == 20


def test_a_truncated_key_is_reported_before_anything_is_written(
    two: Checkpoints, run: Path
) -> None:
    (run / KEY).write_bytes(b"1")
    with pytest.raises(CheckpointError, match="step-000030 could not be written") as caught:
        two.begin(30)
    assert (
        caught.value.why == "the system says: checkpoint.key of the run has 1 bytes instead of 32"
    )


def test_a_checkpoint_without_parts_or_with_a_link_is_not_committed(
    two: Checkpoints, tmp_path: Path
) -> None:
    two.begin(30)
    with pytest.raises(CheckpointError, match="step-000030 could not be written"):
        two.commit(30, FACTS)
    (two.begin(30) / "part").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="all are regular files"):
        two.commit(30, FACTS)
    assert two.steps() == [10, 20]


# -- retention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, kept",
    [
        (Retention(last=2), {50, 60}),
        (Retention(last=1, every=20), {20, 40, 60}),
        (Retention(last=1, best="reward"), {30, 60}),
        (Retention(last=1, best="reward", best_is="lower"), {20, 60}),
        (Retention(last=1, best="unknown"), {60}),
        (Retention(last=0), {60}),
        (Retention(last=99), {10, 20, 30, 40, 50, 60}),
    ],
)
def test_retention_keeps_the_last_the_nth_and_the_best(
    run: Path, rule: Retention, kept: set[int]
) -> None:
    checkpoints = Checkpoints(run)
    for step, reward in {10: 0.2, 20: 0.1, 30: 0.9, 40: 0.3, 50: 0.2, 60: 0.5}.items():
        save(checkpoints, step, CheckpointFacts(run="a", metrics={"reward": reward}))
    removed = checkpoints.keep(rule)
    assert set(checkpoints.steps()) == kept
    assert set(removed) == {10, 20, 30, 40, 50, 60} - kept
    assert {child.name for child in checkpoints.directory.iterdir()} == {
        f"step-{step:06d}" for step in kept
    }


def test_retention_takes_the_newest_of_equally_good_ones() -> None:
    assert Retention(last=1, best="x").steps_to_keep(
        {1: {"x": 1.0}, 2: {"x": 1.0}, 3: {"x": 0.5}}
    ) == {2, 3}


def test_retention_never_removes_the_last_whole_one(run: Path) -> None:
    """The newer ones have the right sizes, and their bytes are wrong."""
    writing = Checkpoints(run)
    for step in (10, 20, 30):
        save(writing, step)
    for step in (20, 30):
        (writing.directory / f"step-{step:06d}" / "ledger.json").write_text("[]")
    resumed = Checkpoints(run)
    assert resumed.keep(Retention(last=1)) == [20]
    assert resumed.open().manifest.step == 10


def test_retention_removes_nothing_where_nothing_is_whole(two: Checkpoints, run: Path) -> None:
    for step in two.steps():
        (two.directory / f"step-{step:06d}" / "ledger.json").write_text("[]")
    assert Checkpoints(run).keep(Retention(last=1)) == []
    (run / KEY).write_bytes(bytes(32))
    assert Checkpoints(run).keep(Retention(last=1)) == []
    assert two.steps() == [10, 20]


@pytest.mark.parametrize("best", ["reward", "greedy/exact"])
async def test_the_best_checkpoint_is_chosen_by_what_the_report_of_its_step_says(
    run: Path, best: str
) -> None:
    settings = SimpleNamespace(
        roles={"policy": None}, checkpoint=job_settings.CheckpointSettings(last=1, best=best)
    )
    plan: Any = SimpleNamespace(settings=settings, provided={}, name="r", lock=(), config={})
    service = CheckpointService(plan, run, print)
    call = Call(lambda: None)
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.1)):
        place = await service.open(OpenCheckpoint(step), call)
        (Path(place.path) / "weights").write_text("w")
        # As in a run: a step is reported after its save has begun, and committed after the next.
        metrics = {"loss": 1.0, "reward": value}
        evaluation = {"greedy/exact": value}
        service.reported(
            StepReport(step=step, version=step, metrics=metrics, evaluation=evaluation)
        )
        await service.commit(CommitCheckpoint(step, {}, {"loss": 1.0}), call)
    checkpoints = Checkpoints(run)
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.open(2).manifest.metrics == {
        "greedy/exact": 0.9,
        "loss": 1.0,
        "reward": 0.9,
    }


async def test_a_checkpoint_that_was_evaluated_after_its_save_may_be_the_best(run: Path) -> None:
    """As the newest one of a run that was stopped, and that evaluates it when it goes on."""
    settings = SimpleNamespace(
        roles={"policy": None},
        checkpoint=job_settings.CheckpointSettings(last=1, best="greedy/exact"),
    )
    plan: Any = SimpleNamespace(settings=settings, provided={}, name="r", lock=(), config={})
    call = Call(lambda: None)

    async def commit(service: CheckpointService, step: int) -> None:
        place = await service.open(OpenCheckpoint(step), call)
        (Path(place.path) / "weights").write_text("w")
        await service.commit(CommitCheckpoint(step, {}, {}), call)

    await commit(CheckpointService(plan, run, print), 1)
    metrics = MetricsFile(run)
    metrics.append(report(1, {}, **{"greedy/exact": 0.9}))
    metrics.close()
    resumed = CheckpointService(plan, run, print)
    for step, value in ((2, 0.5), (3, 0.1)):
        resumed.reported(report(step, {}, **{"greedy/exact": value}))
        await commit(resumed, step)
    assert Checkpoints(run).steps() == [1, 3]


async def test_a_run_goes_on_with_every_number_that_was_saved(run: Path) -> None:
    """JSON has no infinities and no NaN; what a plugin has learned may have."""
    config = {"rewards": {"exact": {"limit": math.inf}}}
    settings = SimpleNamespace(roles={"policy": None}, checkpoint=job_settings.CheckpointSettings())
    plan: Any = SimpleNamespace(settings=settings, provided={}, name="r", lock=(), config=config)
    service = CheckpointService(plan, run, print)
    call = Call(lambda: None)
    place = await service.open(OpenCheckpoint(1), call)
    (Path(place.path) / "weights").write_text("w")
    learned = {"seconds": [1.5, math.inf, -math.inf, math.nan], "n": 1 << 60, "text": "\u00e4"}
    await service.commit(CommitCheckpoint(1, {"window": learned}, {}), call)
    resumed = newest(run)
    assert repr(resumed.state) == repr({"window": learned})
    assert repr(saved_config(Path(resumed.path))) == repr(config)


async def test_a_checkpoint_is_saved_although_an_earlier_one_cannot_be_removed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it, such as an observer that copies it elsewhere, is told of it."""
    settings = SimpleNamespace(
        roles={"policy": None}, checkpoint=job_settings.CheckpointSettings(last=1)
    )
    plan: Any = SimpleNamespace(settings=settings, provided={}, name="r", lock=(), config={})
    notes: list[str] = []
    saved: list[int] = []
    service = CheckpointService(
        plan, run, notes.append, saved=lambda step, path: saved.append(step)
    )

    def refused(checkpoint: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(checkpoint))

    monkeypatch.setattr(service._checkpoints, "_remove", refused)
    call = Call(lambda: None)
    for step in (1, 2):
        place = await service.open(OpenCheckpoint(step), call)
        (Path(place.path) / "weights").write_text("w")
        await service.commit(CommitCheckpoint(step, {}, {}), call)
    assert saved == [1, 2]
    (note,) = notes
    assert note.startswith("an earlier checkpoint cannot be removed") and "step-000001" in note


def service_of(run: Path, best: str, notes: list[str]) -> CheckpointService:
    checkpoint = job_settings.CheckpointSettings(best=best)
    settings = SimpleNamespace(roles={"policy": None}, checkpoint=checkpoint)
    plan: Any = SimpleNamespace(settings=settings, provided={}, name="r", lock=(), config={})
    return CheckpointService(plan, run, notes.append)


def report(step: int, metrics: dict[str, float], **evaluation: float) -> StepReport:
    return StepReport(step=step, version=step, metrics=metrics, evaluation=evaluation)


def test_a_best_metric_that_no_step_has_is_told_once_after_the_first_step(run: Path) -> None:
    notes: list[str] = []
    service = service_of(run, "rewards", notes)
    service.reported(report(0, {"memory": 1.0}))
    assert notes == []
    for step in (1, 2, 3):
        service.reported(report(step, {"loss": 1.0, "reward": 0.5}))
    (note,) = notes
    assert note.startswith(
        "checkpoint.best: no step has a metric 'rewards' (did you mean 'reward'?), up to step 1; "
    )


@pytest.mark.parametrize("best", ["", "reward", "exact"])
def test_a_best_metric_that_a_step_or_its_evaluation_has_is_not_told(run: Path, best: str) -> None:
    notes: list[str] = []
    service = service_of(run, best, notes)
    service.reported(report(0, {}, exact=0.1))
    for step in (1, 2, 3):
        service.reported(report(step, {"loss": 1.0, "reward": 0.5}))
    assert notes == []


def test_a_best_metric_that_an_earlier_attempt_evaluated_is_not_told(run: Path) -> None:
    notes: list[str] = []
    metrics = MetricsFile(run)
    metrics.append(report(0, {}, exact=0.1))
    metrics.close()
    resumed = service_of(run, "exact", notes)
    for step in (5, 6):
        resumed.reported(report(step, {"loss": 1.0}))
    assert notes == []
