"""Answers for the files of one node: lists and hashes them, fetches others, tells what has grown.

It is a part of the node agent. The supervisor asks it before workers start, so that each node has
the files that the job names, and while they run, so that what they write comes home
(``provide_files``, ``joined_disks``).

A file that was hashed here is given to the agents of other nodes, which ask for it by its hash. It
goes the way that content of the store goes, see ``bulk``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from gcore_core.contract.errors import DataError
from gcore_core.kits.cache import cache_root, replacing
from gcore_core.kits.launching import Call, Nothing, Service
from gcore_nodes.bulk import BulkClient, OfferedFile
from gcore_nodes.messages import (
    HASH_FILES,
    HASH_PACKAGES,
    LIST_FILES,
    MAKE_DIRECTORY,
    READ_GROWN,
    RECEIVE_FILE,
    REMOVE_FILES,
    FileFacts,
    Grown,
    HashedFile,
    HashFiles,
    HashPackages,
    ListFiles,
    MakeDirectory,
    ReadGrown,
    ReceivedBytes,
    ReceiveFile,
    RemoveFiles,
)

_PIECE_BYTES = 16 << 20  # read, or fetched, at a time
_GROWN_BYTES = 4 << 20  # of one answer
_SHOWN_S = 1.0  # so often the progress of a hash is told
#: A file that was written less than so many seconds ago gets no note: it may change again without
#: another time of change.
_FRESH_S = 2.0
#: A smaller file gets no note, but for a copy: to hash it takes less time than to look it up.
_NOTED_BYTES = 1 << 20


class FileNote(msgspec.Struct, frozen=True):
    """Holds what is known of a file that has not changed since, as its facts show.

    is_copy: it was copied here for a run.
    """

    nbytes: int
    mtime_ns: int
    inode: int
    sha256: str
    is_copy: bool = False


class FileNotes:
    """Keeps notes of files between runs, each in a file of its own in the node's cache.

    Where the cache cannot be written, files are hashed again.

    directory: None for the default: ``files`` in ``G_CORE_CACHE``, or in ``~/.cache/g-core``.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or cache_root() / "files"

    def read(self, path: Path) -> FileNote | None:
        """Returns what is noted of a file, whether or not it is still so."""
        try:
            return msgspec.json.decode(self._place(path).read_bytes(), type=FileNote)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def write(self, path: Path, note: FileNote) -> None:
        place = self._place(path)
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as fresh:
                fresh.write_bytes(msgspec.json.encode(note))

    def _place(self, path: Path) -> Path:
        # Machines that share this directory may have other files under the same path.
        name = f"{socket.gethostname()}\0{path}"
        return (
            self._directory / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.json"
        )


