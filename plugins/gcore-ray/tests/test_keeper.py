"""The keeper as a process: whose child it is decides how long it lives."""

from __future__ import annotations

import os
import select
import subprocess
import sys

WITHIN_S = 60.0  # on a machine that is busy

CHILD = """
import os, time
from gcore_ray.keeper import end_with_parent
end_with_parent(os._exit, 0.01)
os.write(1, b"ready")
time.sleep(1000)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_keeper_ends_with_its_parent_though_nobody_collects_the_parent() -> None:
    """The parent stays a zombie, as in a container whose first process collects nobody: its id is
    taken, and only another parent shows that it has ended.
    """
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.read(5) == b"ready"
        parent.kill()
        os.waitid(
            os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT
        )  # it has ended; it is not collected
        readable, _, _ = select.select([parent.stdout], [], [], WITHIN_S)
        assert readable, "the child lives on"
        assert parent.stdout.read() == b""  # the end of the pipe: the child has ended, too
        os.kill(parent.pid, 0)  # the parent's id is still taken
