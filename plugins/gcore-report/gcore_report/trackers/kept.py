"""Keeps what a resumed run needs to go on with the same run of a tracker.

It lies in the run's directory, ``trackers/<observer>.json``. No secret is in it.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO

import msgspec

from gcore_core.contract.errors import DataError
from gcore_core.kits.cache import replacing

DIRECTORY = "trackers"


class Kept(msgspec.Struct, kw_only=True):
    """Says how far a tracker's run is.

    id: names the tracker's run.
    step: the last step that it was told; -1: none.
    rows: how many rows it was told in all, undone steps and repeated ones too.
    """

    id: str
    step: int = -1
    rows: int = 0


def path_of(directory: Path, name: str) -> Path:
    return directory / DIRECTORY / f"{name}.json"


def claim(directory: Path, name: str) -> BinaryIO:
    """Waits until no other process goes on with the tracker's run; closing the file lets it go.

    A supervisor that was killed may leave an observer that is still taking what it was told.
    """
    path = path_of(directory, name).with_suffix(".lock")
    path.parent.mkdir(exist_ok=True)
    file = path.open("ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def read(directory: Path, name: str) -> Kept | None:
    """Returns what is kept of an observer; None where nothing is. Raises DataError."""
    path = path_of(directory, name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise DataError(
            "what is kept of the tracker's run cannot be read.",
            where=str(path),
            why=str(error),
            todo="remove the file; the tracker then gets another run, with all steps",
        ) from error


def write(directory: Path, name: str, kept: Kept) -> None:
    """Replaces what is kept; a reader never sees half of it."""
    path = path_of(directory, name)
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as fresh:
        fresh.write_bytes(msgspec.json.encode(kept))
