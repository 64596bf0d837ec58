"""Runs ``g-core venv doctor``, which finds what keeps a run from starting, and what mends it."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gcore_core import __version__
from gcore_core.contract.errors import ConfigError, GcoreError, did_you_mean
from gcore_core.kits.commands import (
    SHARED_MEMORY,
    Plugins,
    catalog,
    find_devices,
    open_interpreter,
    venvs,
)
from gcore_tools.venv.listing import Listed, listed, readable
from gcore_tools.venv.making import probe

DRIVER = Path("/proc/driver/nvidia")
#: Slabs of a few workers, and what engines of several processes put there. Containers often have 64
#: MB.
SHARED_MEMORY_BYTES = 1 << 30
OPEN_FILES = 1024
RUN_BYTES = 1 << 30  # a run's final weights, of a small model
VENV_BYTES = 10 << 30  # an engine with torch for CUDA
_SMI_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check; its fields are the keys of the JSON output.

    what: the thing that was checked.
    told: the state in which it is.
    mend: the command that puts it right; empty when nothing is wrong.
    """

    what: str
    told: str
    mend: str = ""


def examine() -> Iterator[Finding]:
    """Checks everything, one thing after the other, and yields each result."""
    all_venvs = listed()
    yield from _this_interpreter()
    for item in all_venvs:
        yield _venv(item)
    yield _driver(all_venvs)
    yield _shared_memory()
    yield _loopback()
    yield _sockets()
    yield _open_files()
    yield _disk(
        "disk for runs", Path.cwd(), RUN_BYTES, "start runs elsewhere: cd DIR, or run.dir=DIR"
    )
    yield _disk("disk for venvs", venvs.root(), VENV_BYTES, "export G_CORE_VENVS=DIR")


def examine_one(name: str) -> Iterator[Finding]:
    """Checks one venv alone. Raises ConfigError where none has this name."""
    named = {item.name: item for item in listed()}
    if name not in named:
        choices = ", ".join(sorted(named)) or "none; g-core venv create PLUGIN makes one"
        raise ConfigError(
            f"no venv is named {name!r}{did_you_mean(name, sorted(named))}.",
            where="g-core venv doctor",
            todo=f"choices: {choices}",
        )
    yield _venv(named[name])


def print_findings(findings: Iterator[Finding], *, as_json: bool) -> int:
    """Prints each finding as it comes; returns the exit code: 2 if something is wrong, else 0."""
    printed = []
    for item in findings:
        printed.append(item)
        if not as_json:
            print(f"{'FAULT' if item.mend else 'ok':<6} {item.what}: {item.told}", flush=True)
            print(end="".join(f"{'':7}{line}\n" for line in item.mend.splitlines()))
    if as_json:
        print(
            json.dumps(
                [dataclasses.asdict(item) | {"ok": not item.mend} for item in printed], indent=2
            )
        )
    return 2 if any(item.mend for item in printed) else 0


# -- interpreters ----------------------------------------------------------------------------------


def _this_interpreter() -> Iterator[Finding]:
    """Checks this interpreter and the plugins that are installed in it."""
    state = f"{sys.executable}, Python {platform.python_version()}, gcore-core {__version__}"
    yield Finding(what="this interpreter", told=state)
    for row in catalog.scan().plugins:
        if row.state in ("clash", "incompatible"):
            mend = f"{sys.executable} -m pip " + (
                "uninstall" if row.state == "clash" else "install -U"
            )
            yield Finding(
                what=f"plugin {row.name}", told=row.reason, mend=f"{mend} {row.distribution}"
            )


def _venv(item: Listed) -> Finding:
    """Checks that a venv is ready, has the versions of its record and meets its plugin's needs."""
    what = f"venv {item.name}"
    if item.state == "being made":
        return Finding(what=what, told=item.state)
    if item.state != "ready":
        return Finding(
            what=what, told=": ".join(filter(None, (item.state, item.reason))), mend=item.remake
        )
    record = item.record
    remake = f"{item.remake} --fresh"
    try:
        versions_there = probe(item.python, list(record["versions"]))
        unmet = open_interpreter(str(item.python), where=what).unmet(_needs(record["plugin"]))
    except GcoreError as error:
        return Finding(what=what, told=error.what, mend=remake)
    wrong = [
        f"{name} is {versions_there[name] or 'missing'}, {version} was installed"
        for name, version in record["versions"].items()
        if versions_there[name] != version
    ]
    wrong += [f"{record['plugin']} needs {need}, found {have or 'none'}" for need, have in unmet]
    if wrong:
        return Finding(what=what, told="; ".join(wrong), mend=remake)
    versions = ", ".join(
        f"{name} {versions_there[name]}" for name in (record["engine"], "gcore-core")
    )
    return Finding(what=what, told=f"{record['flavour']}, {versions}")


