"""What the processes of environments are confined by.

none      nothing: the environment may do what the run's user may
confine   name spaces of the kernel: no network but a loopback interface of its own, no files but
          the interpreter and the environment's own, and a folder in memory. An agent has the
          endpoint there: the socket that it asks is made inside, and served from outside
docker    a container without a network. The command line was never run with a daemon by the
          project's tests
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gcore_rewards import confine

HERE = Path(__file__).parent
SANDBOXES = ("none", "confine", "docker")
#: Where an interpreter lies, and what it has brought into a process that imports nothing.
_LOOK = """
import json, os, sys, sysconfig
maps = [line.split(maxsplit=5)[5:] for line in open("/proc/self/maps")]
found = [os.path.dirname(one[0].strip()) for one in maps if one and ".so" in one[0]]
found += [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
found += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
print(json.dumps([sys.executable, *found]))
"""
_LOOKS_WITHIN_S = 60.0


class NoSandbox(Exception):
    """A sandbox is not to be had here; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a confined environment may use."""

    files_mib: int = 256
    """Memory for files that it writes."""
    processes: int = 256
    """Processes and threads at a time."""
    open_files: int = 1024


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a process of environments is started.

    words: its command line.
    variables: its environment.
    host: what the host file is told on top of its settings.
    has_door: whether the host hands over a socket on which the endpoint is to be served.
    folder: an empty one that is removed with it; "": none.
    kill: a command that ends what killing the process does not; (): nothing.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str]
    host: Mapping[str, object] = field(default_factory=dict)
    has_door: bool = False
    folder: str = ""
    kill: tuple[str, ...] = ()


def command(
    sandbox: str,
    *,
    python: str = "",
    environment: str = "",
    directory: str = "",
    variables: Mapping[str, str],
    readable: tuple[str, ...] = (),
    image: str = "python:3.11-slim",
    limits: Limits | None = None,
) -> Command:
    """Returns how host.py is started under a sandbox.

    environment: "file.py:Class" or "package.module:Class".
    directory: where modules lie that are not installed.
    readable: absolute paths that the environment reads beside its own code.
    image: of the container.
    Raises NoSandbox.
    """
    words = {"words": str(HERE / "words.py")}
    if sandbox == "none":
        # Not -I, which would leave out PYTHONHASHSEED. What else Python reads is not in variables.
        line = (python or sys.executable, "-s", "-P", str(HERE / "host.py"))
        return Command(words=line, variables=variables, host=words)
    shown = [*own_files(environment, directory), *readable]
    if sandbox == "confine":
        return _confined(python or sys.executable, shown, variables, limits or Limits())
    if sandbox == "docker":
        return _contained(python or "python3", shown, variables, image, limits or Limits())
    raise NoSandbox(f"there is no sandbox {sandbox!r}; take one of: {', '.join(SANDBOXES)}")


def own_files(environment: str, directory: str) -> list[str]:
    """Returns absolute paths of an environment's own code.

    These are the modules and packages in its folder: not the folder itself, in which a run may
    keep its files.
    """
    place = environment.rpartition(":")[0]
    if place.startswith("gcore_environments."):
        return [str(HERE / "adapters")]
    folder = Path(place).absolute().parent if place.endswith(".py") else Path(directory or ".")
    if not place.endswith(".py") and not directory:
        return []
    packages = (file.parent for file in folder.glob("*/__init__.py"))
    return sorted(str(path.absolute()) for path in (*folder.glob("*.py"), *packages))


def problem(sandbox: str, python: str = "") -> str:
    """Says why a sandbox is not to be had on this machine, and what to do; "" where it is.

    A process is started in it to find that out.
    python: the environment's interpreter, whose version is looked at, too; "": this one.
    """
    try:
        if python and sandbox != "docker":  # there it is the image's
            _require_version(python)
        if sandbox == "docker":
            _require_docker()
        elif sandbox != "none":
            made = command(sandbox, python=python, variables={"PATH": os.defpath})
            _try(made)
    except NoSandbox as error:
        return str(error)
    return ""


def _require_version(python: str) -> None:
    """Raises NoSandbox where an interpreter is not there, or is too old for the host file."""
    words = [python, "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=_LOOKS_WITHIN_S, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSandbox(f"the interpreter {python} cannot be started: {error}") from error
    if done.returncode:
        raise NoSandbox(f"the interpreter {python} is not Python 3.11 or later; take one that is")


def _try(made: Command) -> None:
    """Starts the host file with nothing to do. Raises NoSandbox where that fails."""
    try:
        done = subprocess.run(
            made.words,
            input=b"",
            capture_output=True,
            env=dict(made.variables),
            timeout=_LOOKS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSandbox(f"a process cannot be confined here: {error}") from error
    finally:
        if made.folder:
            os.rmdir(made.folder)
    if done.returncode == 0:
        return
    why = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    if done.returncode == confine.FORBIDDEN:
        todo = "run as root, or allow user name spaces (sysctl user.max_user_namespaces)"
    else:
        todo = "see that every user may read the interpreter (chmod -R o+rX), or take another"
    raise NoSandbox(f"a process cannot be confined here: {why or done.returncode}; {todo}")


# -- name spaces -----------------------------------------------------------------------------------


def _confined(
    python: str, shown: list[str], variables: Mapping[str, str], limits: Limits
) -> Command:
    path, *places = _interpreter(python)
    words = str(HERE / "words.py")
    base = tempfile.mkdtemp(prefix="g-core-host-")
    left_out = ("PATH", "HOME", "TMPDIR")
    settings = {
        "confined": True,
        "loopback": True,
        "shows_errors": True,
        "python": path,
        "options": ["-s", "-P", "-B"],
        "environment": {key: value for key, value in variables.items() if key not in left_out},
        "driver": str(HERE / "host.py"),
        "readable": list(dict.fromkeys([path, *places, words, *shown])),
        "base": base,
        "time_s": None,
        "cpu_s": None,
        "memory_mib": None,
        "files_mib": limits.files_mib,
        "processes": limits.processes,
        "open_files": limits.open_files,
    }
    confining = str(Path(confine.__file__).absolute())
    return Command(
        words=(sys.executable, "-I", confining, json.dumps(settings)),
        variables=variables,
        host={"words": words},
        has_door=True,
        folder=base,
    )


def _interpreter(python: str) -> list[str]:
    """Returns the path of an interpreter, and what it consists of. Raises NoSandbox."""
    found = shutil.which(python)
    if found is None:
        raise NoSandbox(f"there is no interpreter {python}")
    path = os.path.abspath(found)
    try:
        done = subprocess.run(
            [path, "-I", "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=_LOOKS_WITHIN_S,
            check=True,
        )
        return [path, *dict.fromkeys(map(os.path.abspath, _places(json.loads(done.stdout))))]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise NoSandbox(
            f"the interpreter {python} does not say what it consists of: {error}"
        ) from error


def _places(said: list[str | None]) -> Iterator[str]:
    yield from (place for place in said if place and place.startswith("/"))


# -- containers ------------------------------------------------------------------------------------


def _contained(
    python: str, shown: list[str], variables: Mapping[str, str], image: str, limits: Limits
) -> Command:
    docker = _docker()
    name = f"g-core-host-{uuid.uuid4().hex}"
    files = [str(HERE / "host.py"), str(HERE / "words.py"), *shown]
    kept = {"LANG", "LC_ALL", "PYTHONHASHSEED", "TZ"}
    words = [
        *(docker, "run", "--rm", "--interactive", "--init", "--name", name),
        *("--network", "none", "--read-only", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--pids-limit", str(limits.processes)),
        *("--ulimit", f"nofile={limits.open_files}"),
        *("--tmpfs", f"/tmp:size={limits.files_mib}m", "--workdir", "/tmp", "--env", "HOME=/tmp"),
    ]
    for file in files:
        words += ["--volume", f"{file}:{file}:ro"]
    for key in sorted(kept & variables.keys()):
        words += ["--env", f"{key}={variables[key]}"]
    words += [image, python, "-s", "-P", str(HERE / "host.py")]
    return Command(
        words=tuple(words),
        variables=variables,
        host={"words": str(HERE / "words.py"), "no_network": True},
        kill=(docker, "kill", name),
    )


def _docker() -> str:
    docker = shutil.which("docker")
    if docker is None:
        raise NoSandbox("there is no docker here; install it, or take sandbox: confine")
    return docker


def _require_docker() -> None:
    """Raises NoSandbox where no daemon answers."""
    try:
        done = subprocess.run(
            [_docker(), "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=_LOOKS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSandbox(f"docker does not answer: {error}") from error
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise NoSandbox(
            f"docker does not answer: {why}; start its daemon, or take sandbox: confine"
        )
