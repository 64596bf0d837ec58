"""Has what launchers for several machines share: only how machines are reached differs.

A launcher derives from ``MachinesLauncher`` and says which machines there are (``hosts``) and how
an agent is started on one (``start``). Addresses, TLS, leases, stores and closing are done for it.

MachinesLauncher, MachinesConfig: the launcher, and the settings that all of them have.
Host: a machine that a launcher has found.
StartedAgent: what an agent was started with.
AgentCommand, start_by_command: an agent that a command leads to.
AGENT: what starts an agent, behind an interpreter.
FACTS, read_facts: what prints a machine's facts, behind an interpreter, and how they are read.
end_command: kills a command with all that it has started.
"""

from __future__ import annotations

from gcore_core.runtime.process.config import MachinesConfig
from gcore_core.runtime.process.machines import (
    AGENT,
    FACTS,
    AgentCommand,
    Host,
    MachinesLauncher,
    StartedAgent,
    end_command,
    read_facts,
    start_by_command,
)

__all__ = [
    "AGENT",
    "FACTS",
    "AgentCommand",
    "Host",
    "MachinesConfig",
    "MachinesLauncher",
    "StartedAgent",
    "end_command",
    "read_facts",
    "start_by_command",
]
