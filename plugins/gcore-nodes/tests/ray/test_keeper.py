"""A keeper lives as long as the process whose child it is, and tells all that its agent wrote."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from typing import Any

import pytest
from gcore_nodes.ray import keeper

WITHIN_S = 60.0  # on a machine that is busy

CHILD = """
import os, time
from gcore_nodes.ray.keeper import end_with_parent
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


class EndedAgent:
    """A process that has ended, of whose output a part is still to be read."""

    returncode = 1

    def __init__(self) -> None:
        self.stdout = asyncio.StreamReader()

    async def wait(self) -> int:
        return self.returncode


async def test_all_that_an_agent_wrote_is_told_before_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is told the code asks no more, and the last lines say why the agent ended."""
    monkeypatch.setattr(keeper, "end_with_parent", lambda leave: None)
    kept: Any = keeper.Keeper()
    agent: Any = EndedAgent()
    kept._process = agent
    kept._reading = asyncio.ensure_future(kept._read(agent))
    agent.stdout.feed_data(b"it began\n")
    assert await kept.output() == (b"it began\n", None)
    agent.stdout.feed_data(b"why it ended\n")
    agent.stdout.feed_eof()
    told = b""
    code = None
    while code is None:
        content, code = await kept.output()
        told += content
    assert (told, code) == (b"why it ended\n", 1)
