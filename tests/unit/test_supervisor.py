"""One attempt of a run ends with all that it has begun."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.errors import DataError, GcoreError, WorkerDied, WorkerError
from gcore_core.run.supervisor import Supervisor
from gcore_core.runtime.messages import WorkerExit


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


class Agent:
    """The agent of a machine that is there, or is not."""

    def __init__(self, name: str, *, is_lost: bool) -> None:
        self.name = name
        self._is_lost = is_lost

    async def call(self, endpoint: Any, request: Any) -> None:
        if self._is_lost:
            raise WorkerDied("the process is gone", where=self.name, process=self.name)


class Exits:
    """What ``Supervisor._exited`` uses of a supervisor. A rank has reported why it ends."""

    _cause = Supervisor._cause
    _check_machines = Supervisor._check_machines

    def __init__(self, *agents: Agent) -> None:
        self._controllers = set[str]()
        self._stopping = None
        self._lost_trainer = False
        self._observers = SimpleNamespace(worker_failed=lambda run, failure: None)
        self._run = None
        self._errors = [DataError("connection closed by peer", where="policy.0")]
        self._site = SimpleNamespace(
            nodes={agent.name: SimpleNamespace(agent=agent) for agent in agents}
        )


@pytest.mark.parametrize(
    ("is_lost", "cause"), [(True, WorkerDied), (False, DataError)], ids=["lost", "there"]
)
async def test_an_error_that_comes_of_a_lost_machine_is_not_the_cause(
    is_lost: bool, cause: type[GcoreError]
) -> None:
    """The run goes on after the one, and ends with the other."""
    here = Agent("agent.0", is_lost=False)
    exits: Any = Exits(here, Agent("agent.1", is_lost=is_lost))
    with pytest.raises(cause):
        await Supervisor._exited(exits, WorkerExit("policy.0", 1, 1, False, ""))
    exits = Exits(here)
    with pytest.raises(DataError):
        await Supervisor._exited(exits, WorkerExit("policy.0", 1, 1, False, ""))
