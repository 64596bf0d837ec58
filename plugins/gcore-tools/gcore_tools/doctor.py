"""The plugin ``doctor``: ``g-core doctor`` looks at what this machine and this Python have, and
says what to fix.

It looks at no job (``g-core check`` does) and at no venv (``g-core venv doctor`` does). It imports
the light root of every plugin, no engine, and starts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_core import __version__, hookimpl
from gcore_core.contract.providers import CommandProvider

if TYPE_CHECKING:
    from gcore_core.kits.commands import Plugins

SUMMARY = "look at this machine and the installed plugins, and say what to fix"

OK = "ok"
NOTE = "note"
PROBLEM = "problem"

_GIB = 1 << 30
#: Each worker has sockets to most others, and maps the slabs of the store.
_LEAST_FILES = 4096
#: A slab of a small run is some hundred MiB; containers come with 64 MiB in all.
_LEAST_SHARED_GIB = 1.0
_LEAST_CACHE_GIB = 5.0
#: The name of a unix socket ends at 108 bytes, of which a run needs about forty.
_LONGEST_TEMPORARY = 60


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Says one thing about this machine.

    about: what was looked at.
    state: ``OK``, ``NOTE`` for what only some jobs need, or ``PROBLEM``.
    what: what is there.
    todo: what to do; "" where nothing is.
    """

    about: str
    state: str
    what: str
    todo: str = ""


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary=SUMMARY, factory="gcore_tools.doctor:run", parser="gcore_tools.doctor:make_parser"
    )


def make_parser() -> argparse.ArgumentParser:
    from gcore_core.kits.commands import command_parser

    parser = command_parser("doctor", SUMMARY)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = (
        "examples:\n  g-core doctor\n  g-core doctor --json\n"
        "  g-core check job.yaml      looks at a job\n"
        "  g-core venv doctor         looks at the venvs of engines\n\n"
        "exit code 0: nothing is wrong, 1: something is"
    )
    return parser


def run(words: Sequence[str]) -> int:
    """Prints what it finds, and returns the exit code."""
    args = make_parser().parse_args(words)
    findings = list(look())
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.state:<8} {finding.about}: {finding.what}")
            for line in finding.todo.splitlines():
                print(f"{'':<8} {line}")
    return int(any(finding.state == PROBLEM for finding in findings))


def look() -> Iterator[Finding]:
    """Yields all findings, what every job needs first."""
    from gcore_core.kits.cache import DEFAULT, VARIABLE

    yield Finding(
        about="versions",
        state=OK,
        what=f"gcore-core {__version__}, Python {platform.python_version()} ({sys.executable})",
    )
    yield _devices()
    yield shared_memory()
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield sockets(tempfile.gettempdir())
    yield cache("cache of G-Core", VARIABLE, DEFAULT)
    yield cache("cache of the hub", "HF_HOME", Path("~/.cache/huggingface"))
    yield from _plugins()


# -- the machine -----------------------------------------------------------------------------------


def _devices() -> Finding:
    from gcore_core.kits.commands import find_devices

    devices = find_devices("auto")
    kinds = {device.kind for device in devices}
    what = f"{len(devices)} of kind {', '.join(sorted(kinds)) or 'none'}"
    has_gpu_files = any(Path("/dev").glob("nvidia[0-9]*"))
    if "cuda" not in kinds and has_gpu_files:
        todo = "there are devices of NVIDIA: is CUDA_VISIBLE_DEVICES empty? does nvidia-smi work?"
        return Finding(about="devices", state=PROBLEM, what=what, todo=todo)
    state = OK if devices else PROBLEM
    return Finding(about="devices", state=state, what=what)


def shared_memory() -> Finding:
    """Looks at the memory that processes of one machine share records and weights in."""
    from gcore_core.kits.commands import SHARED_MEMORY

    about = f"shared memory, {SHARED_MEMORY}"
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        todo = f"mount it: sudo mount -t tmpfs tmpfs {SHARED_MEMORY}"
        return Finding(about=about, state=PROBLEM, what=str(error.strerror), todo=todo)
    what = f"{usage.free / _GIB:.1f} GiB of {usage.total / _GIB:.1f} GiB are free"
    if usage.total < _LEAST_SHARED_GIB * _GIB:
        todo = f"sudo mount -o remount,size=8G {SHARED_MEMORY}\nin a container: --shm-size=8g"
        return Finding(about=about, state=PROBLEM, what=what, todo=todo)
    if usage.free < _LEAST_SHARED_GIB * _GIB:
        todo = f"ls -l {SHARED_MEMORY}      remove what ended runs have left"
        return Finding(about=about, state=PROBLEM, what=what, todo=todo)
    return Finding(about=about, state=OK, what=what)


