"""Calls the functions of looks in a helper process, whose interpreter need not have this package.

It reads one ``Request`` as JSON from stdin, and appends one line to the file of results before each
look and one after it. So the process that asked knows of a look that ended this one. Standard
output and error are the caller's log: what a function prints changes no result.
"""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import GcoreError
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.looking import Fact, Note

_LIBRARIES = ("site-packages", "dist-packages")


class LookRequest(msgspec.Struct, frozen=True):
    """One look; see ``gcore_core.contract.looking``."""

    function: str
    arguments: dict[str, Any]


class Request(msgspec.Struct, frozen=True):
    """What the helper process is to do.

    results: the file that it appends to.
    """

    results: str
    looks: list[LookRequest]


class FileState(msgspec.Struct, frozen=True):
    """What is compared to see whether a file has changed; all 0 where there is none."""

    path: str
    size: int = 0
    mtime_ns: int = 0
    inode: int = 0


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the results.

    look: its number in the request.
    problems: what was found; None: the look begins.
    notes: what is said besides.
    facts: what was counted.
    imported: the Python files outside of libraries that the process has imported by then.
    """

    look: int
    problems: list[str] | None = None
    notes: list[str] = []
    facts: dict[str, int] = {}
    imported: list[FileState] = []


def state_of(path: str) -> FileState:
    try:
        stat = os.stat(path)
    except OSError:
        return FileState(path)
    return FileState(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


def add_facts(facts: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds facts; of two with one name the larger stays."""
    for name, value in more.items():
        facts[name] = max(value, facts.get(name, 0))


def _said(look: LookRequest) -> tuple[list[str], list[str], dict[str, int]]:
    """Calls the function of one look; returns its problems, notes and facts. What it raises is one
    more problem.
    """
    problems: list[str] = []
    notes: list[str] = []
    facts: dict[str, int] = {}
    try:
        for said in import_attribute(look.function)(look.arguments) or ():
            if isinstance(said, Fact):
                add_facts(facts, {said.name: int(said.value)})
            else:
                (notes if isinstance(said, Note) else problems).append(str(said))
    except GcoreError as error:
        problems.append(f"{error.sentence()}.")
    except BaseException as error:  # isolation point: code of a plugin, and perhaps of a user
        problems.append(f"{look.function} raised {type(error).__name__}: {error}")
    return list(map(_on_one_line, problems)), list(map(_on_one_line, notes)), facts


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _imported() -> Iterator[FileState]:
    """Yields the files of modules that belong to no installed library: of users, and of
    plugins that are installed editable.
    """
    paths = sysconfig.get_paths()
    libraries = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    libraries += [site.getusersitepackages()]
    libraries += [folder for folder in sys.path if Path(folder).name in _LIBRARIES]
    beginnings = tuple(f"{folder}/" for folder in libraries)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith(beginnings):
            yield state_of(file)


def main() -> None:
    # By json, which also has words for NaN and for text that is no valid Unicode.
    request = msgspec.convert(json.load(sys.stdin), Request)
    with open(request.results, "ab", buffering=0) as results:

        def write(line: Line) -> None:
            results.write(msgspec.json.encode(line) + b"\n")

        for number, look in enumerate(request.looks):
            write(Line(number))
            problems, notes, facts = _said(look)
            write(Line(number, problems, notes, facts, list(_imported())))
    os._exit(0)  # what a function has left behind, such as threads, is not waited for


if __name__ == "__main__":
    main()
