"""Keeps the site of a run open while the run goes back to a checkpoint.

A run that loses a trainer or a controller begins again from its newest checkpoint, with new
workers. The node agents stay. Nothing else outlives the attempt: every worker has ended and the
stores are empty before the next one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

from gcore_core.contract.errors import GcoreError, WorkerDied
from gcore_core.contract.factories import build
from gcore_core.contract.launching import Launcher, Servable, Site
from gcore_core.run.homecoming import Homecoming
from gcore_core.run.jobs import Job
from gcore_core.runtime.messages import CLEAR, Nothing

log = logging.getLogger(__name__)
_CLEAR_S = 20.0  # an agent has so long to end its workers; else it is ended with them


class _Switch:
    """Answers as the supervisor of the present attempt; between two attempts there is none."""

    name = "supervisor"

    def __init__(self) -> None:
        self.current: Servable | None = None

    def progress(self) -> None:
        if self.current is not None:
            self.current.progress()

    async def handle(
        self, method: str, body: Any, call: Any, emit: Callable[[bytes], Awaitable[None]]
    ) -> bytes:
        if self.current is None:
            raise WorkerDied("this attempt of the run is over", where=self.name, process=self.name)
        return await self.current.handle(method, body, call, emit)


class KeptSite:
    """Opens the site of a job and closes it, as a context manager."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._switch = _Switch()
        self._stack = contextlib.AsyncExitStack()
        self._site: Site | None = None
        self.homecoming: Homecoming | None = None  # of the site that is open

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._switch.current = None
        await self._close(error)

    async def _close(self, error: BaseException | None) -> None:
        """Closes the site; a launcher sees the error that it is closed with."""
        self._site = self.homecoming = None
        await self._stack.__aexit__(type(error) if error else None, error, None)

    async def open(self, supervisor: Servable) -> Site:
        """Returns the site, on which this supervisor answers from now on."""
        self._switch.current = supervisor
        if self._site is None:
            site = await self._stack.enter_async_context(self._opened())
            self.homecoming = await self._stack.enter_async_context(
                Homecoming(site, self._job.directory, self._job.placed.host)
            )
            self._site = site
        return self._site

    def place(self, job: Job) -> None:
        """Has the next site opened for a job that is placed anew. The present one is closed."""
        self._job = job

    def _opened(self) -> AbstractAsyncContextManager[Site]:
        launcher: Launcher = self._job.launcher or build(self._job.plan.factory("launcher"))
        where = self._job.where()
        logs = self._job.directory / "logs"
        return launcher.site(where, self._switch, logs)

    def has_agent(self, process: str) -> bool:
        """Whether a process is the agent of one of the site's nodes."""
        return self._site is not None and process in self._site.nodes

    async def clear(self, *, is_kept: bool) -> bool:
        """Ends every worker of an attempt that has failed, and empties the store.

        Returns whether the site is still open. It is closed where that does not succeed, and where
        the workers are part of this process.

        is_kept: whether the site is to stay open.
        """
        self._switch.current = None
        site, self._site = self._site, None
        if site is not None and site.has_processes and is_kept:
            try:
                async with asyncio.timeout(_CLEAR_S):
                    agents = (node.agent for node in site.nodes.values())
                    await asyncio.gather(*(agent.call(CLEAR, Nothing()) for agent in agents))
                    if self.homecoming is not None:
                        # Before the journals go back to the checkpoint: what comes now is undone.
                        await self.homecoming.drain()
                self._site = site
                return True
            except (GcoreError, OSError, TimeoutError) as error:
                log.warning("the node agents are not kept: %r", error)
        # A launcher that tells its nodes how a run ended sees that this one has not ended well.
        await self._close(
            WorkerDied("the run goes on from its newest checkpoint", where="supervisor")
        )
        return False
