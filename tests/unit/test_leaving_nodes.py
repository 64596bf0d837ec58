"""A machine of generators leaves a run on purpose, and nothing is drawn twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.records import Lease
from gcore_core.controllers.lost_nodes import LostNodes
from gcore_core.controllers.window.ledger import Ledger
from gcore_core.run.leaving_nodes import LeavingNodes
from gcore_core.runtime.messages import LEAVE, LEAVING, STAY, LostNodeReply, Nothing, Stay
from gcore_core.runtime.process.leaving import SIGTERM_PASSED_ON, Leaving
from gcore_core.testing.faults import Faults
from gcore_core.testing.simulation import SimulatedJob, run_virtual, simulate, violations

CALL: Any = None  # nobody looks at it


# -- the shards ------------------------------------------------------------------------------------

JOB = SimulatedJob(replicas=4, generator_nodes=2, prompts=4, samples=2, evaluate_prompts=2)


@pytest.fixture
def drawn_again(monkeypatch: pytest.MonkeyPatch) -> list[Lease]:
    """Notes the leases that a ledger has drawn a second time."""
    again: list[Lease] = []
    for name in ("lost", "forget"):
        method: Callable[..., list[Lease] | None] = getattr(Ledger, name)

        def noted(*args: Any, _method: Any = method) -> Any:
            leases = _method(*args)
            again.extend(leases or ())
            return leases

        monkeypatch.setattr(Ledger, name, noted)
    return again


@pytest.mark.parametrize(
    "setting",
    [
        {},
        pytest.param({"evaluate_every": 1}, marks=pytest.mark.slow),
        pytest.param({"owns_replicas": True}, marks=pytest.mark.slow),
        pytest.param({"pushes": False}, marks=pytest.mark.slow),
        pytest.param({"takes_stale": True}, marks=pytest.mark.slow),
    ],
    ids=lambda setting: next(iter(setting), "plain"),
)
def test_whenever_a_machine_leaves_no_record_is_drawn_twice_and_the_run_is_the_calm_one(
    setting: dict[str, Any], tmp_path: Path, drawn_again: list[Lease]
) -> None:
    job = replace(JOB, **setting)
    calm = run_virtual(simulate(replace(job, shards=1), tmp_path / "calm"))
    left = set()
    for share in (0.02, 0.3, 0.55):
        # A deterministic run cannot have replicas that each hear one controller alone.
        is_deterministic = not job.deterministic and not job.owns_replicas
        job = replace(job, deterministic=is_deterministic, leaves_s=share * calm.virtual_s)
        weather = Faults(7, rate=0.0, kills=0.0)
        outcome = run_virtual(simulate(job, tmp_path / f"{share}", weather))
        assert violations(outcome, calm, weather, job) == []
        assert drawn_again == []
        left.add(outcome.left)
    assert left - {""}, "no machine has left before the run ended"


def test_one_that_leaves_is_spared_where_another_can_be_asked() -> None:
    lost = LostNodes({"node1": ["rollout.0"], "node2": ["rollout.1"]})
    assert not lost.leave("node1"), "a program that cannot do without it"
    lost.survivable = True
    assert not lost.leave("node3"), "one that has more than generators"
    peers: list[Any] = [SimpleNamespace(name=f"rollout.{i}") for i in range(2)]
    assert lost.leave("node1") and lost.leave("node1")
    assert lost.stand_in(peers, 0) is peers[0], "each shard has to give it its part"
    assert lost.stand_in(peers, 0, spares_leaving=True) is peers[1]
    assert lost.lose("node2")
    assert lost.stand_in(peers, 1, spares_leaving=True) is peers[0], "nobody else is left"
    assert lost.take_leaving() == ["node1"] and lost.take_leaving() == []


# -- the agent -------------------------------------------------------------------------------------


class Ends:
    """Counts how often an agent was ended."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_the_first_sigterm_asks_and_the_second_ends_the_agent() -> None:
    """A SIGTERM that comes directly and is passed on, too, counts once."""
    ends = Ends()
    leaving = Leaving(600.0, ends)
    asked = leaving.leaving(Nothing(), CALL)
    for number in (SIGTERM_PASSED_ON, signal.SIGTERM):
        leaving.signalled(number)
    await anext(asked)
    assert ends.count == 0
    for number in (signal.SIGTERM, SIGTERM_PASSED_ON):
        leaving.signalled(number)
    assert ends.count == 1
    leaving.close()


async def test_an_agent_that_is_refused_stays_and_may_ask_again() -> None:
    ends = Ends()
    leaving = Leaving(0.0, ends)
    asked = leaving.leaving(Nothing(), CALL)
    await leaving.leave(Nothing(), CALL)
    await anext(asked)
    await leaving.stay(Stay("it has policy.0"), CALL)
    await asyncio.sleep(0.01)
    assert ends.count == 0, "the deadline holds though it was refused"
    await leaving.leave(Nothing(), CALL)
    await anext(asked)
    await anext(leaving.leaving(Nothing(), CALL))  # the supervisor of the next attempt
    leaving.close()


async def test_an_agent_that_is_not_let_go_ends_at_the_deadline() -> None:
    ended = asyncio.Event()
    leaving = Leaving(0.0, ended.set)
    await leaving.leave(Nothing(), CALL)
    await ended.wait()


# -- the supervisor --------------------------------------------------------------------------------

NODES = ("agent.0", "agent.1", "agent.2")


