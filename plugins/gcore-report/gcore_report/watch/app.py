"""The page of a run that goes on: what it serves, and what its buttons do.

Who gets in is the affair of ``gcore_core.kits.loopback``. The page loads nothing from elsewhere,
and its policy forbids it. The buttons post to this page alone; a page of somebody else cannot press
them, since it neither has the cookie nor comes from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gcore_core.kits.loopback import Door, guarded
from gcore_core.kits.runs import ask_to_save, ask_to_stop, is_alive
from gcore_report.page.document import PANELS, live_page
from gcore_report.page.runs import Run
from gcore_report.watch.rows import NewRows

#: How often the files are looked at, while somebody looks at the page.
LOOK_S = 1.0


def make_app(run: Run, door: Door, look_s: float = LOOK_S) -> Starlette:
    """Makes the application that shows a run."""
    site = _Site(run, look_s)
    routes = [
        Route("/", site.page),
        Route("/data/{panel}", site.data),
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
