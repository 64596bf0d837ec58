"""Sees to it that every node has the files that the job names, before a worker starts.

Each node's agent is asked for what it has (``gcore_core.runtime.process.node_files``):

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
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.launching import Peer, Site
from gcore_core.contract.local_files import files_beside
from gcore_core.contract.run_files import log_path
from gcore_core.run.jobs import Job
from gcore_core.runtime.messages import (
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
#: Values of ``launcher.files``: what is done about files that a node does not have.
COPY = "copy"
CHECK = "check"
#: Sections of the job that name nothing which a worker reads.
_OF_THE_RUN = ("run", "launcher", "cluster", "checkpoint", "observers", "plugins")
#: Observers run beside the supervisor alone, so their code is on no other node.
_AT_HOME = "observers."
#: Keys that name a provider, or an interpreter, which is looked for by itself.
_NO_FILES = ("use", "python", "make")
_SHOWN = 3  # lines of the list that stand in the error; all are in the log
_MOST_FILES = 100_000

#: Is called with a text for a person and a share from 0 to 1.
Show = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Wanted:
    """Says what a node must have.

    paths: files and directories that the job names.
    interpreters: interpreters of roles, which are never copied.
    """

    paths: set[str] = field(default_factory=set)
    interpreters: set[str] = field(default_factory=set)


# -- what a job names ------------------------------------------------------------------------------


def wanted(job: Job, site: Site) -> dict[str, Wanted]:
    """Returns node -> what it must have, for every node with workers.

    What stands below ``roles.X`` is for the nodes of that role's workers, all else for all nodes.
    """
    nodes_of: dict[str, set[str]] = {}
    for process, node in site.where.items():
        nodes_of.setdefault(process.rpartition(".")[0], set()).add(node)
    everywhere = {node for nodes in nodes_of.values() for node in nodes}
    wants = {node: Wanted() for node in sorted(everywhere)}
    for role, path in named_paths(job):
        for node in nodes_of.get(role, everywhere) if role else everywhere:
            wants[node].paths.add(path)
    for role, settings in job.plan.settings.roles.items():
        for node in nodes_of.get(role, ()) if settings.python else ():
            wants[node].interpreters.add(str(settings.python))
    return wants


def named_paths(job: Job) -> Iterator[tuple[str, str]]:
    """Yields (role, path) of each file and directory that the job names and that is there.

    The role is "" for what is not below ``roles``. A value names a path when it has a slash and
    something is there; the files of the project's own code are named, too. Left out are keys that
    end with ``_dir``, which say where something is written, and the run's own directory with those
    above it. With a file of Python come those beside it that it imports.
    """
    config = dict(job.plan.config)
    roles = {
        role: {**node, "model": dict(job.models.get(role) or node.get("model") or {})}
        for role, node in config.pop("roles", {}).items()
    }
    code = [
        provided.spec.factory.rpartition(":")[0]
        for path, provided in job.plan.provided.items()
        if ".py:" in provided.spec.factory and not path.startswith(_AT_HOME)
    ]
    plain = {key: value for key, value in config.items() if key not in _OF_THE_RUN}
    named = [("", value) for value in (*code, *_texts(plain))]
    named += [(role, value) for role, node in roles.items() for value in _texts(node)]
    for role, value in dict.fromkeys(named):
        path = Path(os.path.expanduser(value)).absolute()
        # Not Path's own method: it raises for a text that is longer than a path can be, such as the
        # template of a judge.
        if os.path.exists(path) and not job.directory.absolute().is_relative_to(path):
            yield from ((role, str(file)) for file in (path, *files_beside(path)))


def _texts(tree: Any, key: str = "") -> Iterator[str]:
    """Yields each text of a tree that has a slash, but those of keys that name no input."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name not in _NO_FILES:
                yield from _texts(value, str(name))
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _texts(value, key)
    elif isinstance(tree, str) and "/" in tree and not key.endswith("_dir"):
        yield tree


