"""Writes what a run runs on, so that two runs that part can be traced to a cause.

It is one line of ``environment.jsonl`` for each start of a run: versions, machine, and digests of
the files that the job names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from packaging.requirements import Requirement

from gcore_core.config.interpreters import Interpreter, open_interpreter
from gcore_core.config.plan import Plan
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.local_files import files_beside
from gcore_core.contract.run_files import ENVIRONMENT, Environment, read_environment
from gcore_core.run.directory import ends_with_newline

log = logging.getLogger(__name__)
#: Variables by which libraries of numbers choose threads and kernels.
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
_PIECE_BYTES = 1 << 20
_WHOLE_BYTES = 1 << 30  # of a larger file, only so much from its beginning is hashed, and its size


def write(run_dir: Path, plan: Plan, step: int) -> None:
    """Appends a line for a start of the run; a disk that is full is logged and ends nothing.

    step: how many steps are finished.
    """
    line = Environment(
        step=step, versions=versions(plan), machine=machine(), files=file_digests(plan.config)
    )
    path = run_dir / ENVIRONMENT
    try:
        # A killed run may have left half a line, and this one must not stick to it.
        torn = path.exists() and not ends_with_newline(path)
        with path.open("ab") as file:
            file.write(b"\n" * torn + msgspec.json.encode(line, order="sorted") + b"\n")
    except OSError as error:
        log.error("%s cannot be written: %s", path, error.strerror)


def changed_files(run_dir: Path, plan: Plan, step: int) -> list[str]:
    """Returns the keys of files that are not what they were when the run was last started.

    step: how many steps are finished.
    """
    before = read_environment(run_dir, step)
    if before is None:
        return []
    files = file_digests(plan.config)
    return sorted(key for key, digest in before.files.items() if files.get(key) != digest)


# -- versions --------------------------------------------------------------------------------------


def versions(plan: Plan) -> dict[str, str]:
    """Returns the versions of Python, the plugins that are used, and what these require.

    Of a role with an interpreter of its own: what its engine needs, as "role/distribution".
    """
    known = {"python": platform.python_version()}
    for distribution in ("gcore-core", *(item["distribution"] for item in plan.lock)):
        for name in (distribution, *_required(distribution)):
            if found := _version(name):
                known[name] = found
    for role, node in plan.settings.roles.items():
        if node.python:
            where = f"roles.{role}"
            with contextlib.suppress(ConfigError):  # gone since: starting its worker will tell
                interpreter = open_interpreter(node.python, where=f"{where}.python")
                known |= _engine_versions(role, interpreter, plan.provided[where].spec)
    return known


def _engine_versions(role: str, interpreter: Interpreter, spec: Any) -> dict[str, str]:
    names = [Requirement(need).name for need in getattr(spec, "needs", ())]
    found = {name: interpreter.version(name) for name in names}
    return {f"{role}/{name}": value for name, value in found.items() if value}


def _required(distribution: str) -> Iterator[str]:
    try:
        needs = requires(distribution) or []
    except PackageNotFoundError:
        return
    for requirement in map(Requirement, needs):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


# -- machine ---------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """Returns the processor, the cores of this process, accelerators, and some variables."""
    facts = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "accelerators": ", ".join(_accelerators()),
    }
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return facts | variables


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _accelerators() -> Iterator[str]:
    """Yields the name of each NVIDIA device, as its driver tells it."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text("utf-8", "replace").splitlines():
            if line.startswith("Model:"):
                yield line.partition(":")[2].strip()


# -- files -----------------------------------------------------------------------------------------


def file_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of each file that the configuration names, by the name of its key.

    A value names a file when it has a slash and a file is there. A digest does not depend on the
    path: the same file under another path is the same, and a changed one is not. Files beside one
    of Python that it imports have its key and their own path from there.
    """
    digests = {}
    for key, value in flat(config):
        # Not Path's own method: it raises for a text that is longer than a path can be, such as the
        # template of a judge.
        if isinstance(value, str) and "/" in value and os.path.isfile(value):
            try:
                digests[key] = _digest(Path(value))
                for file in files_beside(Path(value)):
                    digests[f"{key}/{os.path.relpath(file, Path(value).parent)}"] = _digest(file)
            except OSError as error:
                log.warning("%s cannot be read: %s", value, error.strerror)
    return digests


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each leaf of a tree of mappings; lists are leaves."""
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from flat(value, f"{prefix}.{name}" if prefix else str(name))


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_64(str(file.stat().st_size).encode())
    left = _WHOLE_BYTES
    with file.open("rb") as stream:
        while left > 0 and (piece := stream.read(min(_PIECE_BYTES, left))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()
