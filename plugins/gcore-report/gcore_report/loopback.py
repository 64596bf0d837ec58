"""Serves a page on loopback to holders of its token alone; for plugins that have a page.

A plugin makes its application with ``guarded`` and runs it with ``serve``. Then:

- The page is on 127.0.0.1 and nowhere else; no argument changes that.
- Nobody gets in but by the address that ``serve`` prints. Its token is drawn at each start, is
  compared in constant time, becomes a cookie at the first visit, and leaves the address.
- A request whose ``Host`` is neither 127.0.0.1 nor localhost is refused: a site elsewhere may have
  its own name lead here (DNS rebinding).
- A request that changes something is refused where its ``Origin`` is another page's.
- Every answer has headers that forbid to keep it, to frame it and to guess its type. Two that show
  nothing of the page have none: the refusal of a wrong ``Host``, and the bare words after an error
  of the application.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gcore_core.contract.errors import AddressError

__all__ = ["HEADERS", "HOSTS", "Door", "guarded", "serve", "set_cookie"]

#: Names by which a browser on this machine, or at the end of a tunnel to it, reaches a page.
HOSTS = ("127.0.0.1", "localhost")
#: Headers of every answer that passes ``_Guard``, unless the answer has its own.
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    # With "no-referrer" browsers send "Origin: null" with a form, and it could not be checked.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_HOST = "127.0.0.1"  # never another: the page has no encryption of its own
_TOKEN_BYTES = 24
_READS = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True, kw_only=True)
class Door:
    """Says who may see a page.

    name: of the page, a part of its cookie's name, such as "watch".
    token: what the address must show once, and the cookie from then on.
    port: where the page is; cookies of one host are shared by all its ports, so the cookie's name
        has it.
    may_omit_origin: whether a request that changes something may come without ``Origin``. Browsers
        always send one; programs do not.
    """

    name: str
    token: str
    port: int
    may_omit_origin: bool = False

    @property
    def cookie(self) -> str:
        return f"gcore_{self.name}_{self.port}"

    def opens(self, token: str) -> bool:
        """Compares in constant time."""
        return secrets.compare_digest(token.encode(), self.token.encode())

    def is_own(self, origin: str | None) -> bool:
        """Says whether a request to change something comes from this page."""
        if origin is None:
            return self.may_omit_origin
        return origin in {f"http://{host}:{self.port}" for host in HOSTS}


def guarded(
    routes: Sequence[BaseRoute],
    door: Door,
    *,
    headers: Mapping[str, str] | None = None,
    refused: Callable[[str], Response] | None = None,
) -> Starlette:
    """Makes an application that lets nobody in without the door's token.

    headers: of every answer besides ``HEADERS``, such as a policy.
    refused: makes the answer, of status 403, to who is not let in, from a sentence that says why;
        plain text unless given.
    """
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
            Middleware(
                _Guard,
                door=door,
                headers={**HEADERS, **(headers or {})},
                refused=refused or _refused,
            ),
        ],
    )


def set_cookie(response: Response, name: str, value: str) -> None:
    """Sets a cookie that neither scripts nor other sites get."""
    response.set_cookie(name, value, httponly=True, samesite="strict", path="/")


def serve(
    make_app: Callable[[Door], ASGIApp],
    port: int,
    *,
    name: str,
    note: str,
    may_omit_origin: bool = False,
    patience_s: int = 1,
) -> None:
    """Serves a page on loopback until SIGINT or SIGTERM; prints its address.

    make_app: gets the door, with a fresh token and the port, and makes the application by
        ``guarded``.
    port: 0 takes a free one.
    name, may_omit_origin: see ``Door``.
    note: what is printed after the address, such as "stop with Ctrl-C".
    patience_s: how long open requests may take to end after the signal.

    Raises AddressError when the port is taken or not this user's to use.
    """
    with _listening(port) as listener:
        door = Door(
            name=name,
            token=secrets.token_urlsafe(_TOKEN_BYTES),
            port=listener.getsockname()[1],
            may_omit_origin=may_omit_origin,
        )
        config = uvicorn.Config(
            make_app(door),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            access_log=False,  # it would show the token
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=patience_s,
        )
        print(f"open http://{_HOST}:{door.port}/?token={door.token}", flush=True)
        print(note, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


class _Guard:
    """Stands before the routes: refuses strangers, and gives every answer its headers.

    It works on ASGI's messages, not on responses, so that an answer without an end, such as
    server-sent events, passes piece by piece.
    """

    def __init__(
        self,
        app: ASGIApp,
        door: Door,
        headers: Mapping[str, str],
        refused: Callable[[str], Response],
    ) -> None:
        self._app = app
        self._door = door
        self._headers = headers
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # an unanswered WebSocket is closed by the server

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        app = self._answer(Request(scope)) or self._app
        await app(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """Returns the answer that the application does not give; None for a request that it gets.

        That is a refusal or, after the right token in the address, the cookie and a redirection.
        """
        door = self._door
        given = request.query_params.get("token")
        if request.method == "GET" and request.url.path == "/" and given is not None:
            if not door.opens(given):
                return self._refused("the token in the address is not that of this page.")
            # The token leaves the address, and with it the browser's history.
            response = RedirectResponse("/", status_code=303)
            set_cookie(response, door.cookie, door.token)
            return response
        if not door.opens(request.cookies.get(door.cookie, "")):
            return self._refused("open the address that the command printed.")
        if request.method not in _READS and not door.is_own(request.headers.get("origin")):
            return self._refused("the request is not of this page.")
        return None


def _refused(why: str) -> Response:
    return PlainTextResponse(f"Not shown: {why}", 403)


def _listening(port: int) -> socket.socket:
    """Returns a socket that listens on loopback. Raises AddressError for a port it cannot have."""
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
