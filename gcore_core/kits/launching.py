"""Has the parts of a launcher: they start the processes of a run and join them to one network.

The words of a launcher, ``Launcher`` and ``Site``, stand in ``gcore_core.contract.launching``. A
launcher that places processes elsewhere starts a node agent there with an ``AgentSpec`` and joins
it with ``RpcNetwork``; one that changes little wraps ``LocalLauncher`` or ``InlineLauncher``.

LocalLauncher, LocalConfig: ``core/local`` and its settings.
InlineLauncher, InlineView: ``core/inline``, and one process's view of its network.
RpcNetwork: the network over sockets.
AgentSpec, StoreSpec: what a node agent is told, and what it is told of its store.
SpawnRequest, WorkerSpec: what the supervisor asks of an agent, for each worker.
GeneratorSettings: what a ``WorkerSpec`` tells a generator's worker.
UsageReply, WorkerExit: what an agent answers.
Worker: one worker, for a launcher that runs several in a process.
process_usage: CPU seconds and memory of a process.
spawn_process, read_spec: both ends of starting a process with a spec.
SHARED_MEMORY: the directory of shared memory.
"""

from __future__ import annotations

from gcore_core.runtime.messages import SpawnRequest, UsageReply, WorkerExit, WorkerSpec
from gcore_core.runtime.process.agent import AgentSpec, process_usage
from gcore_core.runtime.process.config import LocalConfig
from gcore_core.runtime.process.launchers import InlineLauncher, LocalLauncher
from gcore_core.runtime.process.spawn import SHARED_MEMORY, read_spec, spawn_process
from gcore_core.runtime.process.worker import Worker
from gcore_core.runtime.rpc.in_process import InlineView
from gcore_core.runtime.rpc.sockets import RpcNetwork
from gcore_core.runtime.store.server import StoreSpec
from gcore_core.runtime.worker_settings import GeneratorSettings

__all__ = [
    "SHARED_MEMORY",
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
    "process_usage",
    "read_spec",
    "spawn_process",
]
