"""Carries content between the nodes of a run, past the event loops of their agents.

The agent of each node has a `BulkServer` and a `BulkClient`. Both use threads and blocking sockets:
what arrives goes straight into the memory where it will be read, and the event loop has no work for
a piece of it. A large content comes in parts over several connections at once. When a connection
breaks, its part goes on from the byte where it was.

The module has four sections:

    what can be read     messages that name a content, and ``Region``, which says where it lies
    one connection       ``_Line``: the proof, messages and content; both sides use it
    the sending side     ``BulkServer``: a thread for each connection
    the receiving side   ``BulkClient``: a ``_Source`` for each node, with a ``_Stream`` for each
                         connection to it; a ``_Read`` for each content, cut into ``_Part``s

A connection, step by step. All of it is TLS with the run's identity, mutual, see
``gcore_core.kits.wire``:

    client -> server   the proof that it is of the run, see ``gcore_core.kits.wire``
    server -> client   why it is refused, and the connection ends; or an empty text
    client -> server   `ReadRequest`                      these two lines again and again
    server -> client   `Answer`; then the content

An address is ``tls:HOST:PORT``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import mmap
import os
import socket
import ssl
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from gcore_core.contract.errors import (
    AddressError,
    ContractError,
    DataError,
    GcoreError,
    WorkerDied,
)
from gcore_core.contract.records import Ref
from gcore_core.kits.wire import (
    GREETING_BYTES,
    PATIENT,
    RemoteFailure,
    check_answer,
    contexts,
    decoded,
    encode,
    end_in_silence,
    framed,
    from_wire,
    prove,
    receive,
    refusal,
    to_wire,
)

log = logging.getLogger(__name__)

#: Connections to one node over which the parts of a large content come at once.
STREAMS = 2
#: A larger content is divided. On a network of 1 GB/s a part takes 8 ms, against 0.1 ms for the
#: round trip of its request.
PART_BYTES = 8 << 20
#: A content that still comes is passed on in pieces of this size.
_PIECE_BYTES = 1 << 20
_MESSAGE_LIMIT_BYTES = 1 << 20

_GREETING_S = 30.0  # a connection has so long to be made, with the proof
_MOST_UNPROVEN = 64  # connections that are greeted at a time; others wait
_IDLE_S = 60.0  # a client's connection without work ends after this
_LOOK_S = 0.25  # so often a read that goes on is checked for silence, and progress is shown
_PATIENCE_S = 180.0  # see ``BulkClient``
_SILENCE_S = 30.0  # see ``BulkClient``; the kernel ends a connection after twice that


# -- what can be read ------------------------------------------------------------------------------


class StoredContent(msgspec.Struct, array_like=True, frozen=True, tag="stored"):
    """Names what a reference of the server's node points at."""

    ref: Ref


class PushedContent(msgspec.Struct, array_like=True, frozen=True, tag="pushed"):
    """Names a region of the memory from which a worker of the server's node pushes weights.

    worker: name of the process.
    offset, nbytes: of the region, in bytes.
    """

    worker: str
    offset: int
    nbytes: int


class MirroredContent(msgspec.Struct, array_like=True, frozen=True, tag="mirrored"):
    """Names a bucket of a push that comes, or has come, to the mirror of the server's node.

    node, worker: who pushes it.
    version, attempt: of the push.
    index: of the bucket.
    offset, nbytes: where it lies in the worker's memory, and in the mirror, in bytes.
    """

    node: str
    worker: str
    version: int
    attempt: int
    index: int
    offset: int
    nbytes: int


class OfferedFile(msgspec.Struct, array_like=True, frozen=True, tag="file"):
    """Names a part of a file that the server's node has hashed for the run.

    sha256: of the whole file, in hexadecimal.
    offset, nbytes: of the part, in bytes.
    """

    sha256: str
    offset: int
    nbytes: int


What = StoredContent | PushedContent | MirroredContent | OfferedFile


