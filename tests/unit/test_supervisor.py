"""One attempt of a run ends with all that it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gcore_core.contract.errors import (
    DataError,
    DeadlineExceeded,
    GcoreError,
    WorkerDied,
    WorkerError,
)
from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.contract.run_files import SAVE
from gcore_core.run.supervisor import Supervisor, _code
from gcore_core.runtime.messages import USAGE, LostNodeReply, UsageReply, WorkerExit
from gcore_core.runtime.rpc.retry import gone


class Attempt:
    """What ``Supervisor._attempt`` uses of a supervisor. Its start fails, its watch never ends."""

    def __init__(self) -> None:
        run = SimpleNamespace(patience_s=600.0)
        plan = SimpleNamespace(settings=SimpleNamespace(run=run))
        self._job = SimpleNamespace(plan=plan, where=dict, grows=lambda site: False)
        self._over = asyncio.get_running_loop().create_future()

    async def _start(self, site: Any) -> None:
        raise WorkerError("no such interpreter", where="rollout.0")

    async def _watch(self, site: Any) -> None:
        await asyncio.Event().wait()

    async def _look_after(self, site: Any, name: str) -> None:
        await asyncio.Event().wait()

    async def _keep_newest(self, site: Any) -> None: ...

    def _make_leaving(self, site: Any) -> Any:
        return SimpleNamespace(close=AsyncMock())


async def test_nothing_of_a_failed_attempt_runs_beside_the_next_one() -> None:
    """It would read the exits of the next one's workers, and kill those that begin slowly."""
    site: Any = SimpleNamespace(
        network=SimpleNamespace(),
        nodes={"agent.0": SimpleNamespace(agent=None, let_go=None)},
        newcomers=None,
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
        self._job = SimpleNamespace(directory=Path("run"))
        self._lost_nodes = set[str]()
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
    """What ``Supervisor._watch`` and ``_ask_agents`` use of a supervisor on two machines.

    busy: where its workers are.
    """

    _is_idle = Supervisor._is_idle
    _is_expendable = Supervisor._is_expendable
    _is_lost = Supervisor._is_lost
    _goes_on_without = Supervisor._goes_on_without
    _note = Supervisor._note
    _has_left = Supervisor._has_left
    _tell_lost = Supervisor._tell_lost
    _end_lost = Supervisor._end_lost
    _watch = Supervisor._watch
    _ask_agents = Supervisor._ask_agents

    def __init__(self, busy: str, *agents: Agent) -> None:
        self._lost_nodes = set[str]()
        self._leaving = None
        self._expendable: dict[str, list[str]] = {}
        self._homecoming = None
        self._ready = asyncio.Event()
        self._controllers = {"controller.0"}
        self.notes: list[str] = []
        self._display = SimpleNamespace(note=self.notes.append)
        self._job = SimpleNamespace(directory=Path("run"))
        self._site = SimpleNamespace(
            home="agent.0",
            where={"policy.0": "agent.0", "rollout.0": busy},
            nodes={agent.name: SimpleNamespace(agent=agent, end_agent=None) for agent in agents},
        )


class _Controller:
    """Answers whether it goes on without a lost machine; None: it has ended."""

    def __init__(self, answer: bool | None) -> None:
        self._answer = answer

    def peer(self, name: str) -> _Controller:
        return self

    async def call(self, endpoint: Any, request: Any, *, deadline_s: float | None = None) -> Any:
        if self._answer is None:
            raise gone("controller.0")
        return LostNodeReply(self._answer)


def _losing(answer: bool | None = True, *, least: int | None = None, elsewhere: int = 1) -> Any:
    """Makes a supervisor whose machine agent.1 has one replica, and agent.0 ``elsewhere``."""
    watch: Any = Watch("agent.1", Agent("agent.0", is_lost=False), Agent("agent.1", is_lost=True))
    watch._site.where |= {f"rollout.{1 + i}": "agent.0" for i in range(elsewhere)}
    watch._site.network = _Controller(answer)
    watch._expendable = {"agent.1": ["rollout.0"]}
    roles = {"rollout": SimpleNamespace(least=least)}
    watch._job.plan = SimpleNamespace(settings=SimpleNamespace(roles=roles))
    watch._job.placed = SimpleNamespace(host={"agent.1": "node2"}.get)
    watch._ready.set()
    return watch


async def test_a_step_goes_on_without_a_lost_machine_of_generators(
    caplog: pytest.LogCaptureFixture,
) -> None:
    losing = _losing()
    assert await losing._ask_agents(USAGE) == {"agent.0": None}  # also before it is noticed
    await losing._watch(losing._site.nodes["agent.1"].agent)
    assert losing.notes == ["node2 is lost with rollout.0; the step goes on without it"]
    assert losing.notes[0] in caplog.messages  # the log of the run has it, too
    assert losing._is_lost("rollout.0") and losing._is_lost("agent.1")
    assert not losing._is_lost("policy.0")


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
    watch: Any = Watch("agent.1", *agents)
    watch._usage = {}
    watch._site.has_processes = False
    told: list[float] = []
    for agents[1].is_late in (False, True, True, False):
        report = StepReport(step=0, version=0, metrics={})
        await Supervisor._add_usage(watch, watch._site, report)
        told.append(report.metrics["cpu_seconds"])
        assert report.metrics["memory_mib/agent.1"] == 8.0
    assert told == [1.0 + 1.0, 2.0 + 1.0, 3.0 + 1.0, 4.0 + 4.0]


@pytest.mark.parametrize(
    "losing",
    [
        pytest.param(lambda: _losing(False), id="its program does not go on"),
        pytest.param(lambda: _losing(None), id="a controller is lost, too"),
        pytest.param(lambda: _losing(elsewhere=0), id="no replica is left"),
        pytest.param(lambda: _losing(least=2), id="too few are left"),
    ],
)
async def test_an_attempt_ends_where_a_step_cannot_go_on(losing: Callable[[], Any]) -> None:
    supervisor = losing()
    with pytest.raises(WorkerDied) as error:
        await supervisor._watch(supervisor._site.nodes["agent.1"].agent)
    assert "the workers of its node end with it" in error.value.why
    assert not supervisor._lost_nodes


async def test_a_machine_that_is_lost_while_the_run_starts_ends_the_attempt() -> None:
    starting = _losing()
    starting._ready.clear()
    with pytest.raises(WorkerDied):
        await starting._watch(starting._site.nodes["agent.1"].agent)


async def test_a_lost_machine_on_which_nothing_runs_costs_nothing() -> None:
    here, other = Agent("agent.0", is_lost=False), Agent("agent.1", is_lost=True)
    idle: Any = Watch("agent.0", here, other)
    assert await idle._ask_agents(USAGE) == {"agent.0": None}  # also before it is noticed
    await idle._watch(other)
    assert idle.notes == ["agent.1 is lost, and nothing of the run is there"]
    assert await idle._ask_agents(USAGE) == {"agent.0": None}
    assert other.calls == ["usage"]  # it is not asked any more

    busy: Any = Watch("agent.1", here, other)
    with pytest.raises(WorkerDied):
        await busy._ask_agents(USAGE)
    with pytest.raises(WorkerDied) as error:
        await busy._watch(other)
    assert "the workers of its node end with it" in error.value.why
    home: Any = Watch("agent.1", Agent("agent.0", is_lost=True))
    with pytest.raises(WorkerDied):
        await home._watch(home._site.nodes["agent.0"].agent)


async def test_a_checkpoint_that_is_asked_for_is_promised_for_the_end_of_the_next_step(
    tmp_path: Path,
) -> None:
    """The lead has ended this step when it is told, and saves where the next one ends."""
    (tmp_path / SAVE).touch()
    lead = _Controller(True)
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
    assert _code(-9) == "signal SIGKILL"
    assert _code(-40) == "signal 40"
