"""Makes a role's model before the run, by calling a function of the user in a child process.

The function is ``f(directory: Path, config: dict, progress: Callable[[float, str], None]) -> None``
and saves a model into ``directory``. The result is cached, so that the same specification is made
only once. The child is ``python -m gcore_core.run.make_model``. It reads the specification as one
JSON object from stdin and writes its progress as JSON lines to stdout. Everything that the function
prints goes to the log.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from gcore_core.config.user_functions import load_function
from gcore_core.contract.errors import ConfigError, DataError, GcoreError
from gcore_core.contract.local_files import files_beside
from gcore_core.runtime.files import cache_root

Progress = Callable[[float, str], None]

_COMPLETE = ".complete"
_LIBRARIES = ("torch", "transformers")
_SHOWN_LINES = 3


class _ModelSpec(msgspec.Struct, frozen=True):
    """Tells the child what to make; it comes on stdin.

    path: the user's Python file.
    name: the function in it.
    config: passed to the function.
    directory: where the function saves the model.
    """

    path: str
    name: str
    config: dict[str, Any]
    directory: str


class _Progress(msgspec.Struct, frozen=True):
    """Reports the child's progress, on one line.

    share: how much of the work is done, 0 to 1.
    returned: the function has; this is the last report.
    """

    share: float
    message: str
    returned: bool = False


def make_model(make: Mapping[str, Any], cache_dir: Path, progress: Progress) -> Path:
    """Returns the directory of a model, which is made now unless the cache has it.

    The model is cached by the file's bytes, the name, the config and the versions of torch and
    transformers. Processes that want the same model wait for the first. Raises ConfigError for a
    wrong ``make`` and DataError when the function fails.

    make: the specification {path, name, config}.
    progress: called with the share of the work that is done, 0 to 1, and a line for the reader.
    """
    file, name, config = check_make(make)
    key = _key(file, name, config)
    model_directory = cache_dir / key
    if (model_directory / _COMPLETE).is_file():
        return model_directory
    _make_cache(cache_dir)
    with _locked(cache_dir / f"{key}.lock", progress) as lock:
        if not (model_directory / _COMPLETE).is_file():
            partial = cache_dir / f"{key}.partial"
            # Left by a process that was killed.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                spec = _ModelSpec(path=str(file), name=name, config=config, directory=str(partial))
                _run(spec, cache_dir / f"{key}.log", lock, progress)
                (partial / _COMPLETE).write_bytes(msgspec.json.encode(spec))
                partial.rename(model_directory)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return model_directory


def _make_cache(cache_dir: Path) -> None:
    """Raises ConfigError where models cannot be kept in a directory."""
    reason = ""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = str(error.strerror)
    if not reason and os.access(cache_dir, os.W_OK | os.X_OK):
        return
    raise ConfigError(
        f"the model cannot be kept in {cache_dir}: {reason or 'it cannot be written'}",
        where="model.make",
        todo="set $G_CORE_CACHE to a directory that can be written",
    )


def models_cache() -> Path:
    """Returns where models that jobs make are kept: ``models`` in $G_CORE_CACHE, or the default."""
    return cache_root() / "models"


def find_made(make: Mapping[str, Any], cache_dir: Path) -> Path | None:
    """Returns the directory of a model that was made before; None: it has yet to be made.

    Nothing is made and no lock is taken. Raises ConfigError for a wrong ``make``.
    """
    directory = cache_dir / _key(*check_make(make))
    return directory if (directory / _COMPLETE).is_file() else None


def check_make(make: Mapping[str, Any]) -> tuple[Path, str, dict[str, Any]]:
    """Returns (file, name, config) of a specification. Raises ConfigError when it is wrong."""
    unknown = sorted(set(make) - {"path", "name", "config"})
    if unknown or not (isinstance(make.get("path"), str) and isinstance(make.get("name"), str)):
        raise ConfigError(
            f"unknown keys: {', '.join(unknown)}" if unknown else "needs a path and a name",
            where="model.make",
            todo="example: model: {make: {path: my_model.py, name: teach, config: {seed: 0}}}",
        )
    file = Path(make["path"]).absolute()
    config = make.get("config") or {}
    if not file.is_file():
        raise ConfigError("no such file", where=f"model.make.path: {file}")
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"must be a mapping, is a {type(config).__name__}", where="model.make.config"
        )
    return file, make["name"], dict(config)


def _key(file: Path, name: str, config: dict[str, Any]) -> str:
    """Returns <stem of the file>-<hash of all that the model depends on>.

    Files next to it that it imports are part of that.
    """
    imported = [one.read_bytes().hex() for one in files_beside(file)]
    parts = (
        file.read_bytes().hex(),
        name,
        config,
        {library: _installed_version(library) for library in _LIBRARIES},
        *([imported] if imported else []),
    )
    content = msgspec.json.encode(parts, order="deterministic")
    return f"{file.stem}-{hashlib.blake2b(content, digest_size=12).hexdigest()}"


def _installed_version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


@contextmanager
def _locked(file: Path, progress: Progress) -> Iterator[int]:
    """Holds the lock on a file. The system frees it when its last holder ends, however it ends."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(0.0, "waiting for another process that makes the same model")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _run(spec: _ModelSpec, log: Path, lock: int, progress: Progress) -> None:
    """Runs the function in a child process, which is killed if this call ends early.

    The child has a process group of its own, so that processes that it starts are killed with it.
    It inherits the lock: if this process is killed, nobody else makes the model before the child
    has ended too.
    """
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "gcore_core.run.make_model"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=(lock,),
            process_group=0,
        )
    with child:
        try:
            has_returned = _talk(child, spec, progress)
            code = child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    if code != 0:
        raise _failure(
            spec,
            log,
            f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}",
        )
    if not has_returned:  # else what it has saved by then would be taken for the model
        raise _failure(spec, log, "has ended its process with exit code 0 before it returned")
    if not any(Path(spec.directory).iterdir()):
        raise _failure(spec, log, "saved nothing into the directory that it was given")


def _talk(child: subprocess.Popen[bytes], spec: _ModelSpec, progress: Progress) -> bool:
    """Sends the specification to the child and passes its progress on until it closes stdout.

    Returns whether the function has returned.
    """
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("the child has no pipes")
    try:
        with child.stdin as pipe:
            pipe.write(msgspec.json.encode(spec))
    except BrokenPipeError:  # it ended at once; its exit code and log say why
        return False
    for line in child.stdout:
        report = msgspec.json.decode(line, type=_Progress)
        if report.returned:
            return True
        progress(report.share, report.message)
    return False


def _failure(spec: _ModelSpec, log: Path, what: str) -> DataError:
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return DataError(
        f"making the model: {spec.name} {what}",
        where=spec.path,
        why="\n".join(lines[-_SHOWN_LINES:]),
        todo=f"log: {log}",
        log=str(log),
    )


def main() -> NoReturn:
    """Runs in the child: calls the user's function and reports its progress."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=_ModelSpec)
    # Progress goes to a copy of stdout. Then stdout becomes stderr, which is the log, so that what
    # the function prints does not look like progress.
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def report(told: _Progress) -> None:
        reports.write(msgspec.json.encode(told) + b"\n")

    def progress(share: float, message: str) -> None:
        report(_Progress(share=share, message=message))

    try:
        function = load_function(Path(spec.path), spec.name)
    except GcoreError as error:  # the message is enough; a traceback of our code would not help
        sys.exit(str(error))
    function(Path(spec.directory), spec.config, progress)
    report(_Progress(share=1.0, message="", returned=True))
    sys.exit(0)


if __name__ == "__main__":
    main()