class ReadRequest(msgspec.Struct, array_like=True, frozen=True):
    """Asks for ``nbytes`` bytes of a content, from its byte ``start`` on."""

    what: What
    start: int
    nbytes: int


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Precedes the content, or says why there is none."""

    failure: RemoteFailure | None = None


_REQUEST = msgspec.msgpack.Decoder(ReadRequest)
_ANSWER = msgspec.msgpack.Decoder(Answer)


def _all_is_here(start: int, end: int) -> None: ...


class Region(NamedTuple):
    """Says where a content lies: ``nbytes`` bytes of a file, from ``offset`` on.

    wait: returns when the content's bytes from its first to before its second argument are there.
        It raises a GcoreError where they will not come. It is called in the thread that sends.
    """

    path: Path
    offset: int
    nbytes: int
    wait: Callable[[int, int], None] = _all_is_here


# -- one connection --------------------------------------------------------------------------------


class _Line:
    """Speaks over one open connection. Client and server both use it.

    TLS has told both sides before who the other one is, and whatever is altered on its way ends the
    connection.

    where: for errors.
    heard: is called whenever bytes come.
    """

    def __init__(
        self, sock: ssl.SSLSocket, where: str, heard: Callable[[], None] = lambda: None
    ) -> None:
        self.sock = sock
        self._where = where
        self._heard = heard

    def greet_server(self, secret: bytes) -> None:
        """Proves to the server that this process is of the run.

        Raises ContractError where it refuses, OSError when the connection breaks.
        """
        self.send(prove(secret))
        check_answer(self.receive(GREETING_BYTES), self._where)

    def greet_client(self, secret: bytes) -> None:
        """Raises ContractError unless the client proves that it is of the run; tells it why."""
        why = refusal(self.receive(GREETING_BYTES), secret, self._where)
        self.send(encode(why))
        if why:
            raise ContractError(why, where=self._where)

    def send(self, message: bytes) -> None:
        self.sock.sendall(framed(message))

    def receive(self, limit_bytes: int = _MESSAGE_LIMIT_BYTES) -> bytes:
        """Returns the next message."""
        return receive(self._read, limit_bytes, self._where)

    def _read(self, nbytes: int) -> bytes:
        read = self.sock.recv(nbytes)
        self._heard()
        return read

    def receive_content(
        self, memory: memoryview, came: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Fills ``memory``. Raises OSError when the connection breaks.

        came: called with the number of bytes of each arrival. TLS has checked them.
        """
        filled = 0
        while filled < len(memory):
            nbytes = self.sock.recv_into(memory[filled:], len(memory) - filled)
            if not nbytes:
                raise ConnectionError("the connection ended")
            filled += nbytes
            self._heard()
            came(nbytes)

    def send_content(self, memory: memoryview, wait: Callable[[int, int], None]) -> None:
        """Sends ``memory``.

        wait: called before a piece is read, with where it begins and ends in ``memory``.
        """
        for start in range(0, len(memory), _PIECE_BYTES):
            piece = memory[start : start + _PIECE_BYTES]
            wait(start, start + len(piece))
            self.sock.sendall(piece)


def _place(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Returns the socket's family and what it binds or connects to."""
    scheme, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if scheme != "tls" or not port.isdecimal():
        raise AddressError("it is no address of a bulk server", where=address)
    host = host.strip("[]")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port))


def _set_up(sock: socket.socket) -> None:
    """Has the kernel end a connection whose other side is gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_in_silence(sock, 2 * _SILENCE_S)


def _shut(sock: socket.socket) -> None:
    """Ends a connection in whatever thread waits for it.

    An SSLSocket's own ``shutdown`` would first take its TLS away, under a thread that reads.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_madvise = getattr(ctypes.CDLL(None), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on


