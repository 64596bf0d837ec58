"""Says what a checkpoint is: part files, and a manifest that names each with its size and hash.

The manifest carries a message authentication code (MAC), keyed by a key of the run.

    RUN/checkpoint.key             32 random bytes that only the owner may read; they go where the run goes
    RUN/checkpoints/step-000123/
        manifest.json              a Manifest, always in the same words and order, so that no byte of it may differ
        <role>/...                 what a trainer saved; other parts next to it

Parts of a library may hold pickles (DCP's .metadata, Megatron-Core's common.pt), so they are opened
only after ``inspect`` has reported no problem. That is why the hash is SHA-256: a MAC over hashes
that can be forged would prove nothing.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

MANIFEST = "manifest.json"
KEY = "checkpoint.key"
FORMAT = 2  # 1 was that of gcore-core 0.1, whose state had other keys
NAME = re.compile(r"step-(\d{6,12})")

_KEY_BYTES = 32
_MOST_BYTES = 1 << 26  # of a manifest: some 400,000 parts


class Part(msgspec.Struct, frozen=True):
    """Describes one file of a checkpoint; ``sha256`` is in hexadecimal."""

    nbytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the content of ``manifest.json``.

    lock: distribution -> version.
    config_hash: of the resolved configuration.
    metrics: the step's that are finite.
    parts: path relative to the checkpoint, with "/" -> file.
    weights_sha256: of the policy's weights, see ``gcore_core.contract.weights_hash``; not there
        where it was not taken.
    mac: keyed BLAKE2b of all the other fields.
    """

    format: int = FORMAT
    run: str
    step: int
    saved_unix_s: float
    lock: dict[str, str]
    config_hash: str
    metrics: dict[str, float]
    parts: dict[str, Part]
    # Left out where it is not set: so a manifest without it keeps the bytes that its MAC covers.
    weights_sha256: str | msgspec.UnsetType = msgspec.UNSET
    mac: str = ""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def name_of(step: int) -> str:
    """Returns the name of a step's checkpoint, such as ``step-000123``."""
    return f"step-{step:06d}"


# -- the manifest ----------------------------------------------------------------------------------


def seal(manifest: Manifest, key: bytes) -> bytes:
    """Encodes a manifest, with the MAC that this key gives: the bytes of ``manifest.json``."""
    plain = msgspec.structs.replace(manifest, mac="")
    mac = hashlib.blake2b(_encode(plain), key=key, digest_size=_KEY_BYTES).hexdigest()
    return _encode(msgspec.structs.replace(manifest, mac=mac))


def unseal(raw: bytes, key: bytes) -> Manifest:
    """Decodes a manifest and checks its MAC.

    Raises ValueError, which says why, unless ``seal`` gave exactly these bytes with this key.
    """
    manifest = msgspec.json.decode(raw, type=Manifest)
    if manifest.format != FORMAT:
        raise ValueError(
            f"it has format {manifest.format}, this version of gcore-core reads format {FORMAT}"
        )
    if not hmac.compare_digest(seal(manifest, key), raw):
        raise ValueError(
            "its MAC is not that of this run's key: it was changed, or belongs to another run"
        )
    return manifest


def _encode(manifest: Manifest) -> bytes:
    """Encodes the same content always to the same bytes: keys are sorted."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def read_key(run_dir: Path) -> bytes:
    """Reads the run's key. Raises ValueError when it is not there or not whole."""
    try:
        key = (run_dir / KEY).read_bytes()
    except OSError as error:
        raise ValueError(f"{KEY} of the run cannot be read: {error.strerror}") from error
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{KEY} of the run has {len(key)} bytes instead of {_KEY_BYTES}")
    return key


def ensure_key(run_dir: Path) -> bytes:
    """Reads the run's key; makes it now if there is none.

    Where several processes make it at the same time, the first one's key counts.
    """
    if not (run_dir / KEY).exists():
        fresh = run_dir / f".{KEY}.{secrets.token_hex(4)}"
        try:
            write_durably(fresh, secrets.token_bytes(_KEY_BYTES), mode=0o600)
            os.link(fresh, run_dir / KEY)  # fails where another process was first
        except FileExistsError:
            pass
        finally:
            fresh.unlink(missing_ok=True)
        sync(run_dir)
    return read_key(run_dir)


# -- files -----------------------------------------------------------------------------------------


def write_durably(file: Path, content: bytes, mode: int = 0o644) -> None:
    """Writes a new file, which is on the disk when this returns."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)


def sync(path: Path) -> None:
    """Waits until a file's content, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def part_of(file: Path) -> Part:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return Part(nbytes=stream.tell(), sha256=digest.hexdigest())


def files_below(directory: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yields (path relative to the directory, entry) of everything but directories; follows no
    link.
    """
    queue = [(directory, "")]
    while queue:
        folder, prefix = queue.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    queue.append((Path(entry.path), f"{prefix}{entry.name}/"))
                else:
                    yield prefix + entry.name, entry


# -- looking at a checkpoint -----------------------------------------------------------------------


def inspect(
    checkpoint: Path,
    *,
    hashes: bool = True,
) -> tuple[Manifest | None, list[str]]:
    """Reads the manifest, if it can be trusted, and finds every problem of the checkpoint.

    A problem names a file and says why. A part is opened only to hash it.
    hashes: False to look at names and sizes only.
    """
    checkpoint = checkpoint.resolve()
    try:
        manifest = unseal(_limited(checkpoint / MANIFEST), read_key(checkpoint.parents[1]))
        if checkpoint.name != name_of(manifest.step):
            raise ValueError(f"it belongs to {name_of(manifest.step)}")
    except (ValueError, OSError, IndexError, RecursionError, msgspec.MsgspecError) as error:
        return None, [f"{MANIFEST}: {getattr(error, 'strerror', None) or error}"]
    try:
        return manifest, list(_problems(checkpoint, manifest, hashes))
    except OSError as error:
        return manifest, [f"{error.filename}: {error.strerror}"]


def _limited(file: Path) -> bytes:
    """Reads a file. Raises ValueError for one larger than a manifest is, OSError for a link."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        size = os.fstat(descriptor).st_size
        if size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        return stream.read(size)  # allocates that many bytes first, hence the limit


def _problems(checkpoint: Path, manifest: Manifest, hashes: bool) -> Iterator[str]:
    """Yields what differs between the files that are there and those that the manifest names."""
    entries = dict(files_below(checkpoint))
    entries.pop(MANIFEST, None)
    for name, part in manifest.parts.items():
        entry = entries.pop(name, None)
        if not _is_inside(name):
            yield f"{name!r}: a part must lie in the checkpoint"
        elif entry is None:
            yield f"{name}: it is missing"
        elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            yield f"{name}: it is no regular file"
        elif entry.stat().st_size != part.nbytes:
            yield f"{name}: it has {entry.stat().st_size} bytes, {part.nbytes} were saved"
        elif hashes and part_of(Path(entry.path)) != part:
            yield f"{name}: its bytes are not those that were saved"
    for name in sorted(entries):
        yield f"{name!r}: it is not part of this checkpoint"


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return str(path) == name and not path.is_absolute() and ".." not in path.parts
