"""Runs the page's server until it is stopped."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket

import uvicorn

from gcore_core.contract.errors import AddressError
from gcore_report.page.runs import Run
from gcore_report.watch.app import Door, make_app

_HOST = "127.0.0.1"  # never another: the page has no encryption of its own


def serve(run: Run, port: int) -> None:
    """Serves a run on loopback until SIGINT or SIGTERM; prints the address.

    port: 0 takes a free one.

    Raises AddressError when the port is taken.
    """
    with _listening(port) as listener:
        door = Door(token=secrets.token_urlsafe(24), port=listener.getsockname()[1])
        config = uvicorn.Config(
            make_app(run, door),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            access_log=False,  # it would show the token
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        print(f"open http://{_HOST}:{door.port}/?token={door.token}", flush=True)
        print("stop with Ctrl-C; the run goes on", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        raise AddressError(
            f"port {port} is taken." if is_taken else f"port {port} cannot be used.",
            where="--port",
            why=f"the system says: {error.strerror}",
            todo="give another port, or none for a free one",
        ) from error
    return listener
