"""A run that is to end: what takes long, and leaves the trainers' state alone, is given up for
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The run is to end, and its trainers hold the state of the end of a step."""


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives. Ends it and raises Stopped when ``stopping`` is set before."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Stopped
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
