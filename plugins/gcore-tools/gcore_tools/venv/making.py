"""Makes a venv with the venv and the pip of an interpreter, one at a time, and only once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from gcore_core.contract.errors import ConfigError, PluginError
from gcore_core.kits.cache import replacing
from gcore_core.kits.commands import venvs
from gcore_tools.venv.recipe import Recipe

LOG = "g-core-pip.log"
_PROBE = """
import importlib.metadata, json, sys
import gcore_core
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""
_PROBE_TIMEOUT_S = 120.0
_TELL_EVERY_S = 10.0


class Progress(Protocol):
    """Shows the user how far the making of a venv is."""

    def begin(self, step: str) -> None:
        """Is called when a command is started.

        step: the command's name for the user.
        """

    def line(self, text: str) -> None:
        """Is called with each line that the command prints."""


class PlainProgress:
    """Prints a line for each step, and every ten seconds one with pip's latest line."""

    def __init__(self) -> None:
        self._told_s = self._began_s = time.monotonic()

    def begin(self, step: str) -> None:
        self._told_s = self._began_s = time.monotonic()
        print(f"  {step}", flush=True)

    def line(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            print(f"    {now_s - self._began_s:.0f} s: {text[:100]}", flush=True)


class LiveProgress:
    """Shows on a terminal the steps so far, and below them pip's latest line."""

    def __init__(self, console: Any, status: Any) -> None:
        self._console = console
        self._status = status
        self._step = ""

    def begin(self, step: str) -> None:
        self._step = step
        self._console.print(f"  {step}", markup=False, highlight=False)
        self._status.update("")

    def line(self, text: str) -> None:
        from rich.text import Text

        self._status.update(Text(text[: self._console.width - 4], style="dim"))


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Yields the progress for this process's output: live on a terminal, else plain lines."""
    if not sys.stdout.isatty():
        yield PlainProgress()
        return
    from rich.console import Console

    console = Console()
    with console.status("") as status:
        yield LiveProgress(console, status)


@dataclass(frozen=True, kw_only=True)
class ReadyVenv:
    """A venv that is ready.

    directory: where it lies.
    record: what is written in its record file.
    seconds: how long making it took; 0 when it was ready before.
    """

    directory: Path
    record: dict[str, Any]
    seconds: float


def make(recipe: Recipe, directory: Path, *, fresh: bool = False) -> ReadyVenv:
    """Makes the venv, unless it is there with the same digest, and returns it.

    One that is half made is made anew. Waits while another process makes it.

    Raises ConfigError when the directory holds something else, PluginError with pip's words when
    pip fails.

    recipe: what goes into it.
    directory: where it is made.
    fresh: whether to make it anew in any case.
    """
    digest = recipe.digest()
    with _alone(directory) as lock:
        old_record = venvs.record(directory)
        if old_record.get("complete") and old_record.get("digest") == digest and not fresh:
            return ReadyVenv(directory=directory, record=old_record, seconds=0.0)
        start_s = time.monotonic()
        _clear(directory, old_record)
        wish = recipe.wish
        request = {
            "plugin": wish.plugin,
            "flavour": recipe.spec.name,
            "python": wish.python,
            "with": list(wish.extra),
        }
        _write(directory, {**request, "complete": False})
        with progress() as reporter:
            steps = _Steps(directory, reporter, lock)
            steps.run("python -m venv", [wish.python, "-m", "venv", str(directory)])
            python = str(directory / "bin" / "python")
            for step, words in recipe.pip_steps():
                steps.run(step, [python, "-m", "pip", *words])
        record = {
            **request,
            "complete": True,
            "digest": digest,
            "engine": recipe.spec.engine,
            "versions": _verified(recipe, python),
            "bytes": _size(directory),
        }
        _write(directory, record)
        return ReadyVenv(directory=directory, record=record, seconds=time.monotonic() - start_s)


def is_being_made(directory: Path) -> bool:
    """Returns whether a process holds the venv's lock."""
    try:
        with _lock_file(directory).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def probe(python: str | Path, distributions: Sequence[str]) -> dict[str, str | None]:
    """Starts the interpreter, imports the core there, and returns distribution -> version.

    The version is None where the distribution is missing. Raises PluginError with the interpreter's
    last line when it fails, and when it takes more than two minutes.
    """
    command = [str(python), "-I", "-c", _PROBE, *distributions]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"{python} does not run: {error}.") from error
    if process.returncode != 0:
        last = (process.stderr.strip() or f"exit code {process.returncode}").splitlines()[-1]
        raise PluginError(f"{python} cannot import gcore_core: {last}.")
    return dict(json.loads(process.stdout.splitlines()[-1]))


