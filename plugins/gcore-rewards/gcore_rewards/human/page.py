"""Serves the page of raters, on loopback and to holders of a token alone.

Who gets in is the affair of ``gcore_core.kits.loopback``. Every text that a model or a person wrote
is escaped by the template engine. The page loads nothing from elsewhere, and its policy
(Content-Security-Policy) forbids it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from gcore_core.kits.loopback import Door, guarded, set_cookie
from gcore_rewards.human.raters import Refusal
from gcore_rewards.human.tasks import Task

_LONGEST_NAME = 40
_MOST_BYTES = 1 << 16  # of a form
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
}
_STATIC = {"page.css": "text/css", "page.js": "text/javascript"}

Handler = Callable[[Request], Awaitable[Response]]


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
    return guarded(routes, door, headers=_HEADERS, refused=lambda why: page.refused(403, why))


class _Page:
    """The handlers of the page."""

    def __init__(self, task: Task, door: Door) -> None:
        self._task = task
        self._rater_cookie = f"gcore_rater_{door.port}"
        self._templates = Environment(
            loader=PackageLoader("gcore_rewards.human"), autoescape=True, undefined=StrictUndefined
        )

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
            return self.refused(413, "the form is too long.")
        name = " ".join(form.get("name", "").split())
        if len(name) > _LONGEST_NAME or not name.isprintable():
            return self.refused(422, f"a name has at most {_LONGEST_NAME} plain characters.")
        response = RedirectResponse("/", status_code=303)
        set_cookie(response, self._rater_cookie, quote(name))
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
            return self.refused(413, "the form is too long.")
        if not rater:
            return self.refused(422, "say your name first.")
        try:
            take(rater, form)
        except Refusal as error:
            return self.refused(error.status, str(error))
        except OSError as error:
            return self.refused(507, f"it could not be written: {error.strerror}. Try again.")
        return RedirectResponse("/", status_code=303)

    def _rater(self, request: Request) -> str:
        return unquote(request.cookies.get(self._rater_cookie, ""))

    def refused(self, status: int, what: str) -> Response:
        return self._rendered("refused.html", status, title="Not taken", what=what)

    def _rendered(self, template: str, status: int = 200, **values: Any) -> Response:
        content = self._templates.get_template(template).render(**values)
        return HTMLResponse(content, status_code=status)


def _static(name: str) -> Handler:
    content = files("gcore_rewards.human").joinpath("static", name).read_bytes()

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
