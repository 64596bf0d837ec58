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
from packaging.requirements import Requirement

from gcore_core.config.interpreters import Interpreter, open_interpreter
from gcore_core.config.plan import Plan
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.run_files import ENVIRONMENT, Environment, read_environment
from gcore_core.runtime.journal import Journal
from gcore_core.runtime.named_files import NamedFile

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


def write(run_dir: Path, plan: Plan, step: int, files: Mapping[str, NamedFile]) -> None:
    """Appends a line for a start of the run; a disk that is full is logged and ends nothing.

    step: how many steps are finished.
    files: those that the job names.
    """
    line = Environment(
        step=step,
        versions=versions(plan),
        machine=machine(),
        files={key: file.digest for key, file in files.items()},
    )
    Journal(run_dir / ENVIRONMENT).append([msgspec.Raw(msgspec.json.encode(line, order="sorted"))])


def changed_files(run_dir: Path, step: int, files: Mapping[str, NamedFile]) -> list[str]:
    """Returns the keys of files that are not what they were when the run was last started.

    step: how many steps are finished.
    files: those that the job names now.
    """
    before = read_environment(run_dir, step)
    if before is None:
        return []
    return sorted(
        key
        for key, digest in before.files.items()
        if key not in files or files[key].digest != digest
    )


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
            # Gone since: starting its worker will tell.
            with contextlib.suppress(ConfigError):
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
        "accelerators": ", ".join(_nvidia_devices()),
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


def _nvidia_devices() -> Iterator[str]:
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text("utf-8", "replace").splitlines():
            if line.startswith("Model:"):
                yield line.partition(":")[2].strip()