class NodeFiles:
    """Serves the files of one node.

    name: of the node's agent.
    client: reads files of other nodes.
    """

    def __init__(self, name: str, client: BulkClient, notes: FileNotes | None = None) -> None:
        self._name = name
        self._client = client
        self._notes = notes or FileNotes()
        self._offered: dict[str, Path] = {}  # by SHA-256

    def register(self, service: Service) -> None:
        service.add(LIST_FILES, self.list_files)
        service.add(HASH_FILES, self.hash_files)
        service.add(HASH_PACKAGES, self.hash_packages)
        service.add(RECEIVE_FILE, self.receive_file)
        service.add(MAKE_DIRECTORY, self.make_directory)
        service.add(REMOVE_FILES, self.remove_files)
        service.add(READ_GROWN, self.read_grown)

    def offered(self, sha256: str) -> Path | None:
        """Returns the file that other nodes may read under a hash. Any thread may call it."""
        return self._offered.get(sha256)

    # -- looking -----------------------------------------------------------------------------------

    async def list_files(self, request: ListFiles, call: Call) -> list[FileFacts]:
        return await asyncio.to_thread(
            lambda: list(_listed(request.paths, request.everything, call.progress))
        )

    async def hash_files(self, request: HashFiles, call: Call) -> AsyncGenerator[HashedFile, None]:
        """Yields items of each file in turn: its progress, and last its hash or its fault.

        A file that has a note, and has not changed since, is not read again.
        """
        for path in request.paths:
            try:
                async with contextlib.aclosing(self._hash(Path(path), call)) as items:
                    async for item in items:
                        yield item
            except OSError as error:
                yield HashedFile(path, 0, fault=error.strerror or str(error))

    async def _hash(self, path: Path, call: Call) -> AsyncGenerator[HashedFile, None]:
        """Yields the progress of a file's hash, and last the hash. Raises OSError.

        From then on the file is offered to other nodes.
        """
        before = os.stat(path)
        note = self._notes.read(path)
        if note is None or not _is_noted(before, note):
            digest = hashlib.sha256()
            clock = asyncio.get_running_loop().time
            hashed_bytes = 0
            shown_s = clock()
            with open(path, "rb", buffering=0) as file:
                while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                    await asyncio.to_thread(digest.update, piece)
                    hashed_bytes += len(piece)
                    call.progress()
                    if clock() - shown_s > _SHOWN_S:
                        shown_s = clock()
                        yield HashedFile(str(path), hashed_bytes)
            sha256 = digest.hexdigest()
            is_copy = note is not None and note.is_copy and note.sha256 == sha256
            note = _note_of(before, sha256, is_copy=is_copy)
            after = os.stat(path)
            is_settled = time.time_ns() - after.st_mtime_ns > _FRESH_S * 1e9
            if _is_noted(after, note) and is_settled and (is_copy or hashed_bytes >= _NOTED_BYTES):
                self._notes.write(path, note)
        self._offered[note.sha256] = path
        yield HashedFile(str(path), before.st_size, note.sha256, note.is_copy)

    async def hash_packages(self, request: HashPackages, call: Call) -> dict[str, str]:
        """Returns package -> digest of its code; "" for one that is not installed."""
        return await asyncio.to_thread(
            lambda: {name: package_digest(name) for name in request.packages}
        )

    # -- fetching ----------------------------------------------------------------------------------

    async def receive_file(
        self, request: ReceiveFile, call: Call
    ) -> AsyncGenerator[ReceivedBytes, None]:
        """Fetches a file from another node; it stands there whole, or not at all.

        It comes into a file beside its place, which is renamed when its hash is right. When that
        breaks off, the next request goes on where it was.

        Raises DataError when it cannot be written, when something is in its place already, and when
        what came is not what was asked for.
        """
        path = Path(request.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not request.replaces and os.path.lexists(path):
                raise _in_the_way(path)
            with _part_file(path, request.sha256) as (file, part):
                async with contextlib.aclosing(self._fetch(request, file, call)) as sizes:
                    async for nbytes in sizes:
                        yield ReceivedBytes(nbytes)
                file.flush()
                os.fchmod(file.fileno(), request.mode & 0o777)
                os.utime(file.fileno(), ns=(request.mtime_ns, request.mtime_ns))
                _put_in_place(part, path, replaces=request.replaces)
            if request.is_input:
                note = _note_of(os.stat(path), request.sha256, is_copy=True)
                self._notes.write(path, note)
        except OSError as error:
            raise DataError(
                f"it cannot be written: {error.strerror or error}", where=str(path)
            ) from error

    async def _fetch(
        self, request: ReceiveFile, file: BinaryIO, call: Call
    ) -> AsyncGenerator[int, None]:
        """Fills a file; yields how many bytes it has. Raises DataError for a wrong content."""
        nbytes = min(os.fstat(file.fileno()).st_size, request.nbytes)
        free_bytes = shutil.disk_usage(Path(request.path).parent).free
        if request.nbytes - nbytes > free_bytes:
            raise DataError(
                f"it has {request.nbytes} bytes, and {free_bytes} are free", where=request.path
            )
        digest = hashlib.sha256()
        resumed = nbytes > 0
        if resumed:
            for start in range(0, nbytes, _PIECE_BYTES):
                piece = await asyncio.to_thread(file.read, min(_PIECE_BYTES, nbytes - start))
                await asyncio.to_thread(digest.update, piece)
                call.progress()
        file.truncate(nbytes)
        file.seek(nbytes)
        buffer = memoryview(bytearray(min(_PIECE_BYTES, request.nbytes - nbytes)))
        while nbytes < request.nbytes:
            memory = buffer[: request.nbytes - nbytes]
            what = OfferedFile(request.sha256, nbytes, len(memory))
            await self._client.read(request.node, what, memory, call.progress)
            await asyncio.to_thread(_write, file, memory, digest)
            nbytes += len(memory)
            yield nbytes
        if digest.hexdigest() != request.sha256:
            file.truncate(0)  # the next request begins anew
            raise DataError(
                "what came is not what was hashed there",
                where=request.path,
                why="what was left of an earlier copy was damaged"
                if resumed
                else "the file was changed in between",
                todo="start the run again",
            )

    # -- the run's directory -----------------------------------------------------------------------

    async def make_directory(self, request: MakeDirectory, call: Call) -> Nothing:
        """Raises DataError when the directory, or the marker in it, cannot be made."""
        try:
            Path(request.path).mkdir(parents=True, exist_ok=True)
            if request.marker:
                (Path(request.path) / request.marker).touch()
        except OSError as error:
            raise DataError(
                f"it cannot be made: {error.strerror or error}", where=request.path
            ) from error
        return Nothing()

    async def remove_files(self, request: RemoveFiles, call: Call) -> Nothing:
        if not os.path.lexists(request.unless):
            await asyncio.to_thread(_remove, request.paths)
        return Nothing()

    async def read_grown(self, request: ReadGrown, call: Call) -> list[Grown]:
        """Returns what was appended, at most ``_GROWN_BYTES``; the rest comes when asked again."""
        return await asyncio.to_thread(lambda: list(_grown(request)))


# -- looking ---------------------------------------------------------------------------------------


def _listed(
    paths: list[str], everything: bool, progress: Callable[[], None]
) -> Iterator[FileFacts]:
    """Yields the facts of files and of those below directories, in an order that is always the
    same.
    """
    for path in paths:
        if not os.path.isdir(path):
            yield from _facts(path)
            continue
        for directory, folders, files in os.walk(path, followlinks=True):
            progress()
            folders[:] = sorted(name for name in folders if everything or not _is_hidden(name))
            for name in sorted(files):
                if everything or not _is_hidden(name):
                    yield from _facts(os.path.join(directory, name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _facts(path: str) -> Iterator[FileFacts]:
    """Yields the facts of one file; nothing where none is there."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        yield FileFacts(path, 0, 0, 0, 0, error.strerror or str(error))
        return
    fault = "" if os.access(path, os.R_OK) else "Permission denied"
    mode = status.st_mode & 0o777
    yield FileFacts(path, status.st_size, status.st_mtime_ns, status.st_ino, mode, fault)


def _is_noted(status: os.stat_result, note: FileNote) -> bool:
    known = (note.nbytes, note.mtime_ns, note.inode)
    return (status.st_size, status.st_mtime_ns, status.st_ino) == known


def _note_of(status: os.stat_result, sha256: str, *, is_copy: bool) -> FileNote:
    return FileNote(status.st_size, status.st_mtime_ns, status.st_ino, sha256, is_copy)


def package_digest(name: str) -> str:
    """Returns a digest of the Python code of a package or module, by its relative paths.

    name: of the topmost package. Nothing is imported. It is "" for one that is not installed.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return ""
    digest = hashlib.sha256()
    roots = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [(path.relative_to(root), path) for root in roots for path in root.rglob("*.py")]
    if not roots and spec.origin and spec.origin.endswith(".py"):
        files = [(Path(Path(spec.origin).name), Path(spec.origin))]
    for relative, path in sorted(files):
        with contextlib.suppress(OSError):  # removed meanwhile
            content = path.read_bytes()
            digest.update(f"{relative}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


# -- fetching --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _part_file(path: Path, sha256: str) -> Iterator[tuple[BinaryIO, Path]]:
    """Opens the file beside ``path`` into which a content comes; yields it, and its path.

    One that was left of an earlier try is taken up, unless another process writes there now.
    """
    part = path.with_name(f".{sha256[:32]}.part")
    while True:
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            if _lock(file, part):
                yield file, part
                return
        part = path.with_name(f".{sha256[:32]}-{secrets.token_hex(4)}.part")


def _lock(file: BinaryIO, part: Path) -> bool:
    """Returns whether a part is this process's alone until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks
        return True
    # Who wrote it may have finished, and renamed it, since it was opened.
    with contextlib.suppress(OSError):
        return os.stat(part).st_ino == os.fstat(file.fileno()).st_ino
    return False


def _write(file: BinaryIO, memory: memoryview, digest: hashlib._Hash) -> None:
    file.write(memory)
    digest.update(memory)


def _put_in_place(part: Path, path: Path, *, replaces: bool) -> None:
    """Renames a part to its place. Raises DataError where something is there and must stay."""
    if replaces:
        part.replace(path)
        return
    try:
        os.link(part, path)  # unlike a rename, it fails where something is
    except FileExistsError:
        part.unlink()
        raise _in_the_way(path) from None
    except OSError:  # a disk without such links
        if os.path.lexists(path):
            part.unlink()
            raise _in_the_way(path) from None
        part.rename(path)
    else:
        part.unlink()


def _in_the_way(path: Path) -> DataError:
    return DataError("something else is there already", where=str(path))


# -- the run's directory ---------------------------------------------------------------------------


def _remove(paths: list[str]) -> None:
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _grown(request: ReadGrown) -> Iterator[Grown]:
    """Yields what each file has grown by, in the order of their names, until an answer is full."""
    directory = Path(request.directory)
    left_bytes = _GROWN_BYTES
    names = {path for pattern in request.patterns for path in directory.glob(pattern)}
    for path in sorted(names):
        name = str(path.relative_to(directory))
        start = request.positions.get(name, 0)
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(min(start, os.fstat(file.fileno()).st_size))
            content = file.read(left_bytes)
            if content or name not in request.positions:  # an empty file is told once
                left_bytes -= len(content)
                yield Grown(name, file.tell() - len(content), content)
        if left_bytes <= 0:
            return
