"""Clears up a machine on which the node agent was killed.

    python -m gcore_nodes.crash_cleanup RECORD PID START_TICKS < pipe

An agent on another machine than its launcher's starts one (``start_caretaker``). A run goes on
without the machines that it has lost, so nobody else comes back there.

    how it knows    the agent alone can write to the caretaker's standard input, and never does. The
                    kernel ends that input with the agent, in whatever way the agent ends
    what it does    it clears up what the agent's record names. An agent that ended well has
                    removed its record, and then nothing is done
    what ends it    the end of the agent: a signal that asks the agent's group to end, or to leave
                    the run, does not reach it. Its own SIGKILL leaves all as it is
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from gcore_core.kits.processes import StartedProcess, clear_up, identify_process

log = logging.getLogger(__name__)
#: A scheduler may send them to every process of a job. The agent answers them, and ends first.
_FOR_THE_AGENT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def start_caretaker(record: str) -> subprocess.Popen[bytes] | None:
    """Starts the caretaker of this process, which is an agent that has written its record.

    The caretaker waits as long as what is returned is kept. None is returned where a caretaker
    could not tell this process from another one that has its pid later (no /proc), or where no
    further process can be started; then the next run on this machine clears up.

    record: path of the agent's record.
    """
    own = identify_process(os.getpid())
    if own is None:
        return None
    words = [sys.executable, "-m", __name__, record, str(own.pid), str(own.start_ticks)]
    try:
        return subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        log.warning("nobody clears up should this agent be killed: %s", error.strerror)
        return None


def main() -> None:
    record, pid, start_ticks = sys.argv[1:]
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s caretaker %(levelname)s %(message)s"
    )
    for number in _FOR_THE_AGENT:
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass  # nobody writes
    clear_up(Path(record), StartedProcess(int(pid), int(start_ticks)))


if __name__ == "__main__":
    main()
