"""One attempt of a run ends with all that it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.errors import (
    DataError,
    DeadlineExceeded,
    GcoreError,
    WorkerDied,
    WorkerError,
)
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.contract.run_files import SAVE
from gcore_core.run.supervisor import Supervisor
from gcore_core.run.worker_exits import exit_text
from gcore_core.runtime.messages import USAGE, UsageReply, WorkerExit


class Attempt:
    """What ``Supervisor._attempt`` uses of a supervisor. Its start fails, its watch never ends."""

    def __init__(self) -> None:
        run = SimpleNamespace(patience_s=600.0)
        plan = SimpleNamespace(settings=SimpleNamespace(run=run))
        self._job = SimpleNamespace(plan=plan, where=dict)
        self._display = SimpleNamespace(note=None)
        self._over = asyncio.get_running_loop().create_future()
        self._stopping = None

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
        nodes={"agent.0": SimpleNamespace(agent=None, let_go=None)},
        newcomer=None,
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
        self.calls: list[str] = []
        self._is_lost = is_lost

    async def call(self, endpoint: Any, request: Any) -> None:
        self.calls.append(endpoint.name)
        if self._is_lost:
            raise self._gone()

    async def stream(self, endpoint: Any, request: Any) -> AsyncGenerator[Any, None]:
        raise self._gone()
        yield

    def _gone(self) -> WorkerDied:
        return WorkerDied("the process is gone", where=self.name, process=self.name)


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
        plan = SimpleNamespace(settings=SimpleNamespace(roles={POLICY: None}))
        self._job = SimpleNamespace(directory=Path("run"), plan=plan)
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


class Watch:
    """What ``Supervisor._watch`` and ``_ask_agents`` use of a supervisor on several machines."""

    _watch = Supervisor._watch
    _ask_agents = Supervisor._ask_agents

    def __init__(self, *agents: Agent) -> None:
        self._job = SimpleNamespace(directory=Path("run"))
        self._site = SimpleNamespace(
            nodes={agent.name: SimpleNamespace(agent=agent) for agent in agents}
        )


class _Lead:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def peer(self, name: str) -> _Lead:
        return self

    async def call(self, endpoint: Any, request: Any) -> Any:
        self.asked.append(endpoint.name)


class _Measured(Agent):
    """Says what its node uses: a second more each time, and nothing while it is late."""

    is_late = False

    async def call(self, endpoint: Any, request: Any) -> Any:
        self.calls.append(endpoint.name)
        if self.is_late:
            raise DeadlineExceeded("no sign of progress for 60 s in usage", where=self.name)
        return UsageReply({self.name: float(len(self.calls))}, {self.name: 8.0})


async def test_a_step_is_reported_although_an_agent_measures_too_late() -> None:
    """What it said last stands for it, so that seconds so far never shrink."""
    agents = [_Measured(f"agent.{i}", is_lost=False) for i in range(2)]
    watch: Any = Watch(*agents)
    watch._usage = {}
    watch._site.has_processes = False
    told: list[float] = []
    for agents[1].is_late in (False, True, True, False):
        report = StepReport(step=0, version=0, metrics={})
        await Supervisor._add_usage(watch, watch._site, report)
        told.append(report.metrics["cpu_seconds"])
        assert report.metrics["memory_mib/agent.1"] == 8.0
    assert told == [1.0 + 1.0, 2.0 + 1.0, 3.0 + 1.0, 4.0 + 4.0]


async def test_a_lost_machine_ends_the_attempt_whatever_was_there() -> None:
    watch: Any = Watch(Agent("agent.0", is_lost=False), Agent("agent.1", is_lost=True))
    with pytest.raises(WorkerDied):
        await watch._ask_agents(USAGE)
    with pytest.raises(WorkerDied) as error:
        await watch._watch(watch._site.nodes["agent.1"].agent)
    assert "the workers of its node end with it" in error.value.why


async def test_an_attempt_that_moves_on_ends_behind_a_step_that_is_saved_and_not_the_last() -> None:
    """The lead is told once, and finishes the save before it ends."""
    saved = {3, 4, 9}
    lead = _Lead()
    changes = SimpleNamespace(is_due=False)
    supervisor: Any = SimpleNamespace(
        _changes=changes,
        _checkpoints=SimpleNamespace(saves=saved.__contains__),
        _run=SimpleNamespace(steps=9),
        _moves_on=False,
    )
    site: Any = SimpleNamespace(network=lead)

    async def told(step: int) -> bool:
        await Supervisor._move_on_if_due(supervisor, site, step)
        return bool(lead.asked)

    assert not await told(3), "the machines are the same"
    changes.is_due = True
    assert not await told(2), "it is not saved"
    assert not await told(9), "the run ends here anyhow"
    assert await told(4) and supervisor._moves_on
    await told(4)
    assert lead.asked == ["stop_run"]


async def test_a_checkpoint_that_is_asked_for_is_promised_for_the_end_of_the_next_step(
    tmp_path: Path,
) -> None:
    """The lead has ended this step when it is told, and saves where the next one ends."""
    (tmp_path / SAVE).touch()
    lead = _Lead()
    notes: list[str] = []
    supervisor: Any = SimpleNamespace(
        _job=SimpleNamespace(directory=tmp_path), _display=SimpleNamespace(note=notes.append)
    )
    site: Any = SimpleNamespace(network=lead)
    for _ in range(2):  # asked once, told once
        await Supervisor._save_if_asked(supervisor, site)
    assert notes == ["a checkpoint was asked for; it is saved at the end of the next step"]
    assert not (tmp_path / SAVE).exists()


def test_a_summary_that_fails_does_not_hide_how_the_run_ended(tmp_path: Path) -> None:
    """Observers wait for that, and a run that ended well ends well."""
    (tmp_path / "notes.md").write_bytes(b"caf\xe9")  # somebody's, and not in UTF-8
    notes: list[str] = []
    told: list[str] = []
    ended: Any = SimpleNamespace(
        _stopping=None,
        _started_s=0.0,
        _cpu_s=1.0,
        _run=RunFacts(name="digits", directory=str(tmp_path), steps=1, config={}),
        _display=SimpleNamespace(note=notes.append),
        _observers=SimpleNamespace(run_end=lambda run, error: None, all_written=told.append),
    )
    Supervisor.over(ended, "")
    assert told == [""]
    assert "the summary is not written: UnicodeDecodeError" in notes[0]


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    """Such as a real-time signal; of these only the first and the last have names."""
    assert exit_text(-9) == "signal SIGKILL"
    assert exit_text(-40) == "signal 40"