def _map_pages(memory: memoryview) -> None:
    """Has the kernel map all pages of a part of a mapping at once, for writing.

    Else each page is mapped by a fault of its own when it is first written to. Where the kernel
    cannot do it, that is what happens. Python's ``mmap.madvise`` would hold the global lock.
    """
    if _madvise is None or not len(memory):
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    before = address % mmap.PAGESIZE
    _madvise(address - before, before + len(memory), _POPULATE_WRITE)


# -- the sending side ------------------------------------------------------------------------------


class BulkServer:
    """Gives content of this node to other nodes' agents. One thread serves each connection.

    name: of this node, for errors.
    find: says where a content lies. It is called in any thread, and raises a GcoreError for what
        may not be read.
    identity: the run's.
    sent_bytes: how much content was sent so far, with what is being sent.
    """

    def __init__(
        self,
        name: str,
        address: str,
        secret: bytes,
        find: Callable[[What], Region],
        identity: bytes,
    ) -> None:
        self._name = name
        self._address = address
        self._secret = secret
        self._find = find
        self._tls = contexts(identity).server
        self._listener: socket.socket | None = None
        self._unproven = threading.Semaphore(_MOST_UNPROVEN)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self.sent_bytes = 0

    def start(self) -> None:
        """Listens from now on. Raises AddressError where the address cannot be had."""
        family, place = _place(self._address)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(1024)
        except OSError as error:
            listener.close()
            why = "another program, or a run that has not ended, listens there"
            if error.errno != errno.EADDRINUSE:
                why = error.strerror or str(error)
            raise AddressError(
                "no content can be served to other nodes here", where=self._address, why=why
            ) from error
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """Ends all connections, and waits for their threads, at most a second for each."""
        listener = self._listener
        if listener is None:
            return
        self._listener = None
        _shut(listener)  # which wakes the thread that accepts
        listener.close()
        with self._lock:
            served = dict(self._open)
        for sock in served:
            _shut(sock)
        for thread in served.values():
            thread.join(1.0)

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is not None:
            self._unproven.acquire()
            sock = None
            try:
                sock, _ = listener.accept()
                thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
                thread.start()
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                self._unproven.release()
                if sock is not None:
                    sock.close()
                if self._listener is not None:
                    log.warning("a connection for content cannot be taken: %s", error)
                    time.sleep(0.1)

    def _serve(self, sock: socket.socket) -> None:
        """Runs one connection to its end."""
        try:
            with self._registered(sock) as line:
                while True:
                    body = line.receive()
                    self._give(line, decoded(_REQUEST, body, "request for content", self._name))
        except (GcoreError, ssl.SSLError) as error:
            log.warning("a connection for content was ended: %s", error)
        except (OSError, ValueError):  # ValueError: its socket was closed meanwhile
            pass
        except Exception:  # isolation point: the client sees that its connection ends
            log.exception("a connection for content failed")

    @contextlib.contextmanager
    def _registered(self, sock: socket.socket) -> Iterator[_Line]:
        """Greets a client, and holds its connection where ``close`` finds it."""
        is_proven = False
        try:
            sock.settimeout(_GREETING_S)
            _set_up(sock)
            sock = secured = self._tls.wrap_socket(sock, True, do_handshake_on_connect=False)
            with self._lock:
                self._open[sock] = threading.current_thread()
            secured.do_handshake()
            line = _Line(secured, self._name)
            line.greet_client(self._secret)
            sock.settimeout(None)
            is_proven = True
            self._unproven.release()
            yield line
        finally:
            if not is_proven:
                self._unproven.release()
            with self._lock:
                self._open.pop(sock, None)
            sock.close()

    def _give(self, line: _Line, request: ReadRequest) -> None:
        """Answers one request with the content, or with the error that says why there is none.

        An error behind the answer, in the middle of the content, ends the connection.
        """
        with contextlib.ExitStack() as stack:
            try:
                region = self._find(request.what)
                memory = stack.enter_context(self._opened(region, request))

                def wait(begin: int, end: int) -> None:
                    region.wait(request.start + begin, request.start + end)

                # What fails before the answer can still be told to the reader.
                wait(0, min(_PIECE_BYTES, request.nbytes))
            except Exception as error:  # isolation point: it is raised at the reader
                line.send(encode(Answer(to_wire(error, self._name))))
                return
            with self._lock:
                self.sent_bytes += request.nbytes
            line.send(encode(Answer()))
            line.send_content(memory, wait)

    @contextlib.contextmanager
    def _opened(self, region: Region, request: ReadRequest) -> Iterator[memoryview]:
        """Maps what was asked for."""
        where = f"slab {region.path.name}"
        if not (request.start >= 0 and 0 <= request.nbytes <= region.nbytes - request.start):
            raise DataError("a read goes outside its reference", where=where)
        start = region.offset + request.start
        try:
            file = os.open(region.path, os.O_RDONLY)
        except (OSError, ValueError) as error:  # ValueError: its name is none
            why = getattr(error, "strerror", None) or error
            raise DataError(f"it cannot be opened: {why}", where=where) from None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise DataError("it cannot be opened: it is no file", where=where)
            if region.offset < 0 or region.offset + region.nbytes > os.fstat(file).st_size:
                raise DataError("a reference points outside its slab", where=where)
            yield _mapped(file, start, request.nbytes)
        finally:
            os.close(file)


