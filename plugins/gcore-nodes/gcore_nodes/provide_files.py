"""Sees to it that every node has the files that the job names, before a worker starts.

Each node's agent is asked for what it has (``node_files``):

    facts      a file of the same size, time of change and inode as at home is the same file, on a
               disk that both share; it is not read
    hashes     any other file of that path is read on both sides and compared by SHA-256
    copies     what a node does not have is copied there from home, where ``launcher.files`` says so

A file that differs is not replaced: the run is refused, with a list of every node and file. The one
exception is a copy that a run has made and that nobody has changed since; it is copied anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.launching import Peer
from gcore_core.contract.site_files import JobFiles, Show
from gcore_nodes.messages import (
    HASH_FILES,
    HASH_PACKAGES,
    LIST_FILES,
    RECEIVE_FILE,
    FileFacts,
    HashedFile,
    HashFiles,
    HashPackages,
    ListFiles,
    ReceiveFile,
)

log = logging.getLogger(__name__)
_SHOWN = 3  # lines of the list that stand in the error; all are in the log
_MOST_FILES = 100_000


async def provide(job: JobFiles, agents: Mapping[str, Peer], home: str, show: Show) -> None:
    """Compares the files of every node with those at home, and copies what is missing.

    agents: node -> its agent.
    home: the node whose files count.
    show: is told what is done.
    Raises ConfigError where a node has not what it must have, and may not get it.
    """
    nodes = [node for node in job.paths if node != home]
    if not nodes:
        return
    comparison = _Comparison(job, agents, home, show)
    await comparison.look(nodes)
    copies = await comparison.compare()
    comparison.refuse_faults()
    await comparison.copy(copies)
    comparison.refuse_faults()


@dataclass(frozen=True)
class _Copy:
    """A file that a node is to get; ``replaces``: in place of an earlier copy."""

    node: str
    path: str
    replaces: bool = False


class _Comparison:
    """Compares the nodes of one site with home.

    faults: what stands against the run, one line each: node, path, and what is different.
    """

    def __init__(self, job: JobFiles, agents: Mapping[str, Peer], home: str, show: Show) -> None:
        self._job = job
        self._agents = agents
        self._at_home = home
        self._show = show
        self.faults: list[str] = []
        self._home: dict[str, FileFacts] = {}  # by path
        self._hashes: dict[str, str] = {}  # of files at home
        self._missing: list[tuple[str, str]] = []  # (node, path)
        self._unsure: list[tuple[str, str]] = []  # (node, path): there, and perhaps another file
        self._text = ""  # what is done now
        self._total_bytes = 0
        self._done_bytes = 0
        self._done_of: dict[tuple[str, str], int] = {}  # (node, path) -> its part of them

    def _peer(self, node: str) -> Peer:
        return self._agents[node]

    def _fault(self, node: str, path: str, what: str) -> None:
        self.faults.append(f"{self._job.host(node)}: {path}: {what}")

    def refuse_faults(self) -> None:
        """Raises ConfigError when something stands against the run."""
        if self.faults:
            raise refusal(self.faults, self._job)

    async def look(self, nodes: Sequence[str]) -> None:
        """Asks home and every node for the facts of their files. Raises ConfigError."""
        self._show("comparing the job's files on every node", None)
        paths = sorted({path for node in nodes for path in self._job.paths[node]})
        home = self._peer(self._at_home)
        packages = HashPackages(list(self._job.packages))
        at_home, code = await asyncio.gather(
            home.call(LIST_FILES, ListFiles(paths)), home.call(HASH_PACKAGES, packages)
        )
        if len(at_home) > _MOST_FILES:
            raise ConfigError(
                f"the job names directories with {len(at_home)} files",
                where=_largest(paths, at_home),
                todo="name the directory with the files that the job reads, not one above it",
            )
        for facts in at_home:
            if facts.fault:
                raise ConfigError(f"it cannot be read: {facts.fault}", where=facts.path)
            self._home[facts.path] = facts
        await asyncio.gather(*(self._look_at(node, code) for node in nodes))

    async def _look_at(self, node: str, code: Mapping[str, str]) -> None:
        """Compares a node with home as far as facts tell, and notes what is missing or unsure.

        code: package -> digest of its code at home.
        """
        paths = sorted(self._job.paths[node])
        interpreters = sorted(self._job.interpreters.get(node, ()))
        there, of_node, pythons = await asyncio.gather(
            self._peer(node).call(HASH_PACKAGES, HashPackages(list(code))),
            self._peer(node).call(LIST_FILES, ListFiles(paths)),
            self._peer(node).call(LIST_FILES, ListFiles(interpreters)),
        )
        for name, digest in code.items():
            if there.get(name) != digest:
                what = "its code is not the same as at home" if there.get(name) else "is missing"
                self._fault(node, name, f"{what}; install the same one there")
        for path in set(interpreters) - {facts.path for facts in pythons}:
            self._fault(node, path, "the interpreter is missing; it is not copied")
        found = {facts.path: facts for facts in of_node}
        for path, facts in self._home.items():
            if any(is_below(path, root) for root in paths):
                self._sort(node, facts, found.pop(path, None))
        for path in found:
            self._fault(node, path, "is there and not at home")

    def _sort(self, node: str, here: FileFacts, there: FileFacts | None) -> None:
        """Notes what is to be done about one file of a node, as far as its facts tell."""
        if there is None:
            self._missing.append((node, here.path))
            if not self._job.may_copy:
                self._fault(node, here.path, "is missing")
        elif there.fault:
            self._fault(node, here.path, there.fault)
        elif _key(here) != _key(there):
            self._unsure.append((node, here.path))

    async def compare(self) -> list[_Copy]:
        """Compares by hash what may differ; returns what is to be copied."""
        unsure: dict[str, list[str]] = {}
        for node, path in self._unsure:
            unsure.setdefault(node, []).append(path)
        self._hashes = await self._hash_home(sorted({path for _, path in self._unsure}))
        self._begin_progress("hashing the job's files on {nodes}, {size}", self._unsure)
        copies = [_Copy(node, path) for node, path in self._missing]
        results = await asyncio.gather(
            *(self._compare_node(node, paths) for node, paths in unsure.items())
        )
        return copies + [copy for part in results for copy in part]

    async def _compare_node(self, node: str, paths: Sequence[str]) -> list[_Copy]:
        copies = []
        async for item in self._peer(node).stream(HASH_FILES, HashFiles(list(paths))):
            self._went_on(node, item.path, item.hashed_bytes)
            if item.fault:
                self._fault(node, item.path, item.fault)
            elif item.sha256 and item.sha256 != self._hashes[item.path]:
                if item.is_copy and self._job.may_copy:
                    copies.append(_Copy(node, item.path, replaces=True))
                else:
                    self._fault(node, item.path, self._difference(item))
        return copies

    def _difference(self, item: HashedFile) -> str:
        here = self._home[item.path]
        if item.hashed_bytes != here.nbytes:
            return f"differs: {item.hashed_bytes} bytes, at home {here.nbytes}"
        return f"differs: SHA-256 {item.sha256[:12]}, at home {self._hashes[item.path][:12]}"

    async def _hash_home(self, paths: Sequence[str]) -> dict[str, str]:
        """Returns the SHA-256 of files at home, which home gives to other nodes from then on."""
        home = self._at_home
        self._begin_progress("hashing the job's files, {size}", [(home, path) for path in paths])
        hashes = {}
        async for item in self._peer(home).stream(HASH_FILES, HashFiles(list(paths))):
            if item.fault:
                raise ConfigError(f"it cannot be read: {item.fault}", where=item.path)
            self._went_on(home, item.path, item.hashed_bytes)
            if item.sha256:
                hashes[item.path] = item.sha256
        return hashes

    async def copy(self, copies: Sequence[_Copy]) -> None:
        """Copies files to nodes, to each node one after the other. Faults are noted."""
        if not copies:
            return
        missing = sorted({copy.path for copy in copies} - self._hashes.keys())
        self._hashes |= await self._hash_home(missing)
        number = "1 file" if len(copies) == 1 else f"{len(copies)} files"
        text = f"copying {number} to {{nodes}}, {{size}}"
        self._begin_progress(text, [(copy.node, copy.path) for copy in copies])
        nodes = {copy.node for copy in copies}
        await asyncio.gather(
            *(self._copy_to(node, [copy for copy in copies if copy.node == node]) for node in nodes)
        )

    async def _copy_to(self, node: str, copies: Sequence[_Copy]) -> None:
        for copy in copies:
            log.info("%s is copied to %s", copy.path, self._job.host(node))
            try:
                async for received in self._peer(node).stream(RECEIVE_FILE, self._request(copy)):
                    self._went_on(node, copy.path, received.nbytes)
            except DataError as error:
                why = f": {error.why}" if error.why else ""
                self._fault(node, copy.path, f"{error.what}{why}")

    def _begin_progress(self, text: str, work: Sequence[tuple[str, str]]) -> None:
        """Begins a piece of work on files, whose progress is shown.

        text: what is done; ``{nodes}`` and ``{size}`` stand for where, and for how much.
        work: (node, path) of each file.
        """
        nodes = sorted({self._job.host(node) for node, _ in work})
        self._total_bytes = sum(self._home[path].nbytes for _, path in work)
        self._text = text.format(nodes=", ".join(nodes), size=_size(self._total_bytes))
        self._done_bytes = 0
        self._done_of.clear()

    def _went_on(self, node: str, path: str, nbytes: int) -> None:
        """Shows that so many bytes of one file are done."""
        self._done_bytes += nbytes - self._done_of.get((node, path), 0)
        self._done_of[node, path] = nbytes
        self._show(self._text, min(1.0, self._done_bytes / max(1, self._total_bytes)))

    def _request(self, copy: _Copy) -> ReceiveFile:
        facts = self._home[copy.path]
        return ReceiveFile(
            path=copy.path,
            node=self._at_home,
            sha256=self._hashes[copy.path],
            nbytes=facts.nbytes,
            mode=facts.mode,
            mtime_ns=facts.mtime_ns,
            replaces=copy.replaces,
            is_input=True,
        )


def refusal(faults: Sequence[str], job: JobFiles) -> ConfigError:
    """Returns the error for what was found; all of it is written to the log.

    faults: one line for each file of each node.
    """
    faults = sorted(faults)
    for fault in faults:
        log.error("%s", fault)
    shown = faults[:_SHOWN]
    if len(faults) > _SHOWN:
        shown.append(f"and {len(faults) - _SHOWN} more, all in {job.log}")
    number = "1 file" if len(faults) == 1 else f"{len(faults)} files"
    return ConfigError(
        f"{number} on other machines cannot be used as they are",
        where="launcher.files",
        why="\n".join(shown),
        todo=_IF_COPIED if job.may_copy else _IF_CHECKED,
        faults=faults,
    )


_IF_COPIED = "remove what differs there, or put the same files on a path that every host may write"
_IF_CHECKED = "make them the same there, or set launcher.files=copy for what is missing"


def _key(facts: FileFacts) -> tuple[int, int, int]:
    return facts.nbytes, facts.mtime_ns, facts.inode


def is_below(path: str, root: str) -> bool:
    """Whether a path is ``root``, or below it."""
    return path == root or path.startswith(f"{root.rstrip('/')}/")


def _largest(paths: Sequence[str], files: Sequence[FileFacts]) -> str:
    """Returns the path below which most of the files are."""
    return max(paths, key=lambda root: sum(is_below(facts.path, root) for facts in files))


def _size(nbytes: float) -> str:
    """Returns a number of bytes as a person reads it."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
