"""Knows the files that a job names by their content, from the start of the run on.

A process that takes a killed one's place, and a run that goes on, open what is on the disk by then.
They compare it with what the run began with.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.local_files import files_beside

log = logging.getLogger(__name__)
#: Keys whose value may name a directory that is read. A reward may write into what it names.
_DIRECTORY = re.compile(r"(data|evaluation\.data|roles)\.(.*[._])?path(\.\d+)?")
_WHOLE_BYTES = 1 << 30
_PIECE_BYTES = 1 << 20
_SAMPLES = 4096
_SAMPLE_BYTES = 4096


class NamedFile(msgspec.Struct, frozen=True):
    """A file or a directory that a job names; ``digest`` is that of its content, ``digest_of``."""

    path: str
    digest: str


def named_files(config: Mapping[str, Any], run_dir: Path) -> dict[str, NamedFile]:
    """Returns what the configuration names and is there, by the name of its key.

    A value names something when it has a slash and is the path of a file, or, for paths of models
    and rows, of a directory; one above the run's own is left out, since the run changes it. Files
    next to one of Python that it imports have its key and their own path from there.
    """
    files = {}
    digests: dict[Path, str] = {}
    for key, value in texts(config):
        for name, path in _paths(key, value):
            if run_dir.absolute().is_relative_to(path):
                continue
            try:
                digests[path] = digests.get(path) or digest_of(path)
            except OSError as error:
                log.warning("%s cannot be read: %s", path, error.strerror)
                continue
            files[name] = NamedFile(path=str(path), digest=digests[path])
    return files


def refuse_changed(files: Mapping[str, NamedFile]) -> None:
    """Raises ConfigError for the first file that is another one than when the run began.

    A process calls it before it opens them. What is missing fails when it is opened.
    """
    for key, file in files.items():
        if os.path.exists(file.path) and digest_of(Path(file.path)) != file.digest:
            raise ConfigError(
                f"{file.path} was changed while the run goes on.",
                where=key,
                why="a process that starts now would go on with other content than the others",
                todo="put it back as it was when the run began, then: g-core resume RUN",
            )


def texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, text) of each text with a slash; an item of a list has its number."""
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, str) and "/" in tree:
        yield key, tree


def digest_of(path: Path) -> str:
    """Returns a digest of the content of a file, or of all files in a directory.

    A copy has the same digest: it depends on neither the path nor times. Files are read in the
    order of their sizes, the smallest first, so that settings and tokenizers are read whole.

    The first GiB: every byte is read.
    Behind it: 4096 pieces of 4 KiB are read, evenly spread. Of 100 GiB that is one in 25 MiB.
    What is seen: weights that were trained, merged or converted, since they differ everywhere.
    What may not be seen: a few numbers behind the first GiB that somebody changed by hand.
    Left out: hidden files, and what Python compiles.
    """
    digest = xxhash.xxh3_64()
    files = sorted((file.stat().st_size, name, file) for name, file in _files(path))
    behind = sum(size for size, _, _ in files) - _WHOLE_BYTES
    stride = max(_SAMPLE_BYTES, behind // _SAMPLES)
    begin = 0  # of this file, where all files lie one behind the other
    for size, name, file in files:
        digest.update((f"{name}/{size}" if name else str(size)).encode())
        whole = min(size, max(0, _WHOLE_BYTES - begin))
        # Samples stand at the multiples of the stride behind the first GiB, whatever file has them.
        read_behind = begin + whole - _WHOLE_BYTES
        first = whole + -read_behind % stride
        with file.open("rb") as stream:
            left = whole
            while left > 0 and (piece := stream.read(min(_PIECE_BYTES, left))):
                digest.update(piece)
                left -= len(piece)
            for offset in range(first, size, stride):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
        begin += size
    return digest.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yields (path relative to the directory, file); ("", path) of a file."""
    if path.is_file():
        yield "", path
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield str(file.relative_to(path)), file


def _paths(key: str, value: str) -> Iterator[tuple[str, Path]]:
    """Yields (key, path) of what a value names, and of the files next to one of Python."""
    path = Path(value).absolute()
    # Not Path's own methods: they raise for a text that is longer than a path can be, such as the
    # template of a judge.
    if os.path.isfile(value) or (_DIRECTORY.fullmatch(key) and os.path.isdir(value)):
        yield key, path
        for file in files_beside(path):
            yield f"{key}/{os.path.relpath(file, path.parent)}", file
