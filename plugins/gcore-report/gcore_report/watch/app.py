"""The page of a run that goes on: who gets in, what it serves, and what its buttons do.

Nobody gets in but by the address that the command prints, whose token becomes a cookie. The page
loads nothing from elsewhere, and its policy forbids it. The buttons post to this page alone; a page
of somebody else cannot press them, since it neither has the cookie nor comes from here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from gcore_core.kits.runs import ask_to_save, ask_to_stop, is_alive
from gcore_report.page.document import PANELS, live_page
from gcore_report.page.runs import Run
from gcore_report.watch.rows import NewRows

#: Names by which a browser on this machine, or at the end of a tunnel to it, reaches the page.
HOSTS = ["127.0.0.1", "localhost"]
#: How often the files are looked at, while somebody looks at the page.
LOOK_S = 1.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Door:
    """Says who may see the page.

    token: what the address must show once, and the cookie from then on.
    port: where the page is; cookies of one host are shared by all its ports, so it names them.
    """

    token: str
    port: int

    @property
    def cookie(self) -> str:
        return f"gcore_watch_{self.port}"

    def opens(self, token: str) -> bool:
        """Compares in constant time."""
        return secrets.compare_digest(token.encode(), self.token.encode())

    def is_own(self, origin: str | None) -> bool:
        """Whether a request to change something comes from this page."""
        return origin in {f"http://{host}:{self.port}" for host in HOSTS}

    def guarded(self, handler: Handler) -> Handler:
        """Returns a handler that lets nobody in without the token."""

        async def handle(request: Request) -> Response:
            response = await self._answer(request, handler)
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return handle

    async def _answer(self, request: Request, handler: Handler) -> Response:
        given = request.query_params.get("token")
        if request.method == "GET" and request.url.path == "/" and given is not None:
            if not self.opens(given):
                return _refused("the token in the address is not that of this page.")
            # The token leaves the address, and with it the browser's history.
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return response
        if not self.opens(request.cookies.get(self.cookie, "")):
            return _refused("open the address that the command printed.")
        if request.method == "POST" and not self.is_own(request.headers.get("origin")):
            return _refused("the request is not of this page.")
        return await handler(request)


def make_app(run: Run, door: Door, look_s: float = LOOK_S) -> Starlette:
    """Makes the application that shows a run."""
    site = _Site(run, look_s)
    routes = [
        Route("/", door.guarded(site.page)),
        Route("/data/{panel}", door.guarded(site.data)),
        Route("/events", door.guarded(site.events)),
        Route("/save", door.guarded(site.save), methods=["POST"]),
        Route("/stop", door.guarded(site.stop), methods=["POST"]),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    return Starlette(routes=routes, middleware=[hosts])


class _Site:
    """The handlers of the page."""

    def __init__(self, run: Run, look_s: float) -> None:
        self._run = run
        self._look_s = look_s

    def _runs(self) -> Sequence[Run]:
        """Returns the run, opened anew: it has gone on since it was read."""
        return [Run(self._run.directory, self._run.label)]

    async def page(self, request: Request) -> Response:
        page, policy = await asyncio.to_thread(live_page, self._runs())
        headers = {"Content-Security-Policy": f"{policy}; connect-src 'self'"}
        return Response(page, media_type="text/html", headers=headers)

    async def data(self, request: Request) -> Response:
        panel = request.path_params["panel"]
        if panel not in PANELS:
            return PlainTextResponse("no such panel", 404)
        _, make = PANELS[panel]
        content = await asyncio.to_thread(lambda: msgspec.json.encode(make(self._runs())))
        return Response(content, media_type="application/json")

    async def events(self, request: Request) -> Response:
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        """Yields an event for each new row, and one when the run begins or ends.

        ``step``: the row of ``metrics.jsonl``, as it stands there. ``state``: whether the run goes
        on. ``again``: the run went back to a checkpoint, so the page should be loaded anew.
        """
        directory = self._run.directory
        rows = NewRows(directory)
        alive: bool | None = None
        while True:
            now = is_alive(directory)
            if now != alive:
                alive = now
                yield _event("state", msgspec.json.encode({"alive": alive}))
            for line in rows.read():
                if rows.is_replaced:
                    yield _event("again", b"{}")
                    break
                yield _event("step", line)
            await asyncio.sleep(self._look_s)

    async def save(self, request: Request) -> Response:
        try:
            asked = ask_to_save(self._run.directory)
        except OSError as error:
            return PlainTextResponse(f"it cannot be asked: {error.strerror}.", 507)
        return _said(asked, "A checkpoint is saved at the end of the next step.")

    async def stop(self, request: Request) -> Response:
        asked = ask_to_stop(self._run.directory)
        return _said(asked, "The run saves its state and ends.")


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _said(asked: bool, text: str) -> Response:
    if not asked:
        return PlainTextResponse("The run does not go on, on this machine.", 409)
    return PlainTextResponse(text)


def _refused(why: str) -> Response:
    return PlainTextResponse(f"Not shown: {why}", 403)
