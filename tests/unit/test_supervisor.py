"""One attempt of a run ends with all that it has begun."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.errors import WorkerError
from gcore_core.run.supervisor import Supervisor


class Attempt:
    """What ``Supervisor._attempt`` uses of a supervisor. Its start fails, its watch never ends."""

    def __init__(self) -> None:
        run = SimpleNamespace(patience_s=600.0)
        plan = SimpleNamespace(settings=SimpleNamespace(run=run))
        self._job = SimpleNamespace(plan=plan, where=dict)
        self._over = asyncio.get_running_loop().create_future()

    async def _start(self, site: Any) -> None:
        raise WorkerError("no such interpreter", where="rollout.0")

    async def _watch(self, site: Any) -> None:
        await asyncio.Event().wait()

    async def _look_after(self, site: Any, name: str) -> None:
        await asyncio.Event().wait()

    async def _keep_newest(self, site: Any) -> None: ...


async def test_nothing_of_a_failed_attempt_runs_beside_the_next_one() -> None:
    """It would read the exits of the next one's workers, and kill those that begin slowly."""
    site: Any = SimpleNamespace(
        network=SimpleNamespace(),
        nodes={"agent.0": SimpleNamespace(agent=None)},
        where={"rollout.0": "agent.0"},
        has_processes=True,
    )
    attempt: Any = Attempt()
    with pytest.raises(WorkerError, match="no such interpreter"):
        await Supervisor._attempt(attempt, site)
    assert asyncio.all_tasks() == {asyncio.current_task()}
