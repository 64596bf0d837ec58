"""Takes over a node agent from a supervisor that was killed: the parts for a launcher.

A launcher has the guard remember a ``KeptAgent`` (``keep``). The next supervisor's launcher asks
the guard for it (``kept_by``). If the agent lives, the launcher holds its lease (``lease_held``)
and has it end what is left of the attempt before (``clear_adopted``). If it does not live, or does
not answer in time, another one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterable

import msgspec

from gcore_core.contract.errors import GcoreError
from gcore_core.contract.launching import Guard, Peer
from gcore_core.runtime.messages import CLEAR, HOLD_LEASE, HoldLease, Nothing
from gcore_core.runtime.process.leftovers import StartedProcess, identify_process, is_running
from gcore_core.runtime.process.spawn import Process, send_signal
from gcore_core.runtime.store.server import StoreSpec

log = logging.getLogger(__name__)
_ANSWER_S = 5.0  # an agent that lives answers within these
_CLEAR_S = 20.0  # and has so long to end its workers


class KeptAgent(msgspec.Struct, frozen=True, kw_only=True):
    """Says where the agent of a supervisor that was killed is, and what it was started with.

    process: the agent.
    meeting: the run's private directory, with its sockets.
    addresses: name of every process of the run, with the supervisor's -> its address.
    secret: the run's.
    store: the settings of the agent's store.
    """

    process: StartedProcess
    meeting: str
    addresses: dict[str, str]
    secret: bytes
    store: StoreSpec


def keep(guard: Guard, kept: KeptAgent) -> None:
    """Has the guard remember an agent."""
    guard.remember(msgspec.msgpack.encode(kept))


def kept_by(guard: Guard, names: Iterable[str]) -> KeptAgent | None:
    """Returns the living agent that a guard remembers; None where there is none.

    names: of the processes of the run that goes on, which must be those of before.
    """
    try:
        kept = msgspec.msgpack.decode(guard.remembered(), type=KeptAgent)
    except msgspec.DecodeError:  # nothing, or half of it: the supervisor was killed as it wrote
        return None
    return kept if is_running(kept.process) and kept.addresses.keys() == set(names) else None


class AdoptedProcess:
    """An agent that another process has started. Its exit code cannot be known."""

    def __init__(self, process: StartedProcess) -> None:
        """Raises ProcessLookupError when the process has ended."""
        self.pid = process.pid
        self._handle = os.pidfd_open(process.pid)  # from here on the pid is nobody else's
        if identify_process(process.pid) != process:
            self.close()
            raise ProcessLookupError(f"process {process.pid} has ended")

    async def wait(self) -> int:
        """Waits for its end; returns 0."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._handle)
        return 0

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        os.close(self._handle)


async def hold_lease(agent: Peer, is_held: asyncio.Future[bool], again_s: float = 0.0) -> None:
    """Holds an agent's lease until cancelled.

    is_held: set as soon as it is known whether the lease is held.
    again_s: a lease that is lost, or cannot be had, is asked for again so many seconds later, over
        another connection. 0: it is not, and this returns.
    """
    while True:
        try:
            async for _ in agent.stream(HOLD_LEASE, HoldLease(os.getpid())):
                if not is_held.done():
                    is_held.set_result(True)
        except GcoreError as error:
            if not again_s and not is_held.done():
                log.warning("the lease of the node agent cannot be had: %s", error)
                is_held.set_result(False)
        if not again_s:
            return
        await asyncio.sleep(again_s)


@contextlib.asynccontextmanager
async def lease_held(agent: Peer) -> AsyncIterator[asyncio.Future[bool]]:
    """Holds an agent's lease inside the block; yields whether it is held, as soon as that is known.

    An agent that ends meanwhile is no error here: whoever waits for its workers is told.
    """
    is_held = asyncio.get_running_loop().create_future()
    holding = asyncio.ensure_future(hold_lease(agent, is_held))
    try:
        yield is_held
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def clear_adopted(agent: Peer, is_held: asyncio.Future[bool]) -> bool:
    """Has an adopted agent end what is left of the attempt before.

    Returns whether it has, and the lease is held. An agent that does not is to be ended.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            if not await is_held:
                return False
        async with asyncio.timeout(_CLEAR_S):
            await agent.call(CLEAR, Nothing())
    except (GcoreError, TimeoutError) as error:
        log.warning("the node agent is not taken over: %r", error)
        return False
    return True


def dismiss(process: Process) -> None:
    """Tells an agent to end, with all that it has started. One that is stopped is woken."""
    with contextlib.suppress(ProcessLookupError):
        send_signal(process, signal.SIGTERM)
        send_signal(process, signal.SIGCONT)
