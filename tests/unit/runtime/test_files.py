"""A file is replaced as a whole, or it stays as it is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gcore_core.runtime.files import replacing


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("old")
    with replacing(place) as fresh:
        fresh.write_text("ne")
        assert place.read_text() == "old"
        fresh.write_text("new")
    assert place.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_could_not_be_written_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("old")
    with pytest.raises(OSError, match="disk is full"), replacing(place) as fresh:
        fresh.write_text("ne")
        raise OSError("disk is full")
    assert place.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_threads_that_replace_one_file_do_not_write_into_each_others(tmp_path: Path) -> None:
    place = tmp_path / "file"
    both_write = threading.Barrier(2)

    def write(text: str) -> None:
        with replacing(place) as fresh:
            fresh.write_text(text[:1])
            both_write.wait()
            fresh.write_text(text)

    threads = [threading.Thread(target=write, args=(text,)) for text in ("one", "another")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert place.read_text() in ("one", "another")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
