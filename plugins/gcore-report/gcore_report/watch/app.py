"""The page of a run that goes on: what it serves, and what its buttons do.

Who gets in is the affair of ``gcore_report.loopback``. The page loads nothing from elsewhere,
and its policy forbids it. The buttons post to this page alone; a page of somebody else cannot press
them, since it neither has the cookie nor comes from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gcore_report.loopback import Door, guarded
from gcore_report.page.document import PANELS, live_page
from gcore_report.page.runs import Run
from gcore_report.watch import answers, tokens
from gcore_report.watch.asking import ask_to_save, ask_to_stop, is_alive
from gcore_report.watch.rows import NewRows

#: How often the files are looked at, while somebody looks at the page.
LOOK_S = 1.0

Asked = TypeVar("Asked")


def make_app(run: Run, door: Door, look_s: float = LOOK_S) -> Starlette:
    """Makes the application that shows a run."""
    site = _Site(run, look_s)
    routes = [
        Route("/", site.page),
        Route("/data/{panel}", site.data),
        Route("/answers", site.find_answers),
        Route("/answers/{step:int}/{line:int}", site.answer),
        Route("/pictures", site.find_pictures),
        Route("/tokens", site.find_tokens),
        Route("/tokens/{step:int}/{ordinal:int}/{sample:int}", site.record),
        Route("/events", site.events),
        Route("/save", site.save, methods=["POST"]),
        Route("/stop", site.stop, methods=["POST"]),
    ]
    return guarded(routes, door)


class _Site:
    """The handlers of the page."""

    def __init__(self, run: Run, look_s: float) -> None:
        self._run = run
        self._look_s = look_s
        self._answers = answers.AllAnswers(run.directory)
        self._tokens = tokens.AllTokens(run.directory)

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
        return await _json(lambda: self._content(panel))

    def _content(self, panel: str) -> Any:
        """Returns the data of a panel; of what has no end, what its fields offer."""
        if panel == "answers":
            return self._answers.facts()
        if panel == "tokens":
            return self._tokens.facts()
        if panel == "pictures":
            return self._answers.picture_facts()
        _, make = PANELS[panel]
        return make(self._runs())

    async def find_answers(self, request: Request) -> Response:
        return await _found(request, answers.Asked, self._answers.find)

    async def answer(self, request: Request) -> Response:
        return await _json(lambda: self._answers.read(**request.path_params))

    async def find_pictures(self, request: Request) -> Response:
        return await _found(request, answers.AskedPictures, self._answers.find_pictures)

    async def find_tokens(self, request: Request) -> Response:
        return await _found(request, tokens.Asked, self._tokens.find)

    async def record(self, request: Request) -> Response:
        return await _json(lambda: self._tokens.read(**request.path_params))

    async def events(self, request: Request) -> Response:
        since = request.headers.get("last-event-id", "")
        return StreamingResponse(self._events(since), media_type="text/event-stream")

    async def _events(self, since: str = "") -> AsyncIterator[bytes]:
        """Yields an event for each new row, and one when the run begins or ends.

        ``step``: the row of ``metrics.jsonl``, as it stands there. ``state``: whether the run goes
        on. ``again``: the run went back to a checkpoint, so the page should be loaded anew.

        since: the id of the last event that a page has had, which its browser says when it comes
            again after its connection was lost.
        """
        directory = self._run.directory
        rows = NewRows(directory, since)
        alive: bool | None = None
        while True:
            now = is_alive(directory)
            if now != alive:
                alive = now
                yield _event("state", msgspec.json.encode({"alive": alive}), rows.mark)
            for line in rows.read():
                if rows.is_replaced:
                    yield _event("again", b"{}")
                    break
                yield _event("step", line, rows.mark)
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


async def _found(request: Request, kind: type[Asked], find: Callable[[Asked], Any]) -> Response:
    """Answers a search; says with status 400 what is wrong with its words."""
    try:
        asked = msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        return PlainTextResponse(f"It cannot be searched for: {error}", 400)
    return await _json(lambda: find(asked))


async def _json(make: Callable[[], Any]) -> Response:
    """Makes an answer in a thread, since it reads files; 404 for what is not in them."""
    try:
        content = await asyncio.to_thread(lambda: msgspec.json.encode(make()))
    except KeyError:
        return PlainTextResponse("The run does not have it, or has it no longer.", 404)
    return Response(content, media_type="application/json")


def _event(name: str, data: bytes, mark: str = "") -> bytes:
    number = f"id: {mark}\n".encode() if mark else b""
    return number + b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _said(asked: bool, text: str) -> Response:
    if not asked:
        return PlainTextResponse("The run does not go on, on this machine.", 409)
    return PlainTextResponse(text)
