"""Serves the page of raters, on loopback and to holders of a token alone.

Nobody gets in but by the address that the command prints, whose token becomes a cookie. Every text
that a model or a person wrote is escaped by the template engine. The page loads nothing from
elsewhere, and its policy (Content-Security-Policy) forbids it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from gcore_human.raters import Refusal
from gcore_human.tasks import Task

#: Names by which a browser on this machine, or at the end of a tunnel to it, reaches the page.
HOSTS = ["127.0.0.1", "localhost"]
_LONGEST_NAME = 40
_MOST_BYTES = 1 << 16  # of a form
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    # With "no-referrer" browsers send "Origin: null" with a form, and it could not be checked.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_STATIC = {"page.css": "text/css", "page.js": "text/javascript"}

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
        return f"gcore_human_{self.port}"

    @property
    def rater_cookie(self) -> str:
        return f"gcore_rater_{self.port}"

    def opens(self, token: str) -> bool:
        """Compares in constant time."""
        return secrets.compare_digest(token.encode(), self.token.encode())

    def is_own(self, origin: str | None) -> bool:
        """Whether a form comes from this page.

        Browsers name the origin of a form; programs need not.
        """
        return origin is None or origin in {f"http://{host}:{self.port}" for host in HOSTS}


def make_app(task: Task, door: Door) -> Starlette:
    """Makes the application that shows a task to raters."""
    page = _Page(task, door)
    routes = [
        Route("/", page.show),
        Route("/name", page.name, methods=["POST"]),
        Route("/answer", page.answer, methods=["POST"]),
        Route("/undo", page.undo, methods=["POST"]),
        *(Route(f"/{name}", _static(name)) for name in _STATIC),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
            Middleware(BaseHTTPMiddleware, dispatch=page.guard),
        ],
    )


class _Page:
    """The handlers of the page."""

    def __init__(self, task: Task, door: Door) -> None:
        self._task = task
        self._door = door
        self._templates = Environment(
            loader=PackageLoader("gcore_human"), autoescape=True, undefined=StrictUndefined
        )

    async def guard(self, request: Request, go_on: Handler) -> Response:
        """Lets nobody in without the token, and gives every answer its headers."""
        response = await self._guarded(request, go_on)
        response.headers.update(_HEADERS)
        return response

    async def _guarded(self, request: Request, go_on: Handler) -> Response:
        door = self._door
        given = request.query_params.get("token")
        if request.method == "GET" and request.url.path == "/" and given is not None:
            if not door.opens(given):
                return self._refused(403, "the token in the address is not that of this page.")
            # The token leaves the address, and with it the browser's history.
            response = RedirectResponse("/", status_code=303)
            self._set_cookie(response, door.cookie, door.token)
            return response
        if not door.opens(request.cookies.get(door.cookie, "")):
            return self._refused(403, "open the address that the command printed.")
        if request.method == "POST" and not door.is_own(request.headers.get("origin")):
            return self._refused(403, "the form is not of this page.")
        return await go_on(request)

    async def show(self, request: Request) -> Response:
        rater = self._rater(request)
        if not rater:
            return self._rendered("name.html", title=self._task.title)
        return self._rendered(
            self._task.template,
            title=self._task.title,
            rater=rater,
            shown=self._task.next(rater),
            progress=self._task.progress(rater),
            last=self._task.last(rater),
        )

    async def name(self, request: Request) -> Response:
        """Takes a rater's name; an empty one lets another rater say theirs."""
        form = await _form(request)
        if form is None:
            return self._refused(413, "the form is too long.")
        name = " ".join(form.get("name", "").split())
        if len(name) > _LONGEST_NAME or not name.isprintable():
            return self._refused(422, f"a name has at most {_LONGEST_NAME} plain characters.")
        response = RedirectResponse("/", status_code=303)
        self._set_cookie(response, self._door.rater_cookie, quote(name))
        return response

    async def answer(self, request: Request) -> Response:
        return await self._taken(request, self._task.answer)

    async def undo(self, request: Request) -> Response:
        def undo(rater: str, form: Mapping[str, str]) -> None:
            number = form.get("number", "")
            self._task.undo(rater, int(number) if number.isdecimal() else 0)

        return await self._taken(request, undo)

    async def _taken(
        self, request: Request, take: Callable[[str, Mapping[str, str]], None]
    ) -> Response:
        """Has a form taken, and shows what comes next; or says why it was not."""
        rater = self._rater(request)
        form = await _form(request)
        if form is None:
            return self._refused(413, "the form is too long.")
        if not rater:
            return self._refused(422, "say your name first.")
        try:
            take(rater, form)
        except Refusal as error:
            return self._refused(error.status, str(error))
        except OSError as error:
            return self._refused(507, f"it could not be written: {error.strerror}. Try again.")
        return RedirectResponse("/", status_code=303)

    def _rater(self, request: Request) -> str:
        return unquote(request.cookies.get(self._door.rater_cookie, ""))

    def _set_cookie(self, response: Response, name: str, value: str) -> None:
        response.set_cookie(name, value, httponly=True, samesite="strict", path="/")

    def _refused(self, status: int, what: str) -> Response:
        return self._rendered("refused.html", status, title="Not taken", what=what)

    def _rendered(self, template: str, status: int = 200, **values: Any) -> Response:
        content = self._templates.get_template(template).render(**values)
        return HTMLResponse(content, status_code=status)


def _static(name: str) -> Handler:
    content = files("gcore_human").joinpath("static", name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, media_type=_STATIC[name])

    return serve


async def _form(request: Request) -> dict[str, str] | None:
    """Reads a form; None for one that is too long."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _MOST_BYTES:
            return None
    return dict(parse_qsl(content.decode("utf-8", "replace"), keep_blank_values=True))
