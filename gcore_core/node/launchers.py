"""Starts a run's processes: ``core/local`` on this machine, ``core/inline`` in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

from gcore_core.contract.errors import AddressError
from gcore_core.contract.launching import (
    Network,
    NodeFacts,
    Servable,
    Site,
    SiteNode,
)
from gcore_core.node.agent import AgentSpec, end_hung
from gcore_core.node.config import LocalConfig, check_ports
from gcore_core.node.devices import find_devices
from gcore_core.node.inline_agent import InlineAgent
from gcore_core.node.process_record import RECORD, clear_up
from gcore_core.node.spawn import (
    allow_open_files,
    send_signal,
    spawn_process,
)
from gcore_core.runtime.files import SHARED_MEMORY
from gcore_core.store.server import StoreSpec
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Service

log = logging.getLogger(__name__)
#: The name of the first node's agent; the only one where all processes run on one machine.
AGENT = "agent.0"
_ENDS_S = 15.0  # an agent has so long to end its workers and itself


class LocalLauncher:
    """Starts one node agent on this machine, as a process.

    Unix sockets lie in a private directory.
    """

    def __init__(self, config: LocalConfig | None = None) -> None:
        self._config = config or LocalConfig()

    async def nodes(self, devices: int | str) -> list[NodeFacts]:
        return [NodeFacts(name=AGENT, devices=find_devices(devices))]

    @contextlib.asynccontextmanager
    async def site(
        self, where: Mapping[str, str], supervisor: Servable, logs: Path
    ) -> AsyncIterator[Site]:
        from gcore_core.wire.sockets import RpcNetwork, check_free

        allow_open_files(len(where) + 2)
        record = logs / RECORD
        # What a run left in this directory whose supervisor and agent were both lost. It may still
        # hold the addresses.
        await asyncio.to_thread(clear_up, record)
        with _private_directory(self._config.socket_dir) as directory:
            addresses = self._addresses([supervisor.name, AGENT, *where], directory)
            for address in addresses.values():
                check_free(address)
            secret = secrets.token_bytes(32)
            store = _store(self._config, directory, logs.parent)
            network = RpcNetwork(addresses, secret)
            spec = AgentSpec(
                name=AGENT,
                addresses=addresses,
                secret=secret,
                store=store,
                meeting=str(directory),
                record=str(record.absolute()),
            )
            agent = None
            lifeline = -1
            try:
                await network.serve(supervisor.name, supervisor)
                command = [sys.executable, "-m", "gcore_core.node.agent"]
                agent, lifeline = await spawn_process(command, spec, logs / f"{AGENT}.log")
                node = SiteNode(
                    agent=network.peer(AGENT),
                    store=Path(store.directory),
                    meeting=directory,
                    end_agent=partial(end_hung, agent),
                )
                yield _one_node_site(network, secret, node, where, addresses)
            finally:
                if lifeline >= 0:
                    os.close(lifeline)
                if agent is not None:
                    await _end(agent, record)
                await network.close()
                for place in (store.directory, store.spill):
                    shutil.rmtree(place, ignore_errors=True)

    def _addresses(self, names: list[str], directory: Path) -> dict[str, str]:
        if self._config.port is None:
            return {name: f"unix:{directory / name}" for name in names}
        check_ports(self._config.port, self._config.port + len(names) - 1)
        return {name: f"tcp:127.0.0.1:{self._config.port + i}" for i, name in enumerate(names)}


async def _end(agent: Process, record: Path) -> None:
    """Ends an agent, and removes what it leaves."""
    dismiss(agent)
    try:
        await asyncio.wait_for(agent.wait(), _ENDS_S)
    except TimeoutError:
        await end_hung(agent)  # its workers end by their own lifelines
        await agent.wait()
    await asyncio.to_thread(clear_up, record)  # where the agent did not end well


def dismiss(process: Process) -> None:
    """Tells an agent to end, with all that it has started. One that is stopped is woken."""
    with contextlib.suppress(ProcessLookupError):
        send_signal(process, signal.SIGTERM)
        send_signal(process, signal.SIGCONT)


@contextlib.contextmanager
def _private_directory(parent: str | None):  # type: ignore[no-untyped-def]
    """Makes a private directory, and removes it at the end of the block. Raises AddressError.

    parent: where it is made; None: in the system's directory for temporary files.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix="g-core-", dir=parent))
    except OSError as error:
        raise AddressError(
            f"no directory for the run's sockets can be made: {error.strerror}",
            where=f"launcher.config.socket_dir: {parent}",
            todo="name a directory that exists and that you may write to",
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _store(config: LocalConfig, directory: Path, run: Path) -> StoreSpec:
    """Finds a place for the store: shared memory, or else the run's private directory."""
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else directory
    budget = (
        shutil.disk_usage(memory).free // 2
        if config.store_gib is None
        else int(config.store_gib * 2**30)
    )
    return StoreSpec(
        node=AGENT,
        directory=str(memory / directory.name),
        spill=str(Path(config.spill_dir or run) / f"spill-{directory.name}"),
        budget_bytes=budget,
        patience_s=config.spill_after_s,
    )


def _one_node_site(
    network: Network,
    secret: bytes,
    node: SiteNode,
    where: Mapping[str, str],
    addresses: dict[str, str],
) -> Site:
    """Returns the site of a run whose processes are all on this machine."""
    return Site(
        network=network,
        secret=secret,
        home=AGENT,
        nodes={AGENT: node},
        where=dict(where),
        views={AGENT: addresses},
    )


class InlineLauncher:
    """Runs everything in this process, one thing at a time, for a debugger.

    All event loops are one. It waits while the main thread runs a call of a backend. Messages are
    encoded as well.
    """

    def __init__(self, config: None = None) -> None:
        pass

    async def nodes(self, devices: int | str) -> list[NodeFacts]:
        return [NodeFacts(name=AGENT, devices=find_devices(devices))]

    @contextlib.asynccontextmanager
    async def site(
        self, where: Mapping[str, str], supervisor: Servable, logs: Path
    ) -> AsyncIterator[Site]:
        with _private_directory(None) as directory:
            network = InlineNetwork()
            secret = secrets.token_bytes(32)
            store = _store(LocalConfig(), directory, logs.parent)
            agent = InlineAgent(network, store, secret)
            service = Service(AGENT)
            agent.register(service)
            view = network.view(supervisor.name)
            await network.view(AGENT).serve(AGENT, service)
            await view.serve(supervisor.name, supervisor)
            try:
                node = SiteNode(
                    agent=view.peer(AGENT), store=Path(store.directory), meeting=directory
                )
                addresses = {name: f"inline:{name}" for name in where}
                with agent.limits.noticed():
                    yield _one_node_site(view, secret, node, where, addresses)
            finally:
                await agent.stop()
                agent.slabs.close()
