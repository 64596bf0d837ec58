"""Runs commands on other machines of a test, as ssh does: over the network that the test cuts.

    remote_shell.py serve                 on each machine
    remote_shell.py HOST COMMAND...       on any; standard input and output, and the exit code

Like ssh, a client whose link is cut waits, and a server whose client is gone only ends the standard
input of what it runs. Unlike ssh it asks nobody who he is: it is for networks of one test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import Any, BinaryIO

PORT = 2222
_FRAME = struct.Struct(">BI")  # what: 1 output, 2 errors, 0 the exit code; and how many bytes
_CONNECT_S = 5.0
_CLIENT_FAILED = 255  # as ssh has it


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.create_server(("0.0.0.0", PORT)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    stream = connection.makefile("rb")
    request = json.loads(stream.readline())
    lock = threading.Lock()

    def send(what: int, content: bytes) -> None:
        with lock, contextlib.suppress(OSError):
            connection.sendall(_FRAME.pack(what, len(content)) + content)

    try:
        process = subprocess.Popen(
            request["words"],
            cwd=request["directory"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        send(2, f"{request['words'][0]}: {error.strerror}\n".encode())
        send(0, b"127")
        connection.close()
        return
    threading.Thread(target=_pass_on, args=(stream, process.stdin), daemon=True).start()
    readers = [
        threading.Thread(target=_frame, args=(file, what, send), daemon=True)
        for what, file in ((1, process.stdout), (2, process.stderr))
    ]
    for reader in readers:
        reader.start()
    code = process.wait()
    for reader in readers:
        reader.join()
    send(0, str(code if code >= 0 else 128 - code).encode())
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _pass_on(stream: BinaryIO, file: BinaryIO) -> None:
    """Copies what comes from the client to the command's input, and then ends the input."""
    with contextlib.suppress(OSError), file:
        while part := stream.read1(65536):  # type: ignore[attr-defined]
            file.write(part)
            file.flush()


def _frame(file: BinaryIO, what: int, send: Any) -> None:
    while part := file.read1(65536):  # type: ignore[attr-defined]
        send(what, part)


def call(host: str, words: list[str]) -> int:
    try:
        connection = socket.create_connection((host, PORT), _CONNECT_S)
    except OSError as error:
        print(f"connect to host {host} port {PORT}: {error}", file=sys.stderr)
        return _CLIENT_FAILED
    connection.settimeout(None)
    request = {"words": words, "directory": os.getcwd()}
    connection.sendall(json.dumps(request).encode() + b"\n")

    def pass_input() -> None:
        with contextlib.suppress(OSError):
            while part := os.read(0, 65536):
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=pass_input, daemon=True).start()
    stream = connection.makefile("rb")
    with contextlib.suppress(OSError):
        while len(head := stream.read(_FRAME.size)) == _FRAME.size:
            what, nbytes = _FRAME.unpack(head)
            content = stream.read(nbytes)
            if what == 0:
                return int(content)
            os.write(what, content)
    print(f"connection to {host} closed", file=sys.stderr)
    return _CLIENT_FAILED


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    code = call(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may wait for input for ever
