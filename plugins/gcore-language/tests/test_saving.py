"""A rank's file is one that the safetensors library reads, and ranks' rows make whole tensors
again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gcore_language.saving import BackgroundWrite, SavingTrainer, Staging, save_rank
from gcore_language.state_files import (
    load_numbers,
    load_parts,
    read_numbers,
    save_state,
    take_steps,
    write_numbers,
    write_tensors,
)
from safetensors.torch import load_file

from gcore_core.contract.errors import CheckpointError, DataError


def rank_of(rank: int, count: int) -> Any:
    return SimpleNamespace(rank=rank, count=count)


def test_files_written_here_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "step": torch.tensor(7),
        "none": torch.empty(0, 4),
        "columns": torch.randn(4, 6).T,
        "long": torch.randn(5_000_000),
    }
    write_tensors(tmp_path / "a.safetensors", tensors)
    stored = load_file(tmp_path / "a.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor), name


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_rows_saved_by_any_number_of_ranks_join_to_whole_tensors(
    tmp_path: Path, ranks: int
) -> None:
    """Also over the files of a save by more ranks, and where a rank has no rows."""
    whole = {
        "weight/a": torch.arange(20.0).reshape(5, 4),
        "exp_avg/a": torch.ones(5, 4),
        "weight/b": torch.ones(2),
    }
    for count in (ranks + 2, ranks):
        for rank in range(count):
            rows = {key: tensor.tensor_split(count)[rank] for key, tensor in whole.items()}
            save_rank(tmp_path, rank_of(rank, count), rows, {"version": count})
    loaded = {
        f"{part}/{name}": tensor
        for part, name, tensor in load_parts(tmp_path, {"a": (5, 4), "b": (2,)})
    }
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in whole.items())
    assert load_numbers(tmp_path) == {"version": ranks}


def test_whole_tensors_in_several_files_load_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one rank writes them that has gathered them."""
    monkeypatch.setattr("gcore_language.state_files._FILE_BYTES", 100)
    whole = {f"weight/{name}": torch.full((5, 4), float(i)) for i, name in enumerate("abc")}
    save_state(tmp_path, whole.items(), {"version": 1}, writes=True)
    assert len(list(tmp_path.glob("state-*.safetensors"))) == 2
    loaded = {
        f"{part}/{name}": tensor
        for part, name, tensor in load_parts(tmp_path, dict.fromkeys("abc", (5, 4)))
    }
    assert loaded.keys() == whole.keys() and all(
        torch.equal(loaded[key], whole[key]) for key in whole
    )


def test_a_state_in_another_format_is_an_error_that_says_which_key_to_change(
    tmp_path: Path,
) -> None:
    write_numbers(tmp_path, {"version": 2}, "sharded")
    assert read_numbers(tmp_path) == ("sharded", {"version": 2})
    with pytest.raises(
        DataError, match="this state is in the format sharded, which this trainer cannot load"
    ) as caught:
        load_numbers(tmp_path)
    assert (
        caught.value.why
        == "It was saved with config.checkpoint: sharded; every trainer loads what whole saves."
    )
    assert "config.checkpoint: whole" in caught.value.todo
    write_numbers(tmp_path, {"version": 2})
    assert load_numbers(tmp_path) == {"version": 2}


def test_a_state_whose_tensors_have_different_step_counts_is_refused(tmp_path: Path) -> None:
    assert take_steps({"optimizer_steps": {}}, tmp_path) == 0
    numbers = {"optimizer_steps": {"a": 4.0, "b": 4.0}, "version": 1}
    assert (take_steps(numbers, tmp_path), numbers) == (4, {"version": 1})
    with pytest.raises(
        DataError, match="have 2 different step counts, but this trainer keeps one for all"
    ):
        take_steps({"optimizer_steps": {"a": 4.0, "b": 3.0}}, tmp_path)