def open_files(soft: int) -> Finding:
    """Judges the number of files that a process may open."""
    about = "open files"
    if soft == resource.RLIM_INFINITY:
        return Finding(about=about, state=OK, what="as many as one likes")
    what = f"{soft} a process"
    if soft < _LEAST_FILES:
        todo = "ulimit -n 65536      in the shell that starts the run; large runs need it"
        return Finding(about=about, state=NOTE, what=what, todo=todo)
    return Finding(about=about, state=OK, what=what)


def sockets(directory: str) -> Finding:
    """Judges the directory for temporary files, in which a run makes its sockets."""
    about = "directory of sockets"
    if len(os.fsencode(directory)) > _LONGEST_TEMPORARY:
        todo = "set launcher.config.socket_dir, or TMPDIR, to a short path such as /tmp"
        return Finding(about=about, state=PROBLEM, what=f"{directory} is too long", todo=todo)
    return Finding(about=about, state=OK, what=directory)


def cache(about: str, variable: str, default: Path) -> Finding:
    """Looks at a directory that grows: whether it can be written, and how much fits into it."""
    place = Path(os.environ.get(variable) or default).expanduser()
    # Path.exists would raise for one that may not be looked into, which is what is looked for.
    present = next(path for path in (place, *place.parents) if os.path.exists(path))
    if not os.access(present, os.W_OK):
        what = f"{place} cannot be written"
        todo = f"set {variable} to a directory that can"
        return Finding(about=about, state=PROBLEM, what=what, todo=todo)
    free_gib = shutil.disk_usage(present).free / _GIB
    what = f"{place}, {free_gib:.0f} GiB are free"
    if free_gib < _LEAST_CACHE_GIB:
        todo = f"free some space, or set {variable} to another disk"
        return Finding(about=about, state=NOTE, what=what, todo=todo)
    return Finding(about=about, state=OK, what=what)


# -- plugins and engines ---------------------------------------------------------------------------


def _plugins() -> Iterator[Finding]:
    """Yields a finding for each plugin that cannot be used, and for engines that lack something."""
    from gcore_core.contract.errors import GcoreError
    from gcore_core.kits.commands import Plugins, catalog, leftovers, uninstall_command

    old = leftovers()
    if old:
        yield Finding(
            about="distributions of 0.2",
            state=PROBLEM,
            what=f"{', '.join(old)}: 0.3 no longer has them",
            todo=uninstall_command(old),
        )
    installed = catalog.scan()
    plugins = Plugins()
    good = []
    of_old = {plugin.name for plugin in installed.plugins if plugin.distribution in old}
    for name in installed.names():
        if name in of_old:
            continue
        try:
            plugins.load(installed.get(name, where="plugins"))
            good.append(name)
        except GcoreError as error:
            todo = f"{error.todo}\ng-core plugins check {name}".strip()
            yield Finding(about=f"plugin {name}", state=PROBLEM, what=error.what, todo=todo)
    yield Finding(about="plugins", state=OK, what=", ".join(good))
    yield from _engines(plugins)


def _engines(plugins: Plugins) -> Iterator[Finding]:
    """Yields a note for each plugin whose engine this Python does not have.

    It may be in a venv of its own, so it is never a problem here.
    """
    from gcore_core.kits.commands import open_interpreter

    here = open_interpreter(sys.executable, where="")
    has_venv = {item.plugin for item in plugins.providers("venv")}
    for plugin in plugins.loaded:
        needs = {need for item in plugins.provided_by(plugin.name) for need in item.spec.needs}
        missing = [f"{need} (has {have or 'none'})" for need, have in here.unmet(sorted(needs))]
        if not missing:
            continue
        names = [need for need, _ in here.unmet(sorted(needs))]
        todo = shlex.join([sys.executable, "-m", "pip", "install", *names])
        if plugin.name in has_venv:
            todo = f"g-core venv create {plugin.name}      a venv of its own; or here: {todo}"
        yield Finding(
            about=f"engine of {plugin.name}",
            state=NOTE,
            what=f"needs {', '.join(missing)}",
            todo=todo,
        )
