"""A wire in front of a bulk server: it counts, cuts, alters and holds what comes back."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache


def make_identity() -> bytes:
    """Makes a key and its certificate, PEM, with the openssl program."""
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=run"
    command = ["openssl", *words.split(), "-keyout", "-", "-out", "-"]
    return subprocess.run(command, check=True, capture_output=True).stdout


@cache
def shared_identity() -> bytes:
    """Returns an identity for tests to which any will do."""
    return make_identity()


def free_address() -> str:
    """Returns an address of this machine at which nothing is; no two of them are the same."""
    host = ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])
    return f"tls:{host}:{free_port(host)}"


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass
class Wire:
    """Listens at ``address`` and leads to ``target``, until its block ends. It decrypts nothing.

    cut_after: the first connection ends when so many bytes have come back over it.
    flip_at: of the first connection, this byte that comes back is another one.
    hold_after: so many bytes come back over each connection, and then no more until ``go_on``.
    """

    address: str
    target: str
    cut_after: int | None = None
    flip_at: int | None = None
    hold_after: int | None = None
    connections: int = 0
    nbytes: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)
    holds: threading.Event = field(default_factory=threading.Event)
    _sockets: list[socket.socket] = field(default_factory=list)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Wire]:
        listener = socket.socket()
        listener.bind(_place(self.address))
        listener.listen()
        self._start(self._accept, listener)
        self._sockets.append(listener)
        try:
            yield self
        finally:
            self.cut()

    def cut(self) -> None:
        """Ends every connection and takes no other, as when the process at ``target`` dies."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # Only now: what is held must not get through before the connection ends.
        self.hold_after = None
        self.go_on.set()
        for sock in list(self._sockets):
            sock.close()

    def _start(self, work: object, *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket()
                self._sockets += [near, far]
                self.connections += 1
                try:
                    far.connect(_place(self.target))
                except OSError:
                    near.close()
                    continue
                self._start(self._forth, near, far)
                self._start(self._back, far, near, self.connections == 1)

    def _forth(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        _end(source, target)

    def _back(self, source: socket.socket, target: socket.socket, is_first: bool) -> None:
        came = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if is_first and self.flip_at is not None and 0 <= self.flip_at - came < len(data):
                    data[self.flip_at - came] ^= 1
                came += len(data)
                self.nbytes += len(data)
                if is_first and self.cut_after is not None and came > self.cut_after:
                    break
                if self.hold_after is not None and came > self.hold_after:
                    self.holds.set()
                    self.go_on.wait()
                target.sendall(data)
        _end(source, target)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tls:").rpartition(":")
    return host, int(port)


def _end(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
