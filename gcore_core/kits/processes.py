"""Which processes a node agent started, and the end of those that a lost agent has left.

It imports little, since a process that waits for an agent's end holds it for the whole run.

RECORD: the file, in a run's logs, in which an agent writes what it started.
StartedProcess, identify_process, is_running: a process, told from another one that has its pid
    later.
clear_up: ends what an agent that was lost has left, and removes its shared memory.
"""

from gcore_core.node.process_record import (
    RECORD,
    StartedProcess,
    clear_up,
    identify_process,
    is_running,
)

__all__ = ["RECORD", "StartedProcess", "clear_up", "identify_process", "is_running"]
