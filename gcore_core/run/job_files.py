"""Says which files a job names, so that every machine has them before a worker starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.contract.local_files import files_beside
from gcore_core.contract.run_files import log_path
from gcore_core.contract.site_files import JobFiles
from gcore_core.run.jobs import Job

#: The value of ``launcher.files`` by which what a node does not have is copied there.
COPY = "copy"
#: Sections of the job that name nothing which a worker reads.
_OF_THE_RUN = ("run", "launcher", "cluster", "checkpoint", "observers", "plugins")
#: Observers run beside the supervisor alone, so their code is on no other node.
_AT_HOME = "observers."
#: Keys that name a provider, or an interpreter, which is looked for by itself.
_NO_FILES = ("use", "python", "make")


def job_files(job: Job, where: Mapping[str, str]) -> JobFiles:
    """Returns what every node with workers must have.

    What stands below ``roles.X`` is for the nodes of that role's workers, all else for all nodes.

    where: process -> its node.
    """
    nodes_of: dict[str, set[str]] = {}
    for process, node in where.items():
        nodes_of.setdefault(process.rpartition(".")[0], set()).add(node)
    everywhere = sorted({node for nodes in nodes_of.values() for node in nodes})
    paths: dict[str, set[str]] = {node: set() for node in everywhere}
    for role, path in named_paths(job):
        for node in nodes_of.get(role, everywhere) if role else everywhere:
            paths[node].add(path)
    interpreters: dict[str, set[str]] = {node: set() for node in everywhere}
    for role, settings in job.plan.settings.roles.items():
        for node in nodes_of.get(role, ()) if settings.python else ():
            interpreters[node].add(str(settings.python))
    return JobFiles(
        paths={node: frozenset(found) for node, found in paths.items()},
        interpreters={node: frozenset(found) for node, found in interpreters.items()},
        packages=code_packages(job),
        may_copy=job.plan.settings.launcher.files == COPY,
        host=job.placed.host,
        log=log_path(job.directory, "supervisor"),
    )


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