def code_packages(job: Job) -> list[str]:
    """Returns the packages whose code workers run in the launcher's interpreter."""
    of_own_interpreters = {
        f"roles.{role}" for role, node in job.plan.settings.roles.items() if node.python
    }
    factories = [
        provided.spec.factory
        for path, provided in job.plan.provided.items()
        if path not in of_own_interpreters and not path.startswith(_AT_HOME)
    ]
    modules = [factory.rpartition(":")[0] for factory in factories]
    names = {module.partition(".")[0] for module in modules if not module.endswith(".py")}
    return sorted(names | {"gcore_core"})


# -- comparing and copying -------------------------------------------------------------------------


async def provide(job: Job, site: Site, show: Show) -> None:
    """Compares the files of every node with those at home, and copies what is missing.

    show: is told what is done.
    Raises ConfigError where a node has not what it must have, and may not get it.
    """
    wants = wanted(job, site)
    wants.pop(site.home, None)
    if not wants:
        return
    comparison = _Comparison(job, site, show)
    await comparison.look(wants)
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

    def __init__(self, job: Job, site: Site, show: Show) -> None:
        self._job = job
        self._site = site
        self._show = show
        self._copies_allowed = job.plan.settings.launcher.files == COPY
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
        return self._site.nodes[node].agent

    def _fault(self, node: str, path: str, what: str) -> None:
        self.faults.append(f"{self._job.placed.host(node)}: {path}: {what}")

    def refuse_faults(self) -> None:
        """Raises ConfigError when something stands against the run."""
        if self.faults:
            log_file = log_path(self._job.directory, "supervisor")
            raise refusal(self.faults, self._job.plan.settings.launcher.files, log_file)

    async def look(self, wants: Mapping[str, Wanted]) -> None:
        """Asks home and every node for the facts of their files. Raises ConfigError."""
        self._show("comparing the job's files on every node", None)
        paths = sorted({path for want in wants.values() for path in want.paths})
        home = self._peer(self._site.home)
        packages = HashPackages(code_packages(self._job))
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
        await asyncio.gather(*(self._look_at(node, want, code) for node, want in wants.items()))

    async def _look_at(self, node: str, want: Wanted, code: Mapping[str, str]) -> None:
        """Compares a node with home as far as facts tell, and notes what is missing or unsure.

        code: package -> digest of its code at home.
        """
        paths = sorted(want.paths)
        interpreters = sorted(want.interpreters)
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
            if not self._copies_allowed:
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
                if item.is_copy and self._copies_allowed:
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
        home = self._site.home
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
            log.info("%s is copied to %s", copy.path, self._job.placed.host(node))
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
        nodes = sorted({self._job.placed.host(node) for node, _ in work})
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
            node=self._site.home,
            sha256=self._hashes[copy.path],
            nbytes=facts.nbytes,
            mode=facts.mode,
            mtime_ns=facts.mtime_ns,
            replaces=copy.replaces,
            is_input=True,
        )


def refusal(faults: Sequence[str], mode: str, log_file: Path) -> ConfigError:
    """Returns the error for what was found; all of it is written to the log.

    faults: one line for each file of each node.
    mode: ``launcher.files``.
    log_file: where the log is.
    """
    faults = sorted(faults)
    for fault in faults:
        log.error("%s", fault)
    shown = faults[:_SHOWN]
    if len(faults) > _SHOWN:
        shown.append(f"and {len(faults) - _SHOWN} more, all in {log_file}")
    number = "1 file" if len(faults) == 1 else f"{len(faults)} files"
    return ConfigError(
        f"{number} on other machines cannot be used as they are",
        where="launcher.files",
        why="\n".join(shown),
        todo=_ADVICE[mode],
        faults=faults,
    )


_ADVICE = {
    COPY: "remove what differs there, or put the same files on a path that every host may write",
    CHECK: "make them the same there, or set launcher.files=copy for what is missing",
}


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
