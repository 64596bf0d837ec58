"""Holds the parts of a launcher: they start the processes of a run and join them to one network.

The words of a launcher, ``Launcher`` and ``Site``, stand in ``gcore_core.contract.launching``. A
launcher that places processes elsewhere starts a node agent there with an ``AgentSpec`` and joins
it with ``RpcNetwork``; one that changes little wraps ``LocalLauncher`` or ``InlineLauncher``.

LocalLauncher, LocalConfig: ``core/local`` and its settings.
InlineLauncher, InlineView: ``core/inline``, and one process's view of its network.
RpcNetwork: the network over sockets.
Agent, serve_agent, GRACE_S, log_as: the node agent, for one that derives from it.
AgentSpec, StoreSpec: what a node agent is told, and what it is told of its store.
Service, Call, Message, Nothing: what a process serves, and what it is asked.
SpawnRequest, WorkerSpec: what the supervisor asks of an agent, for each worker.
GeneratorSettings: what a ``WorkerSpec`` tells a generator's worker.
UsageReply, WorkerExit: what an agent answers.
Worker: one worker, for a launcher that runs several in a process.
in_main_thread: calls a function of a user where its signals work.
process_usage: CPU seconds and memory of a process.
spawn_process, read_spec: both ends of starting a process with a spec.
input_of: what a process that is started with ``--stdin`` reads from its standard input.
find_devices: the devices of this machine.
check_port, check_ports, check_store: settings that launchers share.
end_hung: ends a process of this machine that hangs.
allow_open_files: raises this process's limit of open files.
SHARED_MEMORY: the directory of shared memory.
"""

from __future__ import annotations

from gcore_core.node.agent import (
    GRACE_S,
    Agent,
    AgentSpec,
    end_hung,
    log_as,
    process_usage,
    serve_agent,
)
from gcore_core.node.config import LocalConfig, check_port, check_ports, check_store
from gcore_core.node.devices import find_devices
from gcore_core.node.launchers import InlineLauncher, LocalLauncher
from gcore_core.node.spawn import (
    allow_open_files,
    input_of,
    read_spec,
    spawn_process,
)
from gcore_core.node.worker import Worker
from gcore_core.runtime.files import SHARED_MEMORY
from gcore_core.runtime.main_thread import in_main_thread
from gcore_core.runtime.messages import (
    Message,
    Nothing,
    SpawnRequest,
    UsageReply,
    WorkerExit,
    WorkerSpec,
)
from gcore_core.runtime.worker_settings import GeneratorSettings
from gcore_core.store.server import StoreSpec
from gcore_core.wire.in_process import InlineView
from gcore_core.wire.service import Call, Service
from gcore_core.wire.sockets import RpcNetwork

__all__ = [
    "GRACE_S",
    "SHARED_MEMORY",
    "Agent",
    "AgentSpec",
    "Call",
    "GeneratorSettings",
    "InlineLauncher",
    "InlineView",
    "LocalConfig",
    "LocalLauncher",
    "Message",
    "Nothing",
    "RpcNetwork",
    "Service",
    "SpawnRequest",
    "StoreSpec",
    "UsageReply",
    "Worker",
    "WorkerExit",
    "WorkerSpec",
    "allow_open_files",
    "check_port",
    "check_ports",
    "check_store",
    "end_hung",
    "find_devices",
    "in_main_thread",
    "input_of",
    "log_as",
    "process_usage",
    "read_spec",
    "serve_agent",
    "spawn_process",
]