def _needs(plugin: str) -> list[str]:
    """Returns the requirements that the plugin's backends have on their interpreter."""
    plugins = Plugins()
    plugins.load(catalog.scan().get(plugin, where=""))
    return [
        need
        for kind in ("generator", "trainer")
        for item in plugins.providers(kind)
        for need in item.spec.needs
    ]


# -- the machine -----------------------------------------------------------------------------------


def _driver(all_venvs: list[Listed]) -> Finding:
    """Checks that the driver of GPUs answers, if there is one or a venv needs one."""
    cuda = [item for item in all_venvs if item.record.get("flavour") == "cuda"]
    devices = find_devices("auto")
    devices_text = f"{len(devices)} {'GPUs' if devices[0].kind == 'cuda' else 'cores'}"
    if not DRIVER.is_dir():
        if not cuda:
            return Finding(
                what="driver", told=f"none is loaded, and nothing needs one; {devices_text}"
            )
        names = ", ".join(item.name for item in cuda)
        mend = "\n".join(f"{item.remake} --cpu" for item in cuda)
        return Finding(what="driver", told=f"none is loaded, but made for CUDA: {names}", mend=mend)
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        words = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            process = subprocess.run(words, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            state = f"nvidia-smi gives no answer within {_SMI_TIMEOUT_S:.0f} s"
            return Finding(what="driver", told=state, mend="sudo systemctl reboot")
        if process.returncode != 0:
            last = (process.stdout + process.stderr).strip().splitlines() or ["nvidia-smi fails"]
            return Finding(what="driver", told=last[-1], mend="sudo modprobe nvidia && nvidia-smi")
        devices_text = (
            f"{devices_text}: {'; '.join(sorted(set(process.stdout.strip().splitlines())))}"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Finding(
        what="driver",
        told=devices_text + (f", CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""),
    )


def _shared_memory() -> Finding:
    """Checks that there is a GiB of shared memory."""
    if not SHARED_MEMORY.is_dir():
        return Finding(
            what="shared memory",
            told=f"there is no {SHARED_MEMORY}; a run uses files in {_temporary()}",
        )
    usage = shutil.disk_usage(SHARED_MEMORY)
    state = f"{readable(usage.free)} of {readable(usage.total)} free in {SHARED_MEMORY}"
    if usage.total < SHARED_MEMORY_BYTES:
        mend = (
            f"sudo mount -o remount,size=8G {SHARED_MEMORY}\nin a container: docker run "
            "--shm-size=8g"
        )
        return Finding(what="shared memory", told=state, mend=mend)
    if usage.free < SHARED_MEMORY_BYTES:
        mend = f"ls -ld {SHARED_MEMORY}/*      what ended processes have left there can be removed"
        return Finding(what="shared memory", told=state, mend=mend)
    return Finding(what="shared memory", told=state)


def _loopback() -> Finding:
    """Checks that 127.0.0.1 takes connections."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 5.0),
        ):
            return Finding(what="loopback", told="127.0.0.1 takes connections")
    except OSError as error:
        return Finding(
            what="loopback",
            told=f"127.0.0.1: {error.strerror or error}",
            mend="sudo ip link set lo up",
        )


def _sockets() -> Finding:
    """Checks that sockets can be made in a directory below the temporary one.

    A run's processes talk through such sockets, whose paths have a limited length.
    """
    what = "sockets"
    state = f"can be made in {_temporary()}"
    try:
        with (
            tempfile.TemporaryDirectory(prefix="g-core-") as directory,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.bind(os.path.join(directory, "supervisor.with.a.long.name"))
    except OSError as error:
        return Finding(
            what=what, told=f"{_temporary()}: {error.strerror or error}", mend="export TMPDIR=/tmp"
        )
    return Finding(what=what, told=state)


def _temporary() -> str:
    """Returns the directory of temporary files."""
    return tempfile.gettempdir()


def _open_files() -> Finding:
    """Checks that a process may open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    state = "no limit" if unlimited else f"a process may open {soft}"
    if unlimited or soft >= OPEN_FILES:
        return Finding(what="open files", told=state)
    raised = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
    mend = f"ulimit -n {OPEN_FILES}" if raised else f"sudo prlimit --pid $$ --nofile={OPEN_FILES}"
    return Finding(what="open files", told=state, mend=mend)


def _disk(what: str, place: Path, least: int, mend: str) -> Finding:
    """Checks that a disk has room.

    what: what the room is for.
    place: a directory on the disk; it need not exist yet.
    least: bytes that must be free.
    mend: how to put it elsewhere.
    """
    # Path.exists would raise for one that may not be looked into.
    existing = next(folder for folder in (place, *place.parents) if os.path.exists(folder))
    free = shutil.disk_usage(existing).free
    state = f"{readable(free)} free in {existing}"
    return (
        Finding(what=what, told=state)
        if free >= least
        else Finding(what=what, told=state, mend=mend)
    )
