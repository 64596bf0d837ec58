"""Tests where the bytes of tensors lie while a worker sleeps."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gcore_language.offload import Offload, held_bytes

from gcore_core.contract.errors import ContractError, PlacementError

MANY = 1 << 20


def test_memory_is_given_back_and_every_view_is_whole_again(tmp_path: Path) -> None:
    """Also of a tensor that numpy looks at, whose storage nobody could empty."""
    offload = Offload("policy", 0, str(tmp_path))
    tensor = torch.arange(MANY, dtype=torch.float32)
    rows, array = tensor[100:200], tensor.numpy()
    expected = tensor.clone()
    awake = held_bytes([tensor])
    offload.sleep([tensor, rows])
    with pytest.raises(ContractError, match="sleeps"):
        offload.check_awake()
    assert awake > 4 * MANY
    assert held_bytes([tensor]) <= 2 * 4096
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [4 * MANY]
    offload.wake()
    offload.check_awake()
    assert torch.equal(tensor, expected)
    assert torch.equal(rows, expected[100:200])
    assert array[-1] == MANY - 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory here")
def test_files_in_memory_are_refused() -> None:
    tensor = torch.ones(MANY)
    with pytest.raises(PlacementError, match="whose files are memory too"):
        Offload("policy", 0, "/dev/shm").sleep([tensor])
    assert bool((tensor == 1).all())


def test_a_disk_without_room_is_refused_before_anything_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    tensor = torch.ones(MANY)
    offload = Offload("policy", 0, str(tmp_path))
    with pytest.raises(PlacementError, match="No space left"):
        offload.sleep([tensor])
    offload.check_awake()
    assert bool((tensor == 1).all())
    assert not list(tmp_path.iterdir())


def test_bytes_that_nobody_needs_go_to_no_file_and_are_zeros_after_the_wake(tmp_path: Path) -> None:
    """What a tensor to keep lies in is kept, although something to be written anew lies there
    too.
    """
    offload = Offload("policy", 0, str(tmp_path))
    kept, scratch = torch.ones(MANY), torch.ones(2 * MANY)
    view = scratch[100:200]
    address = scratch.data_ptr()
    offload.sleep([kept], scratch=[scratch, kept[:10]])
    assert held_bytes([kept, scratch]) <= 4 * 4096
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [4 * MANY]
    offload.wake()
    assert bool((kept == 1).all())
    assert not scratch.any()
    view += 1
    assert scratch.sum() == 100
    assert scratch.data_ptr() == address
