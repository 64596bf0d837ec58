"""Whoever reads a journal while it is written gets each whole line once, or is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_rewards.human.journal import Tail, append_shared

from gcore_core.contract.errors import DataError


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail[int](path, int)
    assert list(tail.new()) == []
    path.write_bytes(b"1\n2")
    assert list(tail.new()) == [1]
    assert list(tail.new()) == []
    with path.open("ab") as file:
        file.write(b"3\n")
    assert list(tail.new()) == [23]


def test_half_a_line_that_a_writer_cuts_off_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail[int](path, int)
    path.write_bytes(b"1\n2")
    assert list(tail.new()) == [1]
    append_shared(path, [4])
    assert list(tail.new()) == [4]


def test_a_line_that_cannot_be_read_is_told_until_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail[int](path, int)
    path.write_bytes(b"1\nx\n3\n")
    assert next(tail.new()) == 1
    for _ in range(2):
        with pytest.raises(DataError, match=r"lines\.jsonl:2"):
            list(tail.new())
    path.write_bytes(b"1\n22\n3\n")
    assert list(tail.new()) == [22, 3]


@pytest.mark.parametrize("content", [b"", b"1\n", b"100\n200\n300\n"])
def test_a_file_that_is_written_anew_is_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail[int](path, int)
    path.write_bytes(b"1\n2\n3\n")
    assert list(tail.new()) == [1, 2, 3]
    path.write_bytes(content)
    with pytest.raises(DataError, match="written anew"):
        list(tail.new())


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail[int](path, int)
    path.write_bytes(b"1\n")
    assert list(tail.new()) == [1]
    path.unlink()
    with pytest.raises(DataError, match="written anew"):
        list(tail.new())
