"""The node agent of a run on several machines: it joins its store and its files with the others'.

    python -m gcore_nodes.agent --stdin

A launcher starts it on each machine. Its spec comes by standard input, whose end is its lifeline.
On another machine than the launcher's it lives on a lease, too (``lease``), since a link that is
cut ends no pipe. Its supervisor may come back within the term, over another connection, so its
workers go on until the lease has expired.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from pathlib import Path

from gcore_core.contract.errors import AddressError, ContractError, WorkerDied
from gcore_core.contract.launching import Network
from gcore_core.contract.remote_store import NodeStore, RemoteStore
from gcore_core.kits.launching import (
    GRACE_S,
    Agent,
    AgentSpec,
    Call,
    Nothing,
    RpcNetwork,
    Service,
    SpawnRequest,
    log_as,
    read_spec,
    serve_agent,
)
from gcore_core.kits.processes import clear_up
from gcore_core.kits.wire import noticed_within_s
from gcore_nodes.crash_cleanup import start_caretaker
from gcore_nodes.joined_stores import JoinedStores
from gcore_nodes.lease import Lease
from gcore_nodes.messages import END_WORKERS, HOLD_LEASE, LEAVING, HoldLease
from gcore_nodes.node_files import NodeFiles

log = logging.getLogger(__name__)
_CLOSE_S = 1.5  # an agent whose connections are cut has closed them, and its store, within these
#: What a process sends to the agent that it has started, to pass a SIGTERM on. Whoever signals all
#: processes of a machine reaches both. Then the agent gets two signals, and counts them as one.
SIGTERM_PASSED_ON = signal.SIGRTMIN + signal.SIGTERM
TERMINATIONS = (signal.SIGTERM, SIGTERM_PASSED_ON)


class MachineAgentSpec(AgentSpec, frozen=True, kw_only=True):
    """Tells an agent what to do in a run on several machines.

    identity: of the run, for TLS between machines; empty where the run has one machine. As secret
        as ``secret``.
    public: a further address at which this agent serves those on other machines; "" for none.
    lease_s: the term of its lease, for which it goes on without a connection to its supervisor; 0:
        it has none, and its lifeline alone says when it ends.
    start_s: the first term of that lease, in which its supervisor has to reach it; 0: ``lease_s``.
    is_remote: it is on another machine than its launcher, and nothing was prepared for it. It makes
        ``meeting``, which must not exist, and the directories of logs, and clears up after an agent
        that was lost. When it has lost its supervisor, its workers go on for the lease's term.
    silence_s: its connections with other machines end after so long without a sign of life, see
        ``RpcNetwork``.
    directory: where its workers run, if it exists on this machine; "": where the agent is started.
    bulk: name of every node's agent -> the address at which it serves content to the others, see
        ``bulk``; this agent listens at its own. Empty for one node.
    leave_s: it may leave the run on purpose, and ends when it was not let go for so long after it
        has asked, see ``MachineAgent.terminated``; 0: it may not, and ends at the first SIGTERM.
    """

    identity: bytes = b""
    public: str = ""
    lease_s: float = 0.0
    start_s: float = 0.0
    is_remote: bool = False
    silence_s: float = 0.0
    directory: str = ""
    bulk: dict[str, str] = {}
    leave_s: float = 0.0


def split_patience(patience_s: float) -> tuple[float, float]:
    """Divides the time within which all on a machine that is cut off has ended.

        silence, until the kernel notices | lease | workers end | the agent ends

    Returns (silence_s, lease_s) of its agent.

    patience_s: at least ``machines_config.LEAST_PATIENCE_S``.
    """
    silence_s = patience_s / 2
    lease_s = patience_s - noticed_within_s(silence_s) - GRACE_S - _CLOSE_S
    return silence_s, lease_s


class MachineAgent(Agent):
    """Starts and watches the workers of one machine of several, and serves its slabs and files."""

    def __init__(self, spec: MachineAgentSpec, network: Network) -> None:
        self._machine = spec
        super().__init__(spec, network, join=self._join, is_remote=spec.is_remote)
        self._terminations = dict.fromkeys(TERMINATIONS, 0)
        self._is_leaving = asyncio.Event()
        # It waits for this process's end as long as this is held.
        self._caretaker = start_caretaker(spec.record) if spec.is_remote else None
        self._lease: Lease | None = None
        if spec.lease_s:
            self._lease = Lease(spec.lease_s, expired=self.end, first_term_s=spec.start_s)

    def _join(self, store: NodeStore) -> RemoteStore:
        spec = self._machine
        stores = JoinedStores(
            store,
            spec.bulk,
            spec.secret,
            spec.identity,
            push_memory=self.push_memory,
            offered=lambda sha256: self._files_served.offered(sha256),
        )
        self._files_served = NodeFiles(spec.name, stores.client)
        return stores

    def register(self, service: Service) -> None:
        super().register(service)
        self._files_served.register(service)
        service.add(END_WORKERS, self.end_all)
        service.add(HOLD_LEASE, self.hold_lease)
        service.add(LEAVING, self.leaving)

    async def spawn(self, request: SpawnRequest, call: Call) -> Nothing:
        """Starts workers, and watches them from then on."""
        if self._machine.is_remote:
            for spec in request.workers:
                Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
        return await super().spawn(request, call)

    async def end_all(self, request: Nothing, call: Call) -> Nothing:
        """Ends all workers, before the agent itself is to end."""
        await self.end_workers()
        return Nothing()

    async def hold_lease(self, request: HoldLease, call: Call) -> AsyncGenerator[Nothing, None]:
        """Keeps the agent alive; its one item says that it does.

        Raises WorkerDied when the agent is ending, and ContractError when it has no lease.
        """
        if self._lease is None:
            raise ContractError("it has no lease to hold", where=self.name)
        if self.stopped.is_set():
            name = self.name
            raise WorkerDied("the node agent is ending", where=name, process=name)
        with self._lease.held(f"the supervisor (pid {request.pid})"):
            yield Nothing()
            await asyncio.Event().wait()

    def end(self) -> None:
        """Tells the agent to end; ``stop`` does the work."""
        super().end()
        if self._lease is not None:
            self._lease.close()

    def terminated(self, number: int) -> None:
        """Takes a SIGTERM, one of ``TERMINATIONS``: that came directly, or was passed on.

        The first asks the run to do without this node, where it may leave, and its work goes on
        until the run's next checkpoint. The second ends it, and so does the end of ``leave_s``.
        """
        before = max(self._terminations.values())
        self._terminations[number] += 1
        now = max(self._terminations.values())
        if now == before:  # it has come by the other way already
            return
        if now > 1 or not self._machine.leave_s:
            self.end()
            return
        log.info(
            "it asks to leave the run, and ends after %g s at the latest", self._machine.leave_s
        )
        asyncio.get_running_loop().call_later(self._machine.leave_s, self.end)
        self._is_leaving.set()

    async def leaving(self, request: Nothing, call: Call) -> AsyncGenerator[Nothing, None]:
        """Streams one item when the agent asks to leave, also to who asks for it later."""
        await self._is_leaving.wait()
        yield Nothing()

    def signals(self) -> Mapping[int, Callable[[], None]]:
        """See ``terminated``; SIGINT ends the agent."""
        asks = {number: partial(self.terminated, number) for number in TERMINATIONS}
        return {signal.SIGINT: self.end, **asks}


async def _main(spec: MachineAgentSpec, lifeline: int) -> None:
    network = RpcNetwork(
        spec.addresses,
        spec.secret,
        identity=spec.identity,
        public={spec.name: spec.public} if spec.public else {},
        silence_s=spec.silence_s,
    )
    await serve_agent(MachineAgent(spec, network), network, spec.meeting, lifeline)


def main() -> None:
    spec, lifeline = read_spec("a node agent; started by a launcher only", MachineAgentSpec)
    log_as(spec.name)
    if spec.is_remote:
        prepare(spec)
    asyncio.run(_main(spec, lifeline))


def prepare(spec: MachineAgentSpec) -> None:
    """Makes what a launcher on the same machine has made before it starts an agent.

    Raises AddressError when the meeting place cannot be made, or exists.
    """
    if spec.record:
        record = Path(spec.record)
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AddressError(
                f"the run's directory cannot be made: {error.strerror}",
                where=str(record.parent),
                todo="set run.dir to a directory that you may make on every host",
            ) from error
        clear_up(record)
    try:
        Path(spec.meeting).mkdir(mode=0o700)
    except OSError as error:
        raise AddressError(
            f"no directory for the run's sockets can be made: {error.strerror}",
            where=spec.meeting,
            todo="name a directory that exists on every host, and that you may write to, in "
            "launcher.config.socket_dir",
        ) from error
    if spec.directory:
        try:
            os.chdir(spec.directory)
        except OSError as error:
            log.warning("workers run in %s: %s", os.getcwd(), error)


if __name__ == "__main__":
    main()
