"""Runs many emulated workers in one process: ``python -m gcore_placement.sim.host``.

Only the crowd's launcher starts it. Every worker is the core's own, with a service, a network and a
socket to itself. Only the thread in which it would compute is missing: its backend spends time on
the event loop's clock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from functools import partial

import msgspec

from gcore_core.contract.launching import Network
from gcore_core.kits.launching import (
    GeneratorSettings,
    RpcNetwork,
    Worker,
    WorkerSpec,
    in_main_thread,
    read_spec,
)
from gcore_placement.sim.clock import LoopCompute

log = logging.getLogger(__name__)


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a host gets from its launcher, through a file descriptor.

    name: the host's name.
    workers: the workers that it runs.
    """

    name: str
    workers: list[WorkerSpec]


def is_emulated(spec: WorkerSpec) -> bool:
    """Returns whether a worker is a replica or a rank that only spends time.

    Other workers could hold up those that share their process. Scorers do not count: they are few,
    and each of them gets every record, so they are better off alone.
    """
    return "backend" in spec.factories and spec.factories["backend"].factory.startswith(
        "gcore_placement.sim."
    )


async def serve(spec: WorkerSpec, connect: Callable[[], Network]) -> None:
    """Runs a worker as its own process would: until it ends, and anew when it gives itself up."""
    # An engine's step ends with an answer; it must not be asked to go on before the time for that
    # has passed.
    if isinstance(spec.settings, GeneratorSettings):
        settings = msgspec.structs.replace(spec.settings, batch_s=0.0)
        spec = msgspec.structs.replace(spec, settings=settings)
    for _ in range(spec.restarts + 1):
        if await _ended_by_itself(spec, connect()):
            return
        log.info("%s is started again", spec.name)


async def _ended_by_itself(spec: WorkerSpec, network: Network) -> bool:
    """Runs a worker; returns True when it ended, False when it gave itself up.

    Raises what the worker raised.
    """
    given_up = asyncio.Event()
    # What is not emulated may be a function of a user.
    compute = LoopCompute(None if is_emulated(spec) else in_main_thread)
    running = asyncio.ensure_future(
        Worker(spec, network, compute, lambda code: given_up.set()).run()
    )
    giving_up = asyncio.ensure_future(given_up.wait())
    try:
        await asyncio.wait({running, giving_up}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return False
        running.result()
        return True
    finally:
        running.cancel()
        giving_up.cancel()
        await asyncio.gather(running, giving_up, return_exceptions=True)
        await network.close()


async def _main(spec: HostSpec, lifeline: int) -> None:
    """Runs all workers of a host at once.

    lifeline: a file descriptor that becomes readable when this host shall end.
    """
    # Readable means ended: the launcher is gone, or has no more use for this host.
    asyncio.get_running_loop().add_reader(lifeline, os.killpg, 0, signal.SIGKILL)
    await asyncio.gather(*(serve(worker, partial(_network, worker)) for worker in spec.workers))


def _network(worker: WorkerSpec) -> RpcNetwork:
    public = {worker.name: worker.public} if worker.public else {}
    return RpcNetwork(worker.peers, worker.secret, identity=worker.identity, public=public)


def main() -> None:
    """Runs the workers of one host until the launcher ends it; the exit code is 1 if a worker
    failed.
    """
    spec, lifeline = read_spec(
        "a host of emulated workers; started by the crowd's launcher only", HostSpec
    )
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {spec.name} %(levelname)s %(message)s"
    )
    code = 0
    try:
        asyncio.run(_main(spec, lifeline))
    except Exception:  # isolation point: the worker has reported its failure
        log.exception("%s ends", spec.name)
        code = 1
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
