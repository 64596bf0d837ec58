"""Sends of a bucket of a push only what has changed since the push before, where that pays.

Both nodes keep the bytes of a bucket as the push before left them: its *base*. A *delta* is the
exclusive or of the base and the new content, compressed in pieces of 1 MiB. Where a weight changes
little, its upper bits stay, and their exclusive or is zero. Zeros compress well.

A reader first asks for a header. It says which of three cases it is:

    delta     the reader may read a delta; the header has the digests of base and new content
    whole     the sender has no base, or the delta is not smaller; the reader reads the bucket as it
              is
    pause     a delta does not pay, or the sender cannot make one; the reader reads the bucket as it
              is, and unless it wants deltas always it asks for none of it in the next pushes

The reader also reads the bucket as it is

    where its own base has another digest than the header says, or there is none
    where what it made from a delta has another digest than the header says

A delta pays when making, sending and applying it takes less time than sending the bucket as it is.
The sender makes some pieces to see how long they take and how large they are. The reader has
measured the rate of the network.

A base costs the memory of its bucket, on the sender's node and on each reader's. It is kept only
where the package ``zstandard`` is installed, and while the machine has memory enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from gcore_core.contract.errors import DataError
from gcore_core.runtime.rpc.service import encode
from gcore_core.runtime.store.bulk import DeltaContent, MirroredContent, Region
from gcore_core.runtime.store.client import map_file

log = logging.getLogger(__name__)

#: "auto" asks for no delta of a smaller bucket: the question takes as long as the bucket.
LEAST_BYTES = 1 << 20
#: Pushes in which a bucket is not asked for as a delta after one that did not pay.
PAUSE_PUSHES = 32

_PIECE_BYTES = 1 << 20
_SAMPLE = 16  # one of so many pieces is made to see whether the delta pays
_LEVEL = 1  # of zstd; its faster levels find less, and are not faster on what is mostly zeros
_WORD_BYTES = 4  # bytes of the same place in words of this size are compressed side by side
_THREADS = 4
_FILES = 4  # buckets whose deltas are kept for those who still read them
_MEASURED = 8  # the latest reads, from which the rate of the network is computed
_LENGTH = struct.Struct(">I")
_HEADER = struct.Struct(">BQQQQ")
HEADER_BYTES = _HEADER.size

WHOLE, DELTA, PAUSE = range(3)


@cache
def zstd() -> Any:
    """Returns the package ``zstandard``; None where it is not installed."""
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


@cache
def _pool() -> ThreadPoolExecutor:
    threads = min(_THREADS, os.cpu_count() or 1)
    return ThreadPoolExecutor(threads, thread_name_prefix="delta")


def number_of(bucket: MirroredContent) -> int:
    """Returns a number that stands for a bucket of one push, in 64 bits."""
    return xxhash.xxh3_64_intdigest(encode(bucket))


# -- a delta ---------------------------------------------------------------------------------------


class Header(NamedTuple):
    """Precedes a delta, or stands for one that is not made.

    form: WHOLE, DELTA or PAUSE, see the head of this file.
    nbytes: of the delta that follows; 0 for other forms.
    base, made: xxh3 of the bucket before and after.
    bucket: which bucket of which push it is of, see ``number_of``. The file that it is read from
        may have become another one's meanwhile.
    """

    form: int
    nbytes: int = 0
    base: int = 0
    made: int = 0
    bucket: int = 0

    def packed(self) -> bytes:
        return _HEADER.pack(*self)

    @staticmethod
    def of(packed: bytes, nbytes: int) -> Header:
        """Reads the header of a bucket of ``nbytes``.

        Raises DataError where it is none, or promises more than the bucket itself.
        """
        header = Header(*_HEADER.unpack(packed))
        has_delta = header.form == DELTA
        if header.form not in (WHOLE, DELTA, PAUSE) or header.nbytes > nbytes * has_delta:
            raise DataError("a delta has a header that makes no sense", where="push")
        return header


def _starts(nbytes: int) -> range:
    return range(0, nbytes, _PIECE_BYTES)


def _made_piece(new: np.ndarray, base: np.ndarray) -> bytes:
    """Returns the compressed difference of two pieces; empty where there is none."""
    changed = np.bitwise_xor(new, base)
    if not changed.any():
        return b""
    # First byte 0 of all words, then byte 1 of all, and so on: where upper bits have not changed,
    # long rows of zeros lie together.
    whole_words = len(changed) // _WORD_BYTES * _WORD_BYTES
    planes = changed[:whole_words].reshape(-1, _WORD_BYTES).T
    ordered = np.concatenate((planes.ravel(), changed[whole_words:]))
    return bytes(zstd().ZstdCompressor(level=_LEVEL).compress(ordered.data))


def _applied_piece(packed: memoryview, base: np.ndarray, target: np.ndarray) -> None:
    """Makes a piece from its base. Raises DataError where it is no difference of its size."""
    if not packed:
        target[:] = base
        return
    library = zstd()
    try:
        # The size that a frame declares would be allocated, so it is looked at before.
        if library.frame_content_size(packed) != len(base):
            raise DataError("a piece of a delta has another size", where="push")
        unpacked = library.ZstdDecompressor(max_window_size=2 * _PIECE_BYTES).decompress(
            packed, max_output_size=len(base), allow_extra_data=False
        )
    except library.ZstdError as error:
        raise DataError("a piece of a delta cannot be read", where="push", why=f"{error}") from None
    ordered = np.frombuffer(unpacked, np.uint8)
    if len(ordered) != len(base):
        raise DataError("a piece of a delta has another size", where="push")
    # The words as they were, from their bytes as ``_made_piece`` has ordered them.
    whole_words = len(ordered) // _WORD_BYTES * _WORD_BYTES
    words = ordered[:whole_words].reshape(_WORD_BYTES, -1).T
    shape = -1, _WORD_BYTES
    np.bitwise_xor(
        words, base[:whole_words].reshape(shape), out=target[:whole_words].reshape(shape)
    )
    np.bitwise_xor(ordered[whole_words:], base[whole_words:], out=target[whole_words:])


def make_delta(new: np.ndarray, base: np.ndarray) -> bytes:
    """Returns what leads from ``base`` to ``new``, flat uint8 of one size."""

    def made(start: int) -> bytes:
        end = start + _PIECE_BYTES
        return _made_piece(new[start:end], base[start:end])

    pieces = _pool().map(made, _starts(len(new)))
    return b"".join(_LENGTH.pack(len(piece)) + piece for piece in pieces)


def apply_delta(delta: memoryview, base: np.ndarray, target: np.ndarray) -> None:
    """Makes in ``target`` what ``delta`` leads to from ``base``, all flat.

    It allocates no more than the pieces that it works on. Raises DataError for a delta that is
    none, or one of a bucket of another size; ``target`` has anything then.
    """
    pieces = []
    at = 0
    for _ in _starts(len(base)):
        if at + _LENGTH.size > len(delta):
            raise DataError("a delta ends in the middle", where="push")
        (nbytes,) = _LENGTH.unpack_from(delta, at)
        at += _LENGTH.size
        pieces.append(delta[at : at + nbytes])
        at += nbytes
    if at != len(delta):
        raise DataError("a delta does not end with its last piece", where="push")

    def apply(start: int, piece: memoryview) -> None:
        end = start + _PIECE_BYTES
        _applied_piece(piece, base[start:end], target[start:end])

    for _ in _pool().map(apply, _starts(len(base)), pieces):
        pass


def pays(new: np.ndarray, base: np.ndarray, bytes_per_s: float) -> bool:
    """Returns whether a delta takes less time than the whole at a rate; 0: it is not known.

    It makes some pieces. To apply them is taken to last as long as to make them.
    """
    starts = _starts(len(new))[::_SAMPLE]
    if not bytes_per_s or not starts:
        return False

    def made(start: int) -> int:
        end = start + _PIECE_BYTES
        return len(_made_piece(new[start:end], base[start:end]))

    began_s = time.perf_counter()
    made_bytes = sum(_pool().map(made, starts))
    made_s = time.perf_counter() - began_s
    sampled_bytes = sum(min(_PIECE_BYTES, len(new) - start) for start in starts)
    return 2 * made_s + made_bytes / bytes_per_s < sampled_bytes / bytes_per_s


# -- bases -----------------------------------------------------------------------------------------


class Base(NamedTuple):
    """What a bucket had in the push before, and its xxh3."""

    content: np.ndarray
    digest: int


class Bases:
    """The bases of the buckets of one memory."""

    def __init__(self) -> None:
        self._bases: dict[int, Base] = {}

    def get(self, index: int, nbytes: int) -> Base | None:
        base = self._bases.get(index)
        return base if base is not None and len(base.content) == nbytes else None

    def keep(self, index: int, content: np.ndarray) -> None:
        """Copies a bucket, if there is memory enough. The digest is that of the copy."""
        before = self._bases.pop(index, None)
        if before is not None and len(before.content) == len(content):
            copied = before.content
        elif not _has_room(len(content)):
            return
        else:
            copied = np.empty(len(content), np.uint8)
        copied[:] = content
        self._bases[index] = Base(copied, xxhash.xxh3_64_intdigest(copied.data))

    def drop(self, index: int) -> None:
        self._bases.pop(index, None)


def _has_room(nbytes: int) -> bool:
    """Returns whether the machine keeps an eighth of its memory free beside so many bytes."""
    import psutil  # here, so that workers, which keep no weights of a push before, need not load it

    memory = psutil.virtual_memory()
    return bool(memory.available - nbytes > memory.total // 8)


# -- the sending side ------------------------------------------------------------------------------


class DeltaSender:
    """Makes the deltas of the memory from which a worker of this node pushes. Threads share it.

    path: the memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._push = (-1, -1)  # version and attempt
        self._bases = Bases()
        self._made: dict[int, Path] = {}  # of this push, by index

    def find(self, what: DeltaContent) -> Region:
        """Returns where the header and the delta of a bucket lie.

        They are made once for each push. Who asks first decides: by its rate of the network, or
        because it wants a delta always.
        """
        bucket = what.of
        with self._lock:
            push = bucket.version, bucket.attempt
            if push != self._push:
                self._made.clear()
                self._push = push
            path = self._made.get(bucket.index)
            if path is None:
                header, delta = self._make(what)
                header = header._replace(bucket=number_of(bucket))
                path = write_delta(self._path, bucket.index, header, delta)
                # Whichever bucket's the file was, it is that no more.
                self._made = {i: other for i, other in self._made.items() if other != path}
                self._made[bucket.index] = path
            return Region(path, what.start, path.stat().st_size - what.start)

    def _make(self, what: DeltaContent) -> tuple[Header, bytes]:
        """Makes a delta, and keeps the bucket for the next push."""
        bucket = what.of
        memory = np.frombuffer(map_file(self._path, writable=False), np.uint8)
        new = memory[bucket.offset : bucket.offset + bucket.nbytes]
        if min(bucket.offset, bucket.nbytes) < 0 or len(new) != bucket.nbytes:
            raise DataError("a bucket lies outside its memory", where="push")
        if zstd() is None:
            return Header(PAUSE), b""
        base = self._bases.get(bucket.index, bucket.nbytes)
        if base is None:
            self._bases.keep(bucket.index, new)
            return Header(WHOLE), b""
        if not what.always and not pays(new, base.content, what.bytes_per_s):
            self._bases.drop(bucket.index)
            return Header(PAUSE), b""
        delta = make_delta(new, base.content)
        self._bases.keep(bucket.index, new)
        made = self._bases.get(bucket.index, bucket.nbytes)
        if made is None or len(delta) >= bucket.nbytes:
            return Header(WHOLE), b""
        return Header(DELTA, len(delta), base.digest, made.digest), delta