class Machine:
    """Is one node of a site, and its agent."""

    def __init__(self) -> None:
        self.agent = self
        self.asks = asyncio.Event()
        self.calls: list[Any] = []
        self.heard: list[str] = []
        self.has_ended = False

    async def call(self, endpoint: Any, request: Any, *, deadline_s: Any = None) -> Any:
        self.calls.append((endpoint, request))
        if endpoint is LEAVE:
            self.asks.set()

    async def stream(self, endpoint: Any, request: Any) -> Any:
        assert endpoint is LEAVING
        await self.asks.wait()
        yield Nothing()

    async def tell(self, line: str) -> None:
        self.heard.append(line)

    async def let_go(self) -> None:
        self.has_ended = True


class Controllers:
    """Answers for every controller whether it does without a machine."""

    def __init__(self, goes_on: bool) -> None:
        self.goes_on = goes_on
        self.told: list[str] = []

    def peer(self, name: str) -> Any:
        async def call(endpoint: Any, request: Any, *, deadline_s: Any = None) -> Any:
            self.told.append(f"{endpoint.name} {name}")
            return LostNodeReply(self.goes_on)

        return SimpleNamespace(name=name, call=call)


def _leaving(
    directory: Path, where: dict[str, str], *, goes_on: bool = True, least: int = 1
) -> tuple[LeavingNodes, dict[str, Machine], Controllers, list[str]]:
    machines = {name: Machine() for name in NODES}
    controllers = Controllers(goes_on)
    notes: list[str] = []
    site: Any = SimpleNamespace(nodes=machines, where=where, network=controllers)
    up = asyncio.Event()
    up.set()
    leaving = LeavingNodes(
        directory=directory,
        site=site,
        homecoming=None,
        controllers={"controller.0", "controller.1"},
        expendable={"agent.1": ["rollout.1"], "agent.2": ["rollout.2"]},
        lost=set(),
        least=least,
        host=lambda node: node.replace("agent.", "host"),
        note=notes.append,
        is_up=up,
    )
    return leaving, machines, controllers, notes


WHERE = {"policy.0": "agent.0", "rollout.0": "agent.0", "rollout.1": "agent.1"}


async def test_a_machine_leaves_behind_the_step_that_frees_it(tmp_path: Path) -> None:
    leaving, machines, controllers, notes = _leaving(tmp_path, dict(WHERE))
    machines["agent.1"].asks.set()
    await leaving.watch("agent.1")
    await leaving.step_ended()
    assert not leaving.left, "its replicas are still asked"
    leaving.freed(["agent.1"])
    await leaving.step_ended()
    await leaving.close()
    assert machines["agent.1"].has_ended and leaving.left == leaving.lost == {"agent.1"}
    lines = [
        "host1 finishes what it has begun, and leaves then",
        "host1 has left with rollout.1; nothing of it is drawn again",
    ]
    assert notes == machines["agent.1"].heard == lines
    assert controllers.told[:2] == ["leave_node controller.1", "leave_node controller.0"]


async def test_a_machine_with_nothing_of_the_run_leaves_at_once(tmp_path: Path) -> None:
    leaving, machines, _, notes = _leaving(tmp_path, dict(WHERE))
    machines["agent.2"].asks.set()
    await leaving.watch("agent.2")
    await leaving.close()
    assert machines["agent.2"].has_ended
    assert notes == ["host2 has left; nothing of it is drawn again"]


@pytest.mark.parametrize(
    ("more", "settings", "why"),
    [
        pytest.param(
            {"judge.0": "agent.1"},
            {},
            "it has judge.0, and only generators can leave within a run",
            id="a judge",
        ),
        pytest.param(
            {"rollout.3": "agent.0", "rollout.0": "agent.3"},
            {"least": 3},
            "2 replicas would be left, and roles.rollout.least is 3",
            id="least",
        ),
        pytest.param(
            {}, {"goes_on": False}, "the step program cannot go on without it", id="program"
        ),
    ],
)
async def test_a_machine_that_the_run_needs_stays_and_hears_why(
    more: dict[str, str], settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    leaving, machines, _, notes = _leaving(tmp_path, {**WHERE, **more}, **settings)
    machine = machines["agent.1"]
    machine.asks.set()
    await leaving.watch("agent.1")
    assert machine.calls == [(STAY, Stay(why))]
    assert notes == machine.heard == [f"host1 does not leave: {why}"]
    assert not machine.has_ended


async def test_a_file_in_the_runs_directory_has_a_machine_asked(tmp_path: Path) -> None:
    leaving, machines, _, _ = _leaving(tmp_path, {**WHERE, "judge.0": "agent.1"})
    (tmp_path / "leave").mkdir()
    for name in ("host1", "host9"):
        (tmp_path / "leave" / name).touch()
    looking = asyncio.ensure_future(leaving.look())
    await leaving.watch("agent.1")
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    answers = {file.name: file.read_text() for file in (tmp_path / "leave").iterdir()}
    assert answers == {
        "host1": "host1 does not leave: it has judge.0, and only generators can leave within a "
        "run\n",
        "host9": "host9 does not leave: the run has host0, host1, host2\n",
    }
    assert machines["agent.1"].calls[0][0] is LEAVE


async def test_whoever_names_a_machine_in_another_way_is_answered_too(tmp_path: Path) -> None:
    """By its host and by its node, at once."""
    leaving, _, _, _ = _leaving(tmp_path, {**WHERE, "judge.0": "agent.1"})
    (tmp_path / "leave").mkdir()
    files = [tmp_path / "leave" / name for name in ("agent.1", "host1")]
    for file in files:
        file.touch()
        await leaving._named(file)
    await leaving.watch("agent.1")
    why = "it has judge.0, and only generators can leave within a run"
    assert [file.read_text() for file in files] == [f"host1 does not leave: {why}\n"] * 2
