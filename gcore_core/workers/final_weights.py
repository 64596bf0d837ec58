"""Writes the final weights next to their place and moves them there when all of them are on disk.

So ``weights/`` of a run is whole or not there, and a write that failed can be tried again: the
trainer still holds the weights.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from gcore_core.contract.errors import CheckpointError

#: What the libraries that write weights raise when the system refuses.
_REFUSED = (OSError, SafetensorError)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def partial(directory: Path) -> Path:
    """Returns where the weights are written that shall lie in ``directory``."""
    return directory.with_name(f".{directory.name}.partial")


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Raises CheckpointError for what the system refuses to write within the block."""
    try:
        yield
    except _REFUSED as error:
        text = getattr(error, "strerror", None) or str(error)
        file = getattr(error, "filename", None)
        is_full = getattr(error, "errno", None) in _FULL or any(
            f"os error {number}" in text or os.strerror(number) in text for number in _FULL
        )
        raise CheckpointError(
            "the final weights could not be written.",
            where=str(directory),
            why=f"the system says: {text}{f' ({file})' if file else ''}",
            todo="free some space" if is_full else "see to that directory",
            full_disk=is_full,
        ) from error


def place(directory: Path) -> None:
    """Moves what was written to its place, once it is on the disk.

    Several ranks may do it at once: one of them moves it. Raises OSError.
    """
    fresh = partial(directory)
    old = directory.with_name(f".{directory.name}.replaced.partial")
    try:
        for folder, _, files in os.walk(fresh):
            for path in (folder, *(os.path.join(folder, file) for file in files)):
                _sync(path)
        if directory.exists() and fresh.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)
        fresh.rename(directory)
        _sync(directory.parent)
    except FileNotFoundError:
        if fresh.exists():
            raise
    shutil.rmtree(old, ignore_errors=True)


def discard(directory: Path) -> None:
    """Removes what was written of weights that have no place yet."""
    shutil.rmtree(partial(directory), ignore_errors=True)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
