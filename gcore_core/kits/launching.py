"""Has the parts of a launcher: they start the processes of a run and join them to one network.

The words of a launcher, ``Launcher`` and ``Site``, stand in ``gcore_core.contract.launching``. A
launcher that places processes elsewhere starts a node agent there with an ``AgentSpec`` and joins
it with ``RpcNetwork``; one that changes little wraps ``LocalLauncher`` or ``InlineLauncher``.

LocalLauncher, LocalConfig: ``core/local`` and its settings.
InlineLauncher, InlineView: ``core/inline``, and one process's view of its network.
RpcNetwork: the network over sockets.
framed, length_at, LENGTH_BYTES: a message as it stands on a stream, and how long it is.
make_identity: the key and the certificate of a run, for TLS between machines.
server_context, certificate_of: for a server that finds out by other means who connects.
AgentSpec, StoreSpec: what a node agent is told, and what it is told of its store.
SpawnRequest, WorkerSpec: what the supervisor asks of an agent, for each worker.
GeneratorSettings: what a ``WorkerSpec`` tells a generator's worker.
UsageReply, WorkerExit: what an agent answers.
Worker: one worker, for a launcher that runs several in a process.
in_main_thread: calls a function of a user where its signals work.
process_usage: CPU seconds and memory of a process.
spawn_process, read_spec: both ends of starting a process with a spec.
spawn_over_input: starts one by a command that may lead to another machine.
input_of: what such a process reads from its standard input.
MachineFacts, machine_facts, machine_identity: what a machine says of itself.
HOLD_LEASE, HoldLease: asks a remote agent to live on, for as long as the stream stands.
RECORD, clear_up: what an agent that was lost has left, and its end.
SIGTERM_PASSED_ON: has an agent ask to leave, as its first SIGTERM does.
end_hung: ends a process of this machine that hangs.
allow_open_files: raises this process's limit of open files.
SHARED_MEMORY: the directory of shared memory.
"""

from __future__ import annotations

from gcore_core.runtime.messages import (
    HOLD_LEASE,
    HoldLease,
    SpawnRequest,
    UsageReply,
    WorkerExit,
    WorkerSpec,
)
from gcore_core.runtime.process.agent import (
    SIGTERM_PASSED_ON,
    AgentSpec,
    end_hung,
    process_usage,
)
from gcore_core.runtime.process.config import LocalConfig
from gcore_core.runtime.process.facts import MachineFacts, machine_facts, machine_identity
from gcore_core.runtime.process.launchers import InlineLauncher, LocalLauncher
from gcore_core.runtime.process.leftovers import RECORD, clear_up
from gcore_core.runtime.process.main_thread import in_main_thread
from gcore_core.runtime.process.spawn import (
    SHARED_MEMORY,
    allow_open_files,
    input_of,
    read_spec,
    spawn_over_input,
    spawn_process,
)
from gcore_core.runtime.process.worker import Worker
from gcore_core.runtime.rpc.framing import LENGTH_BYTES, framed, length_at
from gcore_core.runtime.rpc.in_process import InlineView
from gcore_core.runtime.rpc.sockets import RpcNetwork
from gcore_core.runtime.rpc.tls import certificate_of, make_identity, server_context
from gcore_core.runtime.store.server import StoreSpec
from gcore_core.runtime.worker_settings import GeneratorSettings

__all__ = [
    "LENGTH_BYTES",
    "framed",
    "length_at",
    "input_of",
    "certificate_of",
    "server_context",
    "spawn_over_input",
    "machine_identity",
    "machine_facts",
    "end_hung",
    "clear_up",
    "allow_open_files",
    "RECORD",
    "MachineFacts",
    "HOLD_LEASE",
    "HoldLease",
    "SHARED_MEMORY",
    "SIGTERM_PASSED_ON",
    "AgentSpec",
    "GeneratorSettings",
    "InlineLauncher",
    "InlineView",
    "LocalConfig",
    "LocalLauncher",
    "RpcNetwork",
    "SpawnRequest",
    "StoreSpec",
    "UsageReply",
    "Worker",
    "WorkerExit",
    "WorkerSpec",
    "in_main_thread",
    "make_identity",
    "process_usage",
    "read_spec",
    "spawn_process",
]