class _Steps:
    """Runs commands, and writes their output into a log.

    The commands hold the lock too, in case this process is killed before they end.

    directory: the venv's, in which the log lies.
    reporter: gets every line that is printed.
    lock: the open file of the venv's lock.
    """

    def __init__(self, directory: Path, reporter: Progress, lock: IO[bytes]) -> None:
        self._log = directory / LOG
        self._directory = directory
        self._reporter = reporter
        self._lock = lock

    def run(self, step: str, command: list[str]) -> None:
        """Runs one command. Raises PluginError with its last lines when it fails.

        step: the command's name for the user.
        """
        self._reporter.begin(step)
        printed = []
        with self._log.open("a", encoding="utf-8") as log:
            print(f"$ {shlex.join(command)}", file=log, flush=True)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_environment(),
                pass_fds=(self._lock.fileno(),),
            )
            with process:
                for line in process.stdout or ():
                    log.write(line)
                    if text := line.strip():
                        printed.append(text)
                        self._reporter.line(text)
        if process.returncode != 0:
            errors = [
                line
                for line in printed
                if line.startswith("ERROR: ") and "Ignored the following" not in line
            ]
            raise PluginError(
                f"`{step}` failed with exit code {process.returncode}.",
                where=str(self._directory),
                why="\n".join(line[:300] for line in (errors or printed)[-3:]),
                todo=f"all of its output: {self._log}",
            )


def _environment() -> dict[str, str]:
    """Returns the environment of venv and pip, without what would lead them out of the venv."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")
    settings = {
        "PIP_USER": "0",
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {name: value for name, value in os.environ.items() if name not in left_out} | settings


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[IO[bytes]]:
    """Holds the venv's lock, which ends with the last process that holds it."""
    file = _lock_file(directory)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("ab")
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}.",
            where=str(file.parent),
            todo="name another place: G_CORE_VENVS=DIR, or --dir DIR",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes {directory}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def _lock_file(directory: Path) -> Path:
    """Returns the path of the venv's lock, which lies beside the venv."""
    return directory.with_name(f".{directory.name}.lock")


def _clear(directory: Path, record: dict[str, Any]) -> None:
    """Empties the directory if it holds a venv that g-core made, or makes it.

    Raises ConfigError when the directory holds something else.
    """
    if not record and directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(
            "holds files that g-core did not write; nothing was done.",
            where=str(directory),
            todo="name another place: --name NAME, or --dir DIR",
        )
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _write(directory: Path, record: dict[str, Any]) -> None:
    """Writes the record by an atomic rename, so that what says "complete" is complete."""
    with replacing(directory / venvs.RECORD) as fresh:
        fresh.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _verified(recipe: Recipe, python: str) -> dict[str, str | None]:
    """Returns the installed versions. Raises PluginError when they are not what was asked for."""
    versions = probe(
        python, [source.distribution for source in recipe.sources] + [recipe.spec.engine]
    )
    wrong = [
        (
            f"{source.distribution} is {versions[source.distribution] or 'missing'} there, "
            f"{source.version} here"
        )
        for source in recipe.sources
        if versions[source.distribution] != source.version
    ]
    if versions[recipe.spec.engine] is None:
        wrong.append(f"the engine, {recipe.spec.engine}, is missing there")
    if wrong:
        raise PluginError(
            "pip installed something else than was asked for.", where=python, why="\n".join(wrong)
        )
    return versions


def _size(directory: Path) -> int:
    """Returns the bytes on disk of all files in a directory; a file with two names counts once."""
    size_of_file = {}
    for folder, _, files in os.walk(directory):
        for name in files:
            status = os.lstat(os.path.join(folder, name))
            size_of_file[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(size_of_file.values())
