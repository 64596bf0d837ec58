"""Runs the page's server until it is stopped."""

from __future__ import annotations

from gcore_core.kits import loopback
from gcore_rewards.human.page import make_app
from gcore_rewards.human.tasks import Task


def serve(task: Task, port: int) -> None:
    """Serves a task on loopback until SIGINT or SIGTERM; prints the address.

    port: 0 takes a free one.

    Raises AddressError when the port is taken.
    """
    loopback.serve(
        lambda door: make_app(task, door),
        port,
        name="human",
        note="stop with Ctrl-C; what was answered is kept",
        may_omit_origin=True,  # a program may answer, too: the cookie is enough
        patience_s=2,
    )