def write_delta(beside: Path, index: int, header: Header, delta: bytes | memoryview) -> Path:
    """Writes a header and what follows it to a file of its own, and returns where it is."""
    path = beside.with_name(f"{beside.name}-delta-{index % _FILES}")
    unfinished = path.with_name(f"{path.name}-unfinished")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(header.packed())
        file.write(delta)
    unfinished.replace(path)  # who reads the one before keeps it
    return path


# -- the reading side ------------------------------------------------------------------------------

#: Fills its second argument with a content, from one node.
Read = Callable[[DeltaContent, memoryview], Awaitable[None]]


class DeltaReader:
    """Reads buckets of one memory of another node as deltas.

    beside: the mirror, beside which the deltas lie that are passed on.
    """

    def __init__(self, beside: Path) -> None:
        self._beside = beside
        self._bases = Bases()
        self._paused: dict[int, int] = {}  # bucket -> pushes in which it is not asked for
        self._rates: dict[str, deque[tuple[int, float]]] = {}  # node -> (bytes, seconds) of reads

    def measured(self, source: str, nbytes: int, took_s: float) -> None:
        """Notes how long it took to read something from a node; what is small says too little."""
        if nbytes >= LEAST_BYTES:
            self._rates.setdefault(source, deque(maxlen=_MEASURED)).append((nbytes, took_s))

    def bytes_per_s(self, source: str) -> float:
        """Returns the rate at which content came from a node; 0 where none has."""
        reads = self._rates.get(source, ())
        return sum(nbytes for nbytes, _ in reads) / max(1e-9, sum(took_s for _, took_s in reads))

    def may_ask(self, index: int, nbytes: int, mode: str) -> bool:
        """Returns whether to ask for a delta of a bucket; it is asked once for each push."""
        if zstd() is None or not nbytes:
            return False
        if mode == "always":
            return True
        if mode != "auto" or nbytes < LEAST_BYTES:
            return False
        left = self._paused.pop(index, 0)
        if left > 1:
            self._paused[index] = left - 1
        return not left

    async def read(
        self,
        ask: DeltaContent,
        source: str,
        read: Read,
        memory: memoryview,
        tell: Callable[[Path], None],
    ) -> bool:
        """Fills ``memory`` with a bucket from its delta; returns whether it has.

        Else the bucket is to be read as it is.

        ask: for the delta's header.
        source: the node that is asked.
        read: reads from there.
        tell: told where this node has a header, and a delta behind it, to be passed on.
        """
        bucket = ask.of
        packed = bytearray(HEADER_BYTES)
        await read(ask, memoryview(packed))
        try:
            header = Header.of(bytes(packed), bucket.nbytes)
            if header.bucket != number_of(bucket):
                raise DataError("its delta has made room for that of another one", where="push")
            base = self._bases.get(bucket.index, bucket.nbytes)
            if header.form == PAUSE and not ask.always:
                self._paused[bucket.index] = PAUSE_PUSHES
                self._bases.drop(bucket.index)
            if header.form != DELTA or base is None or base.digest != header.base:
                tell(self.without(bucket, PAUSE if header.form == PAUSE else WHOLE))
                return False
            delta = memoryview(bytearray(header.nbytes))
            began_s = time.monotonic()
            await read(msgspec.structs.replace(ask, start=HEADER_BYTES), delta)
            self.measured(source, len(delta), time.monotonic() - began_s)
            tell(await asyncio.to_thread(write_delta, self._beside, bucket.index, header, delta))
            await _to_its_end(asyncio.to_thread(_apply, header, delta, base, memory))
        except DataError as error:
            log.warning("bucket %d is read as it is: %s", bucket.index, error)
            tell(self.without(bucket, WHOLE))
            return False
        return True

    def without(self, bucket: MirroredContent, form: int) -> Path:
        """Returns where a header lies that says that a bucket has no delta here."""
        header = Header(form, bucket=number_of(bucket))
        return write_delta(self._beside, bucket.index, header, b"")

    def keep(self, index: int, memory: memoryview) -> None:
        """Keeps a bucket for the next push."""
        self._bases.keep(index, np.frombuffer(memory, np.uint8))


async def _to_its_end(work: Awaitable[None]) -> None:
    """Waits for work that writes into a memory also where this is cancelled.

    The memory is another push's then.
    """
    done = asyncio.ensure_future(work)
    try:
        await asyncio.shield(done)
    finally:
        while not done.done():
            with contextlib.suppress(asyncio.CancelledError, DataError):
                await asyncio.shield(done)


def _apply(header: Header, delta: memoryview, base: Base, memory: memoryview) -> None:
    """Makes a bucket from its base. Raises DataError where it has not the header's digest."""
    target = np.frombuffer(memory, np.uint8)
    apply_delta(delta, base.content, target)
    if xxhash.xxh3_64_intdigest(target.data) != header.made:
        raise DataError("what a delta makes is not what its sender has", where="push")
