"""Runs the page's server until it is stopped."""

from __future__ import annotations

from gcore_report import loopback
from gcore_report.page.runs import Run
from gcore_report.watch.app import make_app


def serve(run: Run, port: int) -> None:
    """Serves a run on loopback until SIGINT or SIGTERM; prints the address.

    port: 0 takes a free one.

    Raises AddressError when the port is taken.
    """
    loopback.serve(
        lambda door: make_app(run, door),
        port,
        name="watch",
        note="stop with Ctrl-C; the run goes on",
    )
