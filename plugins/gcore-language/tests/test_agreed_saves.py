"""Errors of writing that every rank gets."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from gcore_language.agreed_saves import agreed, errors_put_off

from gcore_core.contract.errors import CheckpointError


class Ranks:
    """Ranks of which the others told what is given; notes what this one tells."""

    def __init__(self, *others: Any) -> None:
        self.others = others
        self.told: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.told.append(value)
        return [value, *self.others]


def write_past_the_end(_: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def save_with_torch(_: Path) -> None:
    torch.save({"a": torch.ones(3)}, "/dev/full")


def save_much_with_torch(_: Path) -> None:
    torch.save({"a": torch.ones(300_000)}, "/dev/full")


def save_with_torch_as_before(_: Path) -> None:
    torch.save({"a": torch.ones(3)}, "/dev/full", _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    "write", [write_past_the_end, save_with_torch, save_much_with_torch, save_with_torch_as_before]
)
def test_a_refused_write_is_told_to_the_other_ranks(write: Any, tmp_path: Path) -> None:
    ranks: Any = Ranks(None)
    with pytest.raises(CheckpointError, match="trainer state could not be written") as raised:
        with agreed(ranks, tmp_path):
            write(tmp_path)
    error = raised.value
    assert error.where == str(tmp_path)
    assert ranks.told == [[error.what, error.where, error.why, error.todo, error.facts]]


def test_a_rank_that_could_write_raises_the_error_of_another(tmp_path: Path) -> None:
    ranks: Any = Ranks(None, ["no room.", "there", "because", "free some", {"full_disk": True}])
    with pytest.raises(CheckpointError, match="there: no room") as raised:
        with agreed(ranks, tmp_path):
            pass
    assert ranks.told == [None]
    assert raised.value.facts == {"full_disk": True}


def test_nothing_is_raised_where_all_could_write(tmp_path: Path) -> None:
    with agreed(Ranks(None), tmp_path):  # type: ignore[arg-type]
        pass


def test_an_error_of_another_kind_is_no_refused_write(tmp_path: Path) -> None:
    ranks: Any = Ranks(None)
    with pytest.raises(RuntimeError, match="out of memory"), agreed(ranks, tmp_path):
        raise RuntimeError("CUDA error: out of memory")
    assert ranks.told == []


class Library:
    def __init__(self) -> None:
        self.done: list[str] = []

    def write(self, name: str) -> str:
        if name == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        self.done.append(name)
        return name

    def save(self) -> None:
        self.write("full")
        self.done.append("collective")
        self.write("last")


@pytest.mark.parametrize("of_class", [False, True])
def test_a_library_comes_to_its_collectives_before_an_error_is_raised(of_class: bool) -> None:
    library = Library()
    before = Library.write
    with pytest.raises(OSError, match="No space left"):
        with errors_put_off((Library if of_class else library, "write")):
            library.save()
    assert library.done == ["collective", "last"]
    assert Library.write is before
    assert "write" not in vars(library)
