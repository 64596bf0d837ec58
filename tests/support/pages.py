"""Follows a page of the documentation literally: writes its files, runs its commands, compares what
they print.

A page is followed from top to bottom:

    `path`:  and a block below it    the file is written; a ``diff`` block changes it, its old lines standing there once
    ```console                       every line ``$ command`` is run in one shell; the lines after it are its output

``python -m tests.support.pages PAGE...`` follows pages, one after the other, in a fresh directory
and writes the outputs that came into them.
"""  # noqa: E501

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:^`([\w./-]+)`:\n\n)?^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
_END = "the end of this output"

#: What may differ between the page and a run, by name: (pattern, what stands for it).
RULES = {
    "colours": (r"\x1b\[[0-9;]*m", ""),
    "pip's own remarks": (r"^(WARNING|\[notice\]|DEPRECATION).*\n", ""),
    "minor version of Python": (r"\bpython3\.\d+", "python3"),
    "seconds": (r"\d+\.\d+ ?s\b", "0.0s"),
    "time left": (r"\bleft \d+:\d\d\b", "left 0:00"),
    "speed": (r"(actions/s) [\d,]+", r"\1 0"),
    "rounding of log-probs": (r"\b(gap) \d\.\de-(0[7-9]|[1-9]\d)", r"\1 0.0e+00"),
    "workers that are still starting": (r"^waiting for .*\n", ""),
    "how many tests the kit has": (r"\b\d+ (passed|not claimed)", r"N \1"),
    # An environment without pip does not know where its distributions came from.
    "what pip is told to install": (r"(-m pip install) .*", r"\1 ..."),
    "dots of tests": (r"^[.nFE]+ +\[ *\d+%\]\n", ""),
}


@dataclass(frozen=True)
class Block:
    """``file`` is what the line above the block names, if any."""

    file: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    line: str
    shown: str
    printed: str


def blocks(page: str) -> Iterator[Block]:
    for match in BLOCK.finditer(page):
        yield Block(match[1] or "", match[2], match[3])


def apply(block: Block, directory: Path) -> None:
    """Writes or changes the file that a block shows."""
    file = directory / block.file
    file.parent.mkdir(parents=True, exist_ok=True)
    if block.language != "diff":
        file.write_text(block.text, encoding="utf-8")
        return
    lines = block.text.splitlines(keepends=True)
    old, new = (
        "".join(line[1:] or "\n" for line in lines if line[0] in signs) for signs in (" -", " +")
    )
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, (
        f"{block.file} holds the old lines {text.count(old)} times, not once:\n{old}"
    )
    file.write_text(text.replace(old, new), encoding="utf-8")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, output) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        line, _, output = part.partition("\n")
        yield line, output


class Shell:
    """One bash for a whole page, so that ``cd`` and an activated environment stay."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> str:
        """What the command prints on both streams."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{{ {command}\n}} </dev/null; echo '{_END}'\n")
        self._process.stdin.flush()
        printed = ""
        for line in self._process.stdout:
            if line.endswith(f"{_END}\n"):
                return printed + line.removesuffix(f"{_END}\n")
            printed += line
        raise AssertionError(f"the shell ended in {command!r}: {printed}")

    def close(self) -> None:
        self._process.communicate(timeout=60)


def follow(
    page: str,
    directory: Path,
    environment: Mapping[str, str],
    instead: Callable[[str], bool] = lambda line: False,
) -> list[Command]:
    """Does what the page says; ``instead`` may do a command's work itself and say so.

    Files are written where the shell is. Real paths in outputs are those that the page shows: /code
    for ``directory``.
    """
    found, shell = [], Shell(directory, environment)
    try:
        for block in blocks(page):
            if block.file:
                apply(block, Path(shell.run("pwd").strip()))
            for line, shown in commands(block.text) if block.language == "console" else ():
                printed = "" if instead(line) else shell.run(line)
                found.append(Command(line, shown, printed.replace(str(directory), "/code")))
    finally:
        shell.close()
    return found


def same(text: str) -> str:
    """The text without what may differ, see ``RULES``."""
    for pattern, stands in RULES.values():
        text = re.sub(pattern, stands, text, flags=re.M)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def copy_core(directory: Path) -> None:
    """A checkout with what pip needs of the core and the test kit: an install from the real one
    would leave build files there.
    """
    copy_project(REPOSITORY, directory)
    copy_project(REPOSITORY / "plugins/gcore-testing", directory / "plugins/gcore-testing")


def copy_project(project: Path, to: Path) -> None:
    """Copies what pip needs of one distribution."""
    to.mkdir(parents=True)
    for package in project.glob("gcore_*/__init__.py"):
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package.parent, to / package.parent.name, ignore=without)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (project / name).exists():
            shutil.copy(project / name, to)


def shell_environment() -> dict[str, str]:
    """This interpreter's python3 first; nothing of how the tests were started reaches the page's
    commands.
    """
    inner = ("PYTHON", "PYTEST", "COVERAGE", "G_CORE", "VIRTUAL_ENV", "TOX")
    on_ci = ("CI", "BUILD_NUMBER")  # with one of them set, pytest shortens no line
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(inner) and name not in on_ci
    }
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # Bytecode is told by size and second, and a page's edits come faster than a person's.
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def with_outputs(page: str, printed: Iterator[Command]) -> str:
    """The page with the outputs that came."""

    def filled(block: re.Match[str]) -> str:
        if block[2] != "console":
            return block[0]
        told = "".join(f"$ {line}\n{_shown(next(printed))}" for line, _ in commands(block[3]))
        return f"```console\n{told}```"

    return BLOCK.sub(filled, page)


def _shown(command: Command) -> str:
    """The old output where it still is right; else the new one, without what is not the
    program's.
    """
    if same(command.printed) == same(command.shown):
        return command.shown
    text = command.printed
    for name in ("colours", "pip's own remarks", "workers that are still starting"):
        text = re.sub(*RULES[name], text, flags=re.M)
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        copy_core(Path(folder) / "g-core")
        texts = {Path(name): Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]}
        came = iter(follow("".join(texts.values()), Path(folder), shell_environment()))
        for file, text in texts.items():
            file.write_text(with_outputs(text, came), encoding="utf-8")
