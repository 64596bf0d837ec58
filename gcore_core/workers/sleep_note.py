"""Remembers, across restarts of a generator, that it sleeps.

A generator that sleeps has given its memory to the trainer, or to generators of another role. Where
its process is killed meanwhile, another takes its place. Its backend would take that memory as soon
as it is made. So a generator leaves a note while it sleeps, and the next process makes its backend
at its wake only (``asleep``).
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class SleepNote:
    """Is a file that exists while a generator sleeps.

    path: of the file; None keeps no note.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @property
    def says_asleep(self) -> bool:
        return self._path is not None and self._path.exists()

    def leave(self) -> None:
        """Notes that the generator sleeps; without room for a note, it goes without."""
        if self._path is None:
            return
        try:
            self._path.touch(mode=0o600)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)

    def remove(self) -> None:
        """Notes that the generator is awake."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def note_path(directory: str, worker: str) -> Path:
    """Returns the path of a generator worker's note.

    directory: the store's, which outlives the process.
    worker: its name, such as "rollout.0".
    """
    return Path(directory) / f"{worker}-asleep"