def test_a_full_disk_is_reported_after_every_rank_has_given_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after a file that failed is taken and not written, and there are no numbers: this
    is no state.
    """
    monkeypatch.setattr("gcore_language.state_files._FILE_BYTES", 100)
    (tmp_path / "state-00000.safetensors").symlink_to("/dev/full")
    gathered = []

    def parts() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            gathered.append(name)
            yield f"weight/{name}", torch.ones(5, 4)

    with pytest.raises(CheckpointError, match="trainer state could not be written") as caught:
        save_state(tmp_path, parts(), {}, writes=True)
    assert caught.value.facts == {"full_disk": True}
    assert gathered == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["state-00000.safetensors"]


@pytest.mark.parametrize("writes", [False, True])
def test_a_directory_that_cannot_be_made_is_reported_after_the_last_tensor(
    writes: bool, tmp_path: Path
) -> None:
    """Also by a rank that writes nothing: it may be on another machine, with a disk of its own."""
    (tmp_path / "file").touch()
    gathered = []

    def parts() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "ab":
            gathered.append(name)
            yield f"weight/{name}", torch.ones(4)

    with pytest.raises(CheckpointError, match="trainer state could not be written"):
        save_state(tmp_path / "file" / "state", parts(), {}, writes=writes)
    assert gathered == ["a", "b"]


def test_numbers_that_a_full_disk_does_not_take_are_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "state.json").symlink_to("/dev/full")
    with pytest.raises(
        CheckpointError, match="state.json: trainer state could not be written"
    ) as caught:
        save_state(tmp_path, [("weight/a", torch.ones(4))], {}, writes=True)
    assert caught.value.facts == {"full_disk": True}


def test_missing_rows_of_a_rank_are_detected(tmp_path: Path) -> None:
    for rank in range(3):
        save_rank(tmp_path, rank_of(rank, 3), {"weight/a": torch.ones(2, 4)}, {})
    (tmp_path / "state-00001-00000.safetensors").unlink()
    with pytest.raises(DataError, match=r"a has shape \(4, 4\), the model shape \(6, 4\)"):
        list(load_parts(tmp_path, {"a": (6, 4)}))


def test_copies_reuse_their_memory_until_shapes_change() -> None:
    staging = Staging()
    live = {"a": torch.ones(4), "b": torch.zeros(2, 2)}
    written: list[Mapping[str, torch.Tensor]] = []

    def save(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        staging.save(
            tensors, lambda copies, wrote: written.append(dict(copies)), lambda: None
        ).wait()
        return {name: tensor.data_ptr() for name, tensor in written[-1].items()}

    first = save(live)
    live["a"].add_(1)
    assert torch.equal(written[0]["a"], torch.ones(4))
    assert save(live) == first
    assert torch.equal(written[1]["a"], torch.full((4,), 2.0))
    assert save({"a": torch.ones(5)}).keys() == {"a"}


def test_tensors_may_change_as_soon_as_they_are_copied_and_not_before() -> None:
    """Whatever is added after ``wait`` is not in the copy, though writing has not begun."""
    staging = Staging()
    go = threading.Event()
    live = {str(i): torch.zeros(500_000) for i in range(20)}
    sums: list[float] = []

    def write(copies: Mapping[str, torch.Tensor], wrote: Callable[[], None]) -> None:
        go.wait(10)
        sums.append(sum(float(tensor.sum()) for tensor in copies.values()))

    for _ in range(3):
        go.clear()
        saving = staging.save(live, write, lambda: None)
        staging.wait()
        for tensor in live.values():
            tensor.add_(1)
        go.set()
        saving.wait()
    assert sums == [0.0, 1e7, 2e7]
    assert staging.waited_s > 0


def test_a_failed_copy_blocks_no_rank() -> None:
    staging = Staging()
    saving = staging.save({"a": None}, lambda copies, wrote: None, lambda: None)  # type: ignore[dict-item]
    staging.wait()
    with pytest.raises(AttributeError):
        saving.wait()


class Engine:
    """Saves in the background when it is let; every other method is missing."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.saved: list[tuple[Path, Any]] = []

    def begin_save(self, directory: Path, numbers: dict[str, Any]) -> BackgroundWrite:
        def write(wrote: Callable[[], None]) -> None:
            self.go.wait(10)
            (directory / "numbers").write_text(json.dumps(numbers))

        return BackgroundWrite(write, lambda: None)


def make_trainer(engine: Any) -> SavingTrainer:
    trainer = SavingTrainer.__new__(SavingTrainer)  # without an engine that could train
    trainer._saving_engine = engine
    trainer._pending = None
    trainer.version = 3
    trainer._updates = 5
    trainer._scheduled_steps = 2
    trainer._objective = None
    return trainer


def test_a_save_holds_the_values_at_its_start(tmp_path: Path) -> None:
    trainer = make_trainer(engine := Engine())
    trainer.begin_save(tmp_path)
    trainer.version = 4
    with pytest.raises(RuntimeError, match="a save is under way"):
        trainer.begin_save(tmp_path)
    engine.go.set()
    trainer.finish_save()
    assert json.loads((tmp_path / "numbers").read_text()) == {
        "version": 3,
        "updates": 5,
        "scheduled_steps": 2,
        "objective": {},
    }
    trainer.finish_save()  # nothing is under way


def test_a_background_failure_is_raised_once_when_the_save_ends(tmp_path: Path) -> None:
    trainer = make_trainer(engine := Engine())
    engine.go.set()
    trainer.begin_save(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        trainer.finish_save()
    trainer.begin_save(tmp_path)
    trainer.finish_save()


def test_a_file_that_cannot_be_written_is_an_error_with_its_name() -> None:
    with pytest.raises(
        CheckpointError, match="/dev/full: trainer state could not be written"
    ) as caught:
        write_tensors(Path("/dev/full"), {"a": torch.ones(4)})
    assert caught.value.why == "the system says: No space left on device"
    assert caught.value.facts == {"full_disk": True}


def test_progress_is_reported_while_a_file_is_written() -> None:
    reports = []
    go = threading.Event()

    def write(wrote: Callable[[], None]) -> None:
        wrote()
        go.wait(10)

    def progress() -> None:
        reports.append(1)
        go.set()

    BackgroundWrite(write, progress).wait()
    assert reports == [1]
