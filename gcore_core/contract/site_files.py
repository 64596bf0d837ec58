"""Defines how the machines of a site come to have the same files, and bring home what they write.

On one disk there is nothing to do (``OneDisk``). A launcher whose machines may have disks of their
own gives its site something that joins them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

#: Is called with a text for a person and a share from 0 to 1, or None where none is known.
Show = Callable[[str, float | None], None]


def _own_name(node: str) -> str:
    return node


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """Says what each machine must have before a worker starts.

    paths: node -> the files and directories that the job names for its workers. It has every node
        with workers.
    interpreters: node -> the interpreters of its workers' roles, which are never copied.
    packages: whose code must be the same on every node.
    may_copy: whether what a node does not have is copied there; else the run is refused.
    host: returns what a person calls a node.
    log: the file that has all that stands against the run.
    """

    paths: Mapping[str, frozenset[str]]
    interpreters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    packages: Sequence[str] = ()
    may_copy: bool = True
    host: Callable[[str], str] = _own_name
    log: Path = Path()


class SiteFiles(Protocol):
    """Joins the disks of one site. The supervisor calls it; directories are paths at home."""

    async def provide(self, job: JobFiles, show: Show) -> None:
        """Gives every node the files of the job, before a worker starts.

        show: is told what is done.
        Raises ConfigError where a node has not what it must have, and may not get it.
        """

    def follow(
        self, directory: Path, host: Callable[[str], str] = _own_name
    ) -> AbstractAsyncContextManager[None]:
        """Brings home what is appended to the run's files, for as long as the block lasts.

        When it ends after a WorkerError, another attempt may follow: what can be had comes home.

        directory: the run's.
        host: returns what a person calls a node.
        Raises ConfigError where a node cannot write there.
        """

    async def make(self, directory: Path) -> None:
        """Makes a directory of the run on every disk, as it is at home."""

    async def remove(self, directory: Path) -> None:
        """Removes a directory of the run on all disks but home's."""

    async def collect(self, directory: Path) -> None:
        """Brings home all files below a directory, and removes it on the other disks.

        Raises CheckpointError where two disks have the same file with another content.
        """

    async def collect_all(self) -> None:
        """Brings home every file of the run that is new or has changed.

        Raises DataError where that is not possible, such as on a full disk.
        """

    async def send(self, parts: Mapping[Path, Iterable[str]]) -> None:
        """Gives the parts of a checkpoint at home to the disks of those who load them.

        It is called once with all parts, and removes every earlier checkpoint there first.

        parts: directory of a part -> names of the processes that load it.
        """


class OneDisk:
    """Is the ``SiteFiles`` of machines that share one disk, such as a single one."""

    async def provide(self, job: JobFiles, show: Show) -> None:
        pass

    @contextlib.asynccontextmanager
    async def follow(
        self, directory: Path, host: Callable[[str], str] = _own_name
    ) -> AsyncIterator[None]:
        yield

    async def make(self, directory: Path) -> None:
        pass

    async def remove(self, directory: Path) -> None:
        pass

    async def collect(self, directory: Path) -> None:
        pass

    async def collect_all(self) -> None:
        pass

    async def send(self, parts: Mapping[Path, Iterable[str]]) -> None:
        pass
