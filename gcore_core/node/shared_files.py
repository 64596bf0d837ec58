"""Finds the files that engines have made in shared memory, and removes those that they leave.

An engine that is killed cannot remove them itself. Its provider declares how such files are called
(``Provider.shared_memory``). A name alone says nothing about whose a file is, so a file counts as a
worker's only when a process of that worker was seen to hold it, while both existed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import psutil

from gcore_core.node.process_record import SharedFile, identify
from gcore_core.runtime.files import SHARED_MEMORY

_LOOKS = 5  # a new file that no worker of ours held in so many looks is somebody else's


class Maker(NamedTuple):
    """Names a worker that may make files.

    pid: of the worker, which leads a session.
    patterns: names of its files, as fnmatch reads them.
    """

    pid: int
    patterns: tuple[str, ...]


class SharedFiles:
    """Knows which files of shared memory the living workers of a node have made.

    Files that were there before this object belong to others.
    """

    def __init__(self, directory: Path = SHARED_MEMORY) -> None:
        self._directory = directory
        self._foreign = set(self._files(("*",)))
        self._owners: dict[SharedFile, str] = {}
        # New files without owner -> how often looked at.
        self._looks: dict[SharedFile, int] = {}

    def owned(self) -> list[SharedFile]:
        """Returns the files that are known to be the workers'."""
        return list(self._owners)

    def look(self, makers: Mapping[str, Maker]) -> None:
        """Finds the owners of new files.

        It reads the process table only when there is a new file with a declared name.

        makers: name of a worker -> what it may make.
        """
        patterns = tuple({word for maker in makers.values() for word in maker.patterns})
        if not patterns:
            return
        present = set(self._files(patterns))
        # Engines make and remove files all the time: one that is gone, or whose name another file
        # has by now, is nobody's.
        self._owners = {file: name for file, name in self._owners.items() if file in present}
        unknown = present - self._foreign - self._owners.keys()
        self._looks = {file: self._looks.get(file, 0) + 1 for file in unknown}
        if unknown:
            self._find_owners(unknown, makers)

    def ended(self, name: str, makers: Mapping[str, Maker]) -> None:
        """Removes the files of a worker that has ended, without those that another worker holds.

        makers: the workers that live.
        """
        files = {file for file, owner in self._owners.items() if owner == name}
        if not files:
            return
        for file in files:
            del self._owners[file]
        self._find_owners(files, makers)
        for file in files - self._owners.keys():
            file.remove()

    def _find_owners(self, files: set[SharedFile], makers: Mapping[str, Maker]) -> None:
        """Notes which living workers hold these files; who has one first in ``makers`` owns it.

        A new file that none held in ``_LOOKS`` looks is somebody else's from then on.
        """
        for name, maker in makers.items():
            candidates = {
                file
                for file in files - self._owners.keys()
                if _is_named(file.path.rpartition("/")[2], maker.patterns)
            }
            if candidates:
                held_paths = _held_paths(_processes_of(maker.pid), f"{self._directory}/")
                for file in candidates:
                    if file.path in held_paths:
                        self._owners[file] = name
        for file in files - self._owners.keys():
            if self._looks.get(file, 0) >= _LOOKS:
                self._foreign.add(file)

    def _files(self, patterns: tuple[str, ...]) -> Iterable[SharedFile]:
        """Yields this user's files with such names."""
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                if not _is_named(entry.name, patterns):
                    continue
                with contextlib.suppress(OSError):  # removed meanwhile
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False) and status.st_uid == os.getuid():
                        yield identify(entry.path)


def _is_named(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _processes_of(worker_pid: int) -> list[int]:
    """Returns the processes of a worker: its session, and its descendants in other sessions."""
    pids = set()
    with contextlib.suppress(psutil.Error):
        worker = psutil.Process(worker_pid)
        pids = {process.pid for process in worker.children(recursive=True)}
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if os.getsid(pid) == worker_pid:
                pids.add(pid)
    return sorted(pids)


def _held_paths(pids: Iterable[int], prefix: str) -> set[str]:
    """Returns the files below ``prefix`` that these processes have open or mapped."""
    paths = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            # Descriptors first: who makes a file maps it before closing its descriptor, so one that
            # is closed by now is seen among the mappings.
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    paths.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n"):
                # address, rights, offset, device, inode, path; the path may hold blanks
                paths.update(os.fsdecode(path) for path in line.split(maxsplit=5)[5:])
    return {path for path in paths if path.startswith(prefix)}
