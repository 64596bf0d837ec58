"""Lets a node agent leave a run on purpose: it asks, and goes on with its work until it is let go.

    first SIGTERM     it asks its supervisor, which has the run do without it and then ends it
                      or refuses, for a reason; then it stays
    second SIGTERM    it ends with all that it has started: a machine that the run has lost
    the deadline      the same, when it has asked and was not let go in time

Only an agent of a machine that may leave does so. Any other ends at the first signal.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Callable

from gcore_core.runtime.messages import LEAVE, LEAVING, STAY, Nothing, Stay
from gcore_core.runtime.rpc.service import Call, Service

log = logging.getLogger(__name__)
#: What a process sends to the agent that it has started, to pass a SIGTERM on. Whoever signals all
#: processes of a machine reaches both. Then the agent gets two signals, and counts them as one.
SIGTERM_PASSED_ON = signal.SIGRTMIN + signal.SIGTERM


class Leaving:
    """Is an agent's side of leaving.

    within_s: from the first asking on, until the agent ends anyhow.
    end: ends the agent.
    """

    def __init__(self, within_s: float, end: Callable[[], None]) -> None:
        self._within_s = within_s
        self._end = end
        self._ways = {signal.SIGTERM: 0, SIGTERM_PASSED_ON: 0}
        self._is_asking = asyncio.Event()
        self._answered = asyncio.Event()  # of the latest asking
        self._deadline: asyncio.TimerHandle | None = None

    def register(self, service: Service) -> None:
        service.add(LEAVE, self.leave)
        service.add(LEAVING, self.leaving)
        service.add(STAY, self.stay)

    def handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in self._ways:
            loop.add_signal_handler(number, self.signalled, number)

    def signalled(self, number: int) -> None:
        """Takes a SIGTERM that came directly, or one that was passed on.

        One SIGTERM may come by both ways. It counts once.
        """
        before = max(self._ways.values())
        self._ways[number] += 1
        now = max(self._ways.values())
        if now == before:  # it has come by the other way already
            return
        if now == 1:
            self._ask()
        else:
            self._end()

    def _ask(self) -> None:
        if self._is_asking.is_set():
            return
        log.info("it asks to leave the run, and ends after %g s at the latest", self._within_s)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._within_s, self._late)
        self._answered = asyncio.Event()
        self._is_asking.set()

    def _late(self) -> None:
        log.warning("it was not let go within %g s, and ends", self._within_s)
        self._end()

    async def leave(self, request: Nothing, call: Call) -> Nothing:
        """Has the agent ask to leave, as the first SIGTERM does."""
        self._ask()
        return Nothing()

    async def leaving(self, request: Nothing, call: Call) -> AsyncGenerator[Nothing, None]:
        """Streams an item each time that the agent asks.

        Whoever asks later for this stream is told, too, while the agent has no answer.
        """
        while True:
            await self._is_asking.wait()
            answered = self._answered
            yield Nothing()
            await answered.wait()

    async def stay(self, request: Stay, call: Call) -> Nothing:
        """Takes a refusal."""
        log.warning("it does not leave the run: %s", request.why)
        self.close()
        self._is_asking.clear()
        self._answered.set()
        return Nothing()

    def close(self) -> None:
        """Forgets the deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
