"""Joins disks of machines: the ``SiteFiles`` of a site on several.

What the job names goes to every node before workers start (``provide_files``). What they write into
the run's directory on machines that do not share its disk comes home.

A run's directory has the same path on every machine. Whether it is the same directory is found out:
each node makes an empty file there, and looks for those of the others. Nodes that see each other's
share a disk. From each disk that is not home's, one node brings

    logs, the trace, journals     what was appended, once a second, to the end of the file at home
    a checkpoint's parts          before it is committed; then they are removed on the node
    all other files               when the attempt ends, well or since a process was lost, such as
                                  the final weights

When all of a disk is home then, the run's directory there is removed, unless it had files before.
So the next attempt finds what the first one has found.

A run that goes on from a checkpoint first sends each trainer's part of it to the nodes of that
trainer's ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gcore_core.contract.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GcoreError,
    WorkerError,
)
from gcore_core.contract.launching import Peer
from gcore_core.contract.run_files import CHECKPOINTS, LOGS, TRACE
from gcore_core.contract.site_files import JobFiles, Show
from gcore_core.kits.launching import Nothing
from gcore_nodes.messages import (
    END_WORKERS,
    HASH_FILES,
    LIST_FILES,
    MAKE_DIRECTORY,
    READ_GROWN,
    RECEIVE_FILE,
    REMOVE_FILES,
    FileFacts,
    Grown,
    HashFiles,
    ListFiles,
    MakeDirectory,
    ReadGrown,
    ReceiveFile,
    RemoveFiles,
)
from gcore_nodes.provide_files import provide

log = logging.getLogger(__name__)
MARKERS = ".disks"  # the directory of the files by which nodes find out who shares a disk
#: Files that are appended to, relative to the run's directory.
APPENDED = [f"{LOGS}/*.log", f"{TRACE}/*.jsonl", "*.jsonl"]
_LOOK_S = 1.0  # so often what was appended is fetched
_LAST_S = 10.0  # a node has so long to give its last lines when the site is closed


@dataclass
class _Disk:
    """A disk that is not home's.

    node: name of the agent that is asked for what is there.
    nodes: names of all agents that see it.
    positions: path of an appended file -> how many of its bytes are home.
    before: path -> facts of the files that were there before this run, or that have come home.
    was_empty: whether the run's directory had nothing of a run before.
    is_home: whether all of it is home, but the last lines of logs.
    """

    node: str
    nodes: frozenset[str]
    positions: dict[str, int] = field(default_factory=dict)
    before: dict[str, FileFacts] = field(default_factory=dict)
    was_empty: bool = False
    is_home: bool = False


class JoinedDisks:
    """Joins the disks of one site; where all machines share one there is nothing to do.

    agents: node -> its agent.
    home: the node that the supervisor runs on.
    where: process -> its node.
    """

    def __init__(self, agents: Mapping[str, Peer], home: str, where: Mapping[str, str]) -> None:
        self._agents = agents
        self._home = home
        self._where = where
        self._host: Callable[[str], str] = str
        self._directory = Path()  # the run's, while it is followed
        self._token = secrets.token_hex(8)
        self._disks: list[_Disk] = []
        self._turns = asyncio.Lock()  # lines of a file are appended in order

    async def provide(self, job: JobFiles, show: Show) -> None:
        """See ``SiteFiles``."""
        await provide(job, self._agents, self._home, show)

    @contextlib.asynccontextmanager
    async def follow(
        self, directory: Path, host: Callable[[str], str] = str
    ) -> AsyncIterator[None]:
        """See ``SiteFiles``."""
        self._directory = directory.absolute()
        self._host = host
        following: asyncio.Task[None] | None = None
        ends_by: BaseException | None = None
        try:
            if len(self._agents) > 1:
                self._disks = await self._find_disks()
                await asyncio.gather(*(self._begin(disk) for disk in self._disks))
            if self._disks:
                following = asyncio.ensure_future(self._follow())
            yield
        except BaseException as error:
            ends_by = error
            raise
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await self._end(another_may_follow=isinstance(ends_by, WorkerError))
            self._remove_markers()

    async def _end(self, *, another_may_follow: bool) -> None:
        """Brings the last lines home, and removes what may be removed on the other disks."""
        await self._end_workers()
        if another_may_follow:
            await self._bring_what_comes()
        are_drained = await self.drain()
        await self._tidy(are_drained)

    def _remove_markers(self) -> None:
        shutil.rmtree(self._directory / MARKERS, ignore_errors=True)

    def _agent(self, node: str) -> Peer:
        return self._agents[node]

    # -- which disks there are ---------------------------------------------------------------------

    def _marker(self, node: str) -> str:
        return f"{self._token}.{node}"

    async def _find_disks(self) -> list[_Disk]:
        """Returns the disks that are not home's. Raises ConfigError naming the node."""
        nodes = list(self._agents)
        markers = self._directory / MARKERS
        made = await asyncio.gather(
            *(
                self._agent(node).call(
                    MAKE_DIRECTORY, MakeDirectory(str(markers), self._marker(node))
                )
                for node in nodes
            ),
            return_exceptions=True,
        )
        for node, error in zip(nodes, made, strict=True):
            if isinstance(error, DataError):
                raise no_directory(self._host(node), self._directory, error.what) from error
            if isinstance(error, BaseException):
                raise error
        paths = {node: str(markers / self._marker(node)) for node in nodes}
        seen = await asyncio.gather(
            *(self._agent(node).call(LIST_FILES, ListFiles(list(paths.values()))) for node in nodes)
        )
        names = {path: node for node, path in paths.items()}
        sights = {
            node: {names[facts.path] for facts in files}
            for node, files in zip(nodes, seen, strict=True)
        }
        groups = same_disks(sights)
        disks = [_Disk(min(group, key=nodes.index), group) for group in groups]
        return [disk for disk in disks if self._home not in disk.nodes]

    async def _begin(self, disk: _Disk) -> None:
        """Notes what is there already, of a run that went on or of another one: it is not news."""
        everything = ListFiles([str(self._directory)], everything=True)
        files = await self._agent(disk.node).call(LIST_FILES, everything)
        disk.before = {facts.path: facts for facts in files}
        appended = {self._relative(facts.path): facts.nbytes for facts in files}
        disk.positions = {path: size for path, size in appended.items() if _is_appended(path)}
        disk.was_empty = not disk.positions and not any(map(_comes_home, appended))

    def _relative(self, path: str) -> str:
        """Returns a path below the run's directory. Raises DataError for one that is not there."""
        place = Path(path)
        if ".." in place.parts or not place.is_relative_to(self._directory):
            raise DataError("it is none of the run's files", where=path)
        return str(place.relative_to(self._directory))

    # -- the end -----------------------------------------------------------------------------------

    async def _end_workers(self) -> None:
        """Ends the workers on other disks, which the site would do next: then their last lines are
        written.
        """
        with contextlib.suppress(GcoreError, OSError, TimeoutError):
            async with asyncio.timeout(_LAST_S):
                nodes = {node for disk in self._disks for node in disk.nodes}
                await asyncio.gather(
                    *(self._agent(node).call(END_WORKERS, Nothing()) for node in nodes),
                    return_exceptions=True,
                )

    async def _bring_what_comes(self) -> None:
        """Brings home what can be had of all disks; some may be lost with their machines."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                bringing = (self._bring_new(disk) for disk in self._disks)
                await asyncio.gather(*bringing, return_exceptions=True)

    async def _tidy(self, are_drained: bool) -> None:
        """Removes the markers from other disks, and the run's directory where all of it is home."""
        for disk in self._disks:
            whole = are_drained and disk.is_home and disk.was_empty
            path = self._directory if whole else self._directory / MARKERS
            with contextlib.suppress(GcoreError, OSError, TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await self._agent(disk.node).call(REMOVE_FILES, self._removal(path))

    # -- what is appended --------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.drain()

    async def drain(self) -> bool:
        """Brings home what was appended so far; returns whether every node has answered."""
        async with self._turns:
            return all(await asyncio.gather(*(self._drain(disk) for disk in self._disks)))

    async def _drain(self, disk: _Disk) -> bool:
        try:
            async with asyncio.timeout(_LAST_S):
                while news := await self._agent(disk.node).call(
                    READ_GROWN, ReadGrown(str(self._directory), APPENDED, disk.positions)
                ):
                    self._append(disk, news)
                return True
        except (GcoreError, OSError, TimeoutError) as error:
            log.debug("nothing came from %s: %r", disk.node, error)
            return False

    def _append(self, disk: _Disk, news: Iterable[Grown]) -> None:
        for grown in news:
            if not _is_appended(grown.path):
                raise DataError("it is none of the run's files", where=f"{disk.node}: {grown.path}")
            path = self._directory / grown.path
            path.parent.mkdir(exist_ok=True)
            nbytes = path.stat().st_size if path.exists() else 0
            try:
                with path.open("ab") as file:
                    file.write(grown.content)
            except OSError:  # it is asked for again, so a part of it must not stay
                with contextlib.suppress(OSError):
                    os.truncate(path, nbytes)
                raise
            disk.positions[grown.path] = grown.start + len(grown.content)

    # -- whole files -------------------------------------------------------------------------------

    async def collect_all(self) -> None:
        """Brings home all that was appended, and every other file that is new or has changed.

        Raises DataError where that is not possible, such as on a full disk; it says where they
        stay.
        """
        await self.drain()
        await asyncio.gather(*(self._bring_new(disk) for disk in self._disks))

    async def _bring_new(self, disk: _Disk) -> None:
        everything = ListFiles([str(self._directory)], everything=True)
        files = await self._agent(disk.node).call(LIST_FILES, everything)
        new = [
            facts
            for facts in files
            if _comes_home(self._relative(facts.path)) and disk.before.get(facts.path) != facts
        ]
        try:
            await self._bring(disk, new)
        except DataError as error:
            error.why = "\n".join(filter(None, (error.why, "it is written when the run has ended")))
            error.todo = (
                f"free some space, or see to that directory; all files of the run stay on "
                f"{self._host(disk.node)}, in {self._directory}"
            )
            raise
        disk.before |= {facts.path: facts for facts in new}
        disk.is_home = True

    async def _bring(self, disk: _Disk, files: Sequence[FileFacts]) -> None:
        """Brings files home, in the place of what stands there."""
        facts_of = {facts.path: facts for facts in files}
        async for path, sha256 in _hashes(self._agent(disk.node), list(facts_of)):
            await _receive(self._agent(self._home), disk.node, facts_of[path], sha256)
            log.info("%s came from %s", path, disk.node)

    # -- checkpoints -------------------------------------------------------------------------------

    async def make(self, directory: Path) -> None:
        """Makes a directory on every disk, as it is at home."""
        request = MakeDirectory(str(directory.absolute()))
        await asyncio.gather(
            *(self._agent(disk.node).call(MAKE_DIRECTORY, request) for disk in self._disks)
        )

    async def collect(self, directory: Path) -> None:
        """Brings home all files below a directory, and removes the directory on the nodes.

        What was appended before comes first: the journals at home have the steps of a checkpoint.

        Raises CheckpointError when two disks have the same file with another content.
        """
        if not self._disks:
            return
        await self.drain()
        below = ListFiles([str(directory.absolute())], everything=True)
        home = self._agent(self._home)
        at_home = [facts.path for facts in await home.call(LIST_FILES, below)]
        known = {path: sha256 async for path, sha256 in _hashes(home, at_home)}
        for disk in self._disks:
            files = await self._agent(disk.node).call(LIST_FILES, below)
            facts_of = {facts.path: facts for facts in files}
            async for path, sha256 in _hashes(self._agent(disk.node), list(facts_of)):
                if known.setdefault(path, sha256) != sha256:
                    raise CheckpointError(
                        f"ranks on two machines have saved {Path(path).name} differently.",
                        where=path,
                        todo="give them a disk that they share: set run.dir to a directory on it",
                    )
                if path not in at_home:
                    await _receive(home, disk.node, facts_of[path], sha256)
                    at_home.append(path)
        await self.remove(directory)

    async def send(self, parts: Mapping[Path, Iterable[str]]) -> None:
        """Gives the parts of a checkpoint at home to the disks of those who load them.

        It is called once with all parts. Before they are sent, every checkpoint is removed on all
        disks but home's, so that no state of an earlier attempt stays there.

        parts: directory of a part -> names of the processes that load it.
        """
        await self.remove(self._directory / CHECKPOINTS)
        for part, names in parts.items():
            await self._send_part(part.absolute(), self._disks_of(names))

    def _disks_of(self, processes: Iterable[str]) -> list[_Disk]:
        """Returns the disks, besides home's, that some processes see."""
        nodes = {self._where[process] for process in processes}
        return [disk for disk in self._disks if nodes & disk.nodes]

    async def _send_part(self, part: Path, disks: Sequence[_Disk]) -> None:
        if not disks:
            return
        home = self._agent(self._home)
        files = await home.call(LIST_FILES, ListFiles([str(part)], everything=True))
        facts_of = {facts.path: facts for facts in files}
        async for path, sha256 in _hashes(home, list(facts_of)):
            await asyncio.gather(
                *(
                    _receive(self._agent(disk.node), self._home, facts_of[path], sha256)
                    for disk in disks
                )
            )

    async def remove(self, directory: Path) -> None:
        """Removes a directory on all disks but home's."""
        request = self._removal(directory)
        await asyncio.gather(
            *(self._agent(disk.node).call(REMOVE_FILES, request) for disk in self._disks)
        )

    def _removal(self, directory: Path) -> RemoveFiles:
        # Where home's own marker is seen, the disk is home's, whatever was found before.
        unless = str(self._directory / MARKERS / self._marker(self._home))
        return RemoveFiles([str(directory.absolute())], unless)


def no_directory(host: str, directory: Path, what: str) -> ConfigError:
    """Returns the error for a machine where the run's directory cannot be written."""
    return ConfigError(
        f"the run's directory cannot be written on {host}: {what}",
        where=str(directory),
        todo="set run.dir to a directory that you may write on every host",
    )


def same_disks(sights: dict[str, set[str]]) -> list[frozenset[str]]:
    """Divides nodes into those that share a disk: of two, one sees the marker of the other.

    sights: node -> the nodes whose markers it sees.
    """
    groups: list[set[str]] = []
    for node, seen in sights.items():
        joined = {node, *seen}
        apart = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return [frozenset(group) for group in groups]


def _is_appended(path: str) -> bool:
    """Whether a file of the run, by its relative path, is one that is only appended to."""
    parts = Path(path).parts
    return parts[-1:] != ("..",) and any(
        len(Path(pattern).parts) == len(parts) and Path(path).match(pattern) for pattern in APPENDED
    )


def _comes_home(path: str) -> bool:
    """Whether a file of the run comes home when it has ended.

    Appended files have come already, parts of checkpoints come when they are committed, and what an
    agent keeps for itself stays.
    """
    first = Path(path).parts[0]
    of_agents = first == MARKERS or first.startswith("spill-") or path.endswith(".part")
    of_agents = of_agents or (first == LOGS and Path(path).suffix == ".json")
    return not (of_agents or first == CHECKPOINTS or _is_appended(path))


async def _hashes(agent: Peer, paths: Sequence[str]) -> AsyncIterator[tuple[str, str]]:
    """Yields (path, SHA-256) of files of a node. Raises DataError for one that cannot be read."""
    if not paths:
        return
    async with contextlib.aclosing(agent.stream(HASH_FILES, HashFiles(list(paths)))) as items:
        async for item in items:
            if item.fault:
                raise DataError(f"it cannot be read: {item.fault}", where=item.path)
            if item.sha256:
                yield item.path, item.sha256


async def _receive(agent: Peer, source: str, facts: FileFacts, sha256: str) -> None:
    """Has a node fetch a file of the run from another one, in the place of what is there."""
    request = ReceiveFile(
        path=facts.path,
        node=source,
        sha256=sha256,
        nbytes=facts.nbytes,
        mode=facts.mode,
        mtime_ns=facts.mtime_ns,
        replaces=True,
    )
    async for _ in agent.stream(RECEIVE_FILE, request):
        pass