def _mapped(file: int, start: int, nbytes: int) -> memoryview:
    """Maps ``nbytes`` bytes of a file from ``start`` on, to be read."""
    if not nbytes:
        return memoryview(b"")
    before = start % mmap.ALLOCATIONGRANULARITY
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapped = mmap.mmap(file, before + nbytes, flags, mmap.PROT_READ, offset=start - before)
    return memoryview(mapped)[before:]


# -- the receiving side ----------------------------------------------------------------------------
#
# The life of a read. The first and the last step are in the event loop; the others are in threads,
# and change what they share only under the lock of the node's source, ``_Source.changed``.
#
#     BulkClient.read     makes a _Read, and waits until it is finished, its node falls silent for
#                         too long, or the caller is cancelled
#     _Source.begin       cuts it into parts, queues them, and opens connections that are missing
#     _Source.take        a thread gets the first part of the queue
#     _Stream._receive    it asks for the rest of the part and fills the memory; ``part.start``
#                         moves on with what is there for good
#     _Source.leave       the part is whole; or its connection broke, and it goes back to the front
#                         of the queue; or its content cannot be had, and the read is over
#     _Read.settle        once nothing writes into the memory any more, it tells the event loop
#
# For example 20 MiB over two connections: parts of 8, 8 and 4 MiB. Each thread takes one of the
# first two. The connection of one breaks after 3 MiB: its part is queued before the third, and
# whichever thread is free next takes it and asks for the bytes from 3 MiB on.


