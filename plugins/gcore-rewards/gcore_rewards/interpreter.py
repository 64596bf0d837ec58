"""Finds what this interpreter consists of, for a process that is to see nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

#: Where the system's loader looks for libraries beside its own folders.
_LIBRARY_PATH = "LD_LIBRARY_PATH"
#: Prints what the loader has brought into a process that imports nothing.
_MAPPED = "print(open('/proc/self/maps').read())"


@dataclass(frozen=True)
class Interpreter:
    """Holds what it takes to start this interpreter.

    path: of its program, absolute; links in it are kept: they say which environment is meant.
    places: absolute paths of what it reads, the program among them.
    environment: variables without which it does not find its libraries.
    """

    path: str
    places: tuple[str, ...]
    environment: dict[str, str]


def this_interpreter() -> Interpreter:
    """Returns the interpreter of this process. Raises OSError where it cannot be started."""
    path = os.path.abspath(sys.executable)
    environment = library_path()
    places = [
        path,
        *(sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *_library_folders(path, environment),
    ]
    return Interpreter(path, tuple(dict.fromkeys(map(os.path.abspath, places))), environment)


def library_path() -> dict[str, str]:
    """Returns the variable that leads to libraries of an interpreter, where it is set."""
    folders = [folder for folder in os.environ.get(_LIBRARY_PATH, "").split(":") if folder]
    return {_LIBRARY_PATH: ":".join(map(os.path.abspath, folders))} if folders else {}


def _library_folders(path: str, environment: dict[str, str]) -> Iterator[str]:
    """Yields the folders of the libraries that an interpreter has when it has just started."""
    words = [path, "-I", "-S", "-c", _MAPPED]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    for line in done.stdout.splitlines():
        place = line.split(maxsplit=5)[5:]
        if place and ".so" in os.path.basename(place[0]):
            yield os.path.dirname(place[0])