class BulkClient:
    """Reads content of other nodes into memory of this process.

    addresses: name of a node -> the address of its server.
    streams: connections to one node over which the parts of a large content come at once.
    patience_s: a read fails when nothing has come from its node for so long.
    silence_s: a connection on which nothing has come for so long is made anew.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        secret: bytes,
        identity: bytes = b"",
        streams: int = STREAMS,
        patience_s: float = _PATIENCE_S,
        silence_s: float = _SILENCE_S,
    ) -> None:
        self._addresses = addresses
        self._secret = secret
        self._tls = contexts(identity).client if identity else None
        self._streams = streams
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._sources: dict[str, _Source] = {}

    async def read(
        self,
        node: str,
        what: What,
        memory: memoryview,
        progress: Callable[[], None],
        came: Callable[[int, int], None] = lambda start, end: None,
        patience_s: float | None = None,
        is_unmapped: bool = False,
    ) -> None:
        """Fills ``memory`` with the whole content, which has its size.

        Nobody writes there any more when this returns or raises, also when it was cancelled.

        progress: called a few times a second, also while nothing comes: how long the node may be
            silent is decided here, and this process must not be taken for the one that hangs.
        came: called in any thread, with the first byte that has come and the one behind the last.
            Within ``PART_BYTES`` bytes come in order.
        patience_s: in place of the client's.
        is_unmapped: whether ``memory`` is of a mapping whose pages are not mapped yet: then they
            are, part by part, before bytes come.

        Raises WorkerDied when the node sends nothing more, DataError when the content may not be
        read, ContractError when the node refuses the connection or is unknown.
        """
        source = self._source(node)
        read = _Read(what, memory, asyncio.get_running_loop(), came, is_unmapped)
        source.begin(read)
        try:
            patience_s = self._patience_s if patience_s is None else patience_s
            await self._look_after(read, source, progress, patience_s)
        finally:
            source.end(read)
            while not read.finished.done():
                # Its threads leave at once, since their connections were shut. They are waited for
                # even where this is cancelled a second time: the memory is another's then.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(read.finished)
        if read.error is not None:
            raise read.error

    async def _look_after(
        self, read: _Read, source: _Source, progress: Callable[[], None], patience_s: float
    ) -> None:
        """Waits until a read is finished; notes an error where its node is silent for too long."""
        last_s = time.monotonic()  # the beginning, or when a byte came last from the node
        while True:
            await asyncio.wait({read.finished}, timeout=_LOOK_S)
            last_s = max(last_s, source.last_s)
            progress()
            if read.finished.done():
                return
            source.end_silent(self._silence_s)
            if time.monotonic() - last_s > patience_s:
                received = sum(part.start - part.first for part in read.parts)
                read.error = WorkerDied(
                    f"it sent {received} of {len(read.memory)} bytes and no more",
                    where=source.name,
                    why=source.trouble,
                    process=source.name,
                )
                return

    def check(self, node: str) -> None:
        """Raises ContractError for a node that is unknown."""
        if not self._addresses.get(node):
            raise ContractError("no address is known for its content", where=f"node {node}")

    def _source(self, node: str) -> _Source:
        if node not in self._sources:
            self.check(node)
            address = self._addresses[node]
            if self._tls is None:
                raise AddressError("TLS needs the run's identity", where=address)
            self._sources[node] = _Source(node, address, self._secret, self._tls, self._streams)
        return self._sources[node]

    def close(self) -> None:
        """Ends all connections. Reads under way fail."""
        for source in self._sources.values():
            source.close()


class _Read:
    """A content that is being read.

    whole      all parts have come
    over       no thread begins to write into its memory any more
    finished   it is whole or over, and no thread writes there

    A read is over when it is given up, since its content cannot be had, its node is silent for too
    long, the caller is cancelled or the client is closed; at the latest when the caller goes on.
    One of 0 bytes is over from the start.

    parts: the parts in which it comes.
    came, is_unmapped: see ``BulkClient.read``.
    error: why it failed; None while it has not.
    finished: a future of the event loop, set when it is finished.
    n_threads: how many write now.
    """

    def __init__(
        self,
        what: What,
        memory: memoryview,
        loop: asyncio.AbstractEventLoop,
        came: Callable[[int, int], None],
        is_unmapped: bool,
    ) -> None:
        self.what = what
        self.came = came
        self.is_unmapped = is_unmapped
        self.memory = memory
        self.parts: list[_Part] = []
        self.error: GcoreError | None = None
        self.finished: asyncio.Future[None] = loop.create_future()
        self.is_over = not len(memory)
        self.n_threads = 0
        self._loop = loop
        self._is_told = False

    def settle(self) -> None:
        """Tells the event loop, once, when it is finished.

        Called under the source's lock whenever that may be so: a part has come, the read is over,
        or a thread has left it.
        """
        is_whole = all(part.start == part.end for part in self.parts)
        if self.n_threads or self._is_told or not (self.is_over or is_whole):
            return
        self._is_told = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


class _Part:
    """The bytes of a read from ``first`` to before ``end``. Those before ``start`` have come."""

    def __init__(self, read: _Read, start: int, end: int) -> None:
        self.read = read
        self.first = start
        self.start = start
        self.end = end


class _Source:
    """One other node, as a client sees it: its connections, and what is still to be read there.

    name, address: of the node, and of its server.
    last_s: when the last byte came, by the monotonic clock.
    trouble: why a connection broke last.
    changed: guards all that threads share: the queue, its reads and parts, and each thread's part
        and socket. It is notified when a part is queued and when the source is closed.
    """

    def __init__(
        self, name: str, address: str, secret: bytes, tls: ssl.SSLContext, streams: int
    ) -> None:
        self.name = name
        self.address = address
        self.secret = secret
        self.tls = tls
        self.last_s = 0.0
        self.trouble = ""
        self.changed = threading.Condition()
        self.is_closed = False
        self._streams = streams
        self._parts = deque[_Part]()
        self._threads: list[_Stream] = []

    def begin(self, read: _Read) -> None:
        """Queues the parts of a read, and opens connections for those that no idle one takes."""
        nbytes = len(read.memory)
        with self.changed:
            read.parts = [
                _Part(read, start, min(nbytes, start + PART_BYTES))
                for start in range(0, nbytes, PART_BYTES)
            ]
            self._parts.extend(read.parts)
            if self.is_closed:
                self._end(read, _closed())
            n_idle = sum(thread.part is None for thread in self._threads)
            n_wanted = min(len(self._parts) - n_idle, self._streams - len(self._threads))
            for _ in range(n_wanted):
                thread = _Stream(self)
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no thread left
                    if not self._threads:
                        self._end(read, DataError("nothing can be read", why=str(error)))
                    break
                self._threads.append(thread)
            read.settle()
            self.changed.notify_all()

    def end(self, read: _Read) -> None:
        """Ends a read, in the middle of it too."""
        with self.changed:
            self._end(read)

    def _end(self, read: _Read, error: GcoreError | None = None) -> None:
        """Ends a read, under the lock: takes its parts from the queue, and shuts connections that
        bring one, so that their threads leave it. Of several errors the first counts.
        """
        if not read.is_over:
            read.error = read.error or error
        read.is_over = True
        self._parts = deque(part for part in self._parts if part.read is not read)
        for thread in self._threads:
            if thread.part is not None and thread.part.read is read:
                thread.shut()
        read.settle()

    def take(self, thread: _Stream) -> _Part | None:
        """Returns the next part for a thread; None when there was none for long: it ends then."""
        with self.changed:
            self.changed.wait_for(lambda: self._parts or self.is_closed, _IDLE_S)
            if self.is_closed or not self._parts:
                self._threads.remove(thread)
                return None
            thread.part = part = self._parts.popleft()
            thread.last_s = time.monotonic()
            part.read.n_threads += 1
            return part

    def leave(self, thread: _Stream, error: GcoreError | None) -> None:
        """A thread is done with its part: it came, its read failed, or its connection broke."""
        with self.changed:
            part = thread.part
            assert part is not None
            thread.part = None
            read = part.read
            read.n_threads -= 1
            if error is not None:
                self._end(read, error)
            if part.start < part.end and not read.is_over:
                self._parts.appendleft(part)
                self.changed.notify()
            read.settle()

    def end_silent(self, silence_s: float) -> None:
        """Ends connections on which a part should come and nothing does."""
        now_s = time.monotonic()
        with self.changed:
            for thread in self._threads:
                if thread.part is not None and now_s - thread.last_s > silence_s:
                    self.trouble = f"nothing came for {silence_s:g} s"
                    thread.shut()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            waiting = {part.read for part in self._parts}
            served = {thread.part.read for thread in self._threads if thread.part is not None}
            for read in waiting | served:
                self._end(read, _closed())
            for thread in self._threads:
                thread.shut()
            self.changed.notify_all()


def _closed() -> GcoreError:
    return WorkerDied("this node reads nothing more from others")


class _Stream(threading.Thread):
    """One connection to a node, and the thread that reads from it.

    part: what it reads now.
    last_s: when it last got a byte, or began, by the monotonic clock.
    """

    def __init__(self, source: _Source) -> None:
        super().__init__(name=f"bulk from {source.name}", daemon=True)
        self._source = source
        self._sock: socket.socket | None = None
        self._line: _Line | None = None
        self.part: _Part | None = None
        self.last_s = 0.0

    def shut(self) -> None:
        """Has this thread's socket fail. Called by other threads, under the source's lock."""
        if self._sock is not None:
            _shut(self._sock)

    def run(self) -> None:
        """Reads one part after the other, until there was none for long or the source is closed.

        A connection that broke is made anew for the next part. When no byte came over it, the
        thread pauses first, each time longer.
        """
        n_failures = 0  # since the last byte came
        while (part := self._source.take(self)) is not None:
            error: GcoreError | None = None
            start = part.start
            is_broken = False
            try:
                self._receive(part)
            except GcoreError as failure:
                error = failure
            except (OSError, ValueError) as failure:
                is_broken = True
                self._source.trouble = str(failure) or type(failure).__name__
            except Exception as failure:  # isolation point: it is raised where the read is awaited
                error = from_wire(to_wire(failure, self._source.name))
            if is_broken or error is not None:
                self._disconnect()
            n_failures = n_failures + 1 if is_broken and part.start == start else 0
            self._source.leave(self, error)
            if n_failures:
                time.sleep(PATIENT.pause_s(n_failures - 1))
        self._disconnect()

    def _receive(self, part: _Part) -> None:
        """Receives the rest of a part."""
        read = part.read

        def came(nbytes: int) -> None:
            part.start += nbytes
            read.came(part.start - nbytes, part.start)

        line = self._line or self._connected(read)
        line.send(encode(ReadRequest(read.what, part.start, part.end - part.start)))
        if read.is_unmapped and part.start == part.first:  # while the answer is on its way
            _map_pages(read.memory[part.first : part.end])
        answer = decoded(_ANSWER, line.receive(), "answer", self._source.name)
        if answer.failure is not None:
            raise from_wire(answer.failure)
        line.receive_content(read.memory[part.start : part.end], came)

    def _connected(self, read: _Read) -> _Line:
        """Connects to the node's server and greets it.

        Raises ContractError where one side refuses the other, OSError when the connection breaks.
        """
        source = self._source
        family, place = _place(source.address)
        self._hold(socket.socket(family, socket.SOCK_STREAM), read)
        assert self._sock is not None
        self._sock.settimeout(_GREETING_S)
        _set_up(self._sock)
        self._sock.connect(place)
        try:
            # The new object takes the old one's descriptor.
            secured = source.tls.wrap_socket(self._sock, do_handshake_on_connect=False)
            self._hold(secured, read)
            secured.do_handshake()
            line = _Line(secured, source.name, self._heard)
            line.greet_server(source.secret)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError):
            raise
        except ssl.SSLError as error:
            why = f"TLS: {error.reason or error}"
            raise ContractError("refused the connection", where=source.name, why=why) from None
        self._sock.settimeout(None)
        self._line = line
        return line

    def _heard(self) -> None:
        self.last_s = self._source.last_s = time.monotonic()

    def _hold(self, sock: socket.socket, read: _Read) -> None:
        """Keeps a socket where ``shut`` finds it; none is opened for a read that is over."""
        with self._source.changed:
            self._sock = sock
            if read.is_over:
                raise ConnectionError("nobody waits for it any more")

    def _disconnect(self) -> None:
        with self._source.changed:
            sock = self._sock
            self._sock = self._line = None
        if sock is not None:
            sock.close()
