"""A machine that comes within a run gets generators, and each shard draws from them alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.errors import ConfigError, WorkerDied, WorkerError
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.placement import Device, Window
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.lost_nodes import LostNodes
from gcore_core.controllers.newcomers import ShardNewcomers
from gcore_core.controllers.synchronous import SynchronousController
from gcore_core.run import newcomers as taking_in
from gcore_core.run.initial_placement import Placed
from gcore_core.run.jobs import Job
from gcore_core.run.newcomers import Come, RunNewcomers, place_newcomer
from gcore_core.run.preflight import check_pushes
from gcore_core.runtime.messages import SPAWN, NewReplicas, WorkerExit
from gcore_core.runtime.process.addresses import add_node, assign, remove_node
from gcore_core.testing.faults import Faults
from gcore_core.testing.simulation import SimulatedJob, run_virtual, simulate, violations

NODES = {"agent.0": ("10.0.0.1", "/tmp/0"), "agent.1": ("10.0.0.2", "/tmp/1")}
WHERE = {"supervisor": "agent.0", "rollout.0": "agent.1"}
NEW = ("10.0.0.3", "/tmp/2")


# -- addresses -------------------------------------------------------------------------------------


def test_a_node_that_comes_has_the_addresses_that_it_would_have_had_from_the_beginning() -> None:
    at_once = assign({**NODES, "agent.2": NEW}, {**WHERE, "rollout.1": "agent.2"}, 29400)
    later = assign(NODES, WHERE, 29400)
    before = assign(NODES, WHERE, 29400)
    add_node(later, "agent.2", NEW, ["rollout.1"], 29400)
    assert later == at_once
    remove_node(later, "agent.2", ["rollout.1"])
    assert later == before


def test_a_single_node_that_others_may_join_is_reached_by_tls_from_the_beginning() -> None:
    alone = {"agent.0": NODES["agent.0"]}
    where = dict.fromkeys(WHERE, "agent.0")
    assert not assign(alone, where, 29400).public
    grows = assign(alone, where, 29400, grows=True)
    add_node(grows, "agent.2", NEW, ["rollout.1"], 29400)
    assert grows.views["agent.2"]["supervisor"] == "tls:10.0.0.1:29402"
    assert grows.views["agent.0"]["rollout.1"] == "tls:10.0.0.3:29402"
    assert grows.views["agent.0"]["supervisor"] == "unix:/tmp/0/supervisor"


def test_a_machine_that_comes_back_gets_ports_behind_those_of_before() -> None:
    """What is left of its first agent may still hold those."""
    addresses = assign(NODES, WHERE, 29400)
    add_node(addresses, "agent.2", NODES["agent.1"], ["rollout.1"], 29400)
    assert addresses.public["rollout.0"] == "tls:10.0.0.2:29402"
    assert addresses.public["agent.2"] == "tls:10.0.0.2:29403"
    assert addresses.bulk["agent.2"] == "tls:10.0.0.2:29404"
    assert addresses.public["rollout.1"] == "tls:10.0.0.2:29405"


def test_a_node_that_needs_a_port_behind_the_last_is_refused() -> None:
    addresses = assign(NODES, WHERE, 29400)
    with pytest.raises(ConfigError, match="the last one is 65535"):
        add_node(addresses, "agent.2", NEW, ["rollout.1", "rollout.2"], 65533)


# -- placement -------------------------------------------------------------------------------------


def _placed() -> Placed:
    devices = tuple(
        Device(index=index, kind="cpu", node="agent.0", number=index) for index in range(4)
    )
    return Placed(
        workers={"policy": [[0]], "rollout": [[1], [2]]},
        nodes=(NodeFacts(name="agent.0", devices=devices),),
        window=Window(devices=devices, slots={"policy": 1, "rollout": 2}),
    )


@pytest.mark.parametrize(
    ("size", "room", "added"),
    [
        pytest.param(1, 9, [[4], [5], [6]], id="one device a replica"),
        pytest.param(1, 2, [[4], [5]], id="no more than there is room for"),
        pytest.param(2, 9, [[4, 5]], id="two devices a replica, one is left"),
        pytest.param(4, 9, [], id="too few devices for one"),
    ],
)
def test_a_machine_gets_as_many_replicas_as_it_has_devices_for(
    size: int, room: int, added: list[list[int]]
) -> None:
    """Numbers and devices of all others stay, and a device keeps its number on its machine."""
    there = tuple(Device(index=index, kind="cpu") for index in (3, 5, 7))
    facts = NodeFacts(name="agent.4", devices=there, host="ten")
    placed = place_newcomer(_placed(), facts, size, room)
    assert placed.workers == {"policy": [[0]], "rollout": [[1], [2], *added]}
    assert placed.host("agent.4") == "ten"
    for number, devices in enumerate(added, start=2):
        assert placed.node_of("rollout", number) == "agent.4"
        numbers = tuple(there[index - 4].local_index for index in devices)
        assert placed.local_devices("rollout", number) == numbers


# -- controllers -----------------------------------------------------------------------------------


class Network:
    """Knows processes by their addresses, as ``GrowingNetwork`` says."""

    traffic: Any = None
    deadlines: Any = None

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}

    def introduce(self, addresses: Any) -> None:
        self.addresses |= addresses

    def peer(self, name: str) -> Any:
        return SimpleNamespace(name=name, address=self.addresses[name])

    async def serve(self, name: str, service: Any) -> None: ...

    async def close(self) -> None: ...


def _new(number: int) -> NewReplicas:
    names = [f"rollout.{number}", f"rollout.{number + 1}"]
    node = f"agent.{number}"
    return NewReplicas(node, names, {name: f"tls:{name}" for name in (node, *names)})


def test_a_replica_is_taken_in_once_however_often_it_is_told() -> None:
    newcomers = ShardNewcomers(Network(), LostNodes())
    for new in (_new(2), _new(2), _new(4), _new(2)):
        newcomers.meet(new)
    names = ["rollout.2", "rollout.3", "rollout.4", "rollout.5"]
    assert newcomers.take_waiting() == names
    assert newcomers.take_waiting() == []
    assert [peer.name for peer in newcomers.peers(names)] == names


def test_a_machine_that_has_come_may_be_lost_like_any_other() -> None:
    lost = LostNodes()
    lost.survivable = True
    newcomers = ShardNewcomers(Network(), lost)
    assert not lost.lose("agent.2")  # nobody has told of it
    newcomers.meet(_new(2))
    assert not lost.has("rollout.3")
    assert lost.lose("agent.2")
    assert lost.has("rollout.3") and lost.names() == ["agent.2"]


JOB = SimulatedJob(replicas=2, prompts=4, samples=2, evaluate_prompts=2)


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"generator_nodes": 2},
        {"owns_replicas": True},
        pytest.param({"rests": True}, marks=pytest.mark.slow),
        pytest.param({"pushes": False}, marks=pytest.mark.slow),
        pytest.param({"annotators": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda setting: next(iter(setting), "plain"),
)
def test_whenever_a_machine_comes_the_run_is_the_calm_one(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    """Every ordinal has one verdict, and weights and digests are those of a run without it."""
    job = replace(JOB, **setting)
    calm = run_virtual(simulate(replace(job, shards=1), tmp_path / "calm"))
    drew = []
    contexts: list[ControllerContext] = []

    def program(config: SyncConfig, context: ControllerContext) -> SynchronousController:
        contexts.append(context)
        return SynchronousController(config, context)

    for share in (0.02, 0.3, 0.7):
        contexts.clear()
        repeats = not job.deterministic and not job.owns_replicas  # `check` refuses both together
        job = replace(job, deterministic=repeats, comes_s=share * calm.virtual_s)
        weather = Faults(7, rate=0.0, kills=0.0)
        outcome = run_virtual(simulate(job, tmp_path / f"{share}", weather, program))
        assert violations(outcome, calm, weather, job) == []
        known = [[peer.name for peer in context.replicas] for context in contexts]
        assert known == [known[0]] * job.shards, "shards deal over different replicas"
        drew.append(outcome.versions.get("rollout.2", []))
    assert drew[0] or not job.pushes, "it has had no push, so it has drawn nothing"


@pytest.mark.parametrize(
    "share",
    [0.45, pytest.param(0.6, marks=pytest.mark.slow), pytest.param(0.8, marks=pytest.mark.slow)],
)
def test_a_machine_that_has_come_and_one_of_before_are_lost_like_any(
    share: float, tmp_path: Path
) -> None:
    calm = run_virtual(simulate(replace(JOB, shards=1), tmp_path / "calm"))
    job = replace(JOB, generator_nodes=2, replicas=4, comes_s=0.05 * calm.virtual_s)
    job = replace(job, loses_s=share * calm.virtual_s)
    weather = Faults(7, rate=0.0, kills=0.0)
    outcome = run_virtual(simulate(job, tmp_path / "lost", weather))
    assert outcome.lost
    assert violations(outcome, calm, weather, job) == []


# -- the supervisor --------------------------------------------------------------------------------


class Machines:
    """Has machines come, each of which can be taken in, or not."""

    def __init__(self, *hosts: str) -> None:
        self.site: Any = SimpleNamespace(newcomers=self, where={"rollout.0": "agent.0"}, nodes={})
        self.hosts = list(hosts)
        self.let = list[str]()

    async def next(self) -> NodeFacts:
        if not self.hosts:
            await asyncio.Event().wait()
        host = self.hosts.pop(0)
        device = Device(index=0, kind="cpu")
        return NodeFacts(name=f"agent.{len(self.hosts) + 1}", devices=(device,), host=host)

    async def take_in(self, node: str, processes: Any) -> None:
        self.site.where.update(dict.fromkeys(processes, node))

    async def let_go(self, node: str, why: str) -> None:
        self.let.append(why)
        where = self.site.where
        self.site.where = {name: there for name, there in where.items() if there != node}


class Taking(RunNewcomers):
    """Has the parts that need processes replaced."""

    async def _introduce(self, node: str) -> None: ...

    async def _start(self, job: Any, node: str, replicas: Any) -> None:
        if job.placed.host(node) == "broken":
            raise WorkerError("its engine does not start", where=node)

    async def _admit(self, come: Any) -> bool:
        self.admitted(come)
        return True


@dataclass(frozen=True)
class OneJob:
    """What is asked of a job."""

    plan: Any
    placed: Placed

    def workers(self, role: str) -> list[str]:
        return [f"{role}.{rank}" for rank in range(len(self.placed.workers[role]))]


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a run take machines in; returns the replicas that were admitted, and what was said."""

    async def provide(*args: Any) -> None: ...

    monkeypatch.setattr(taking_in, "provide", provide)
    monkeypatch.setattr(taking_in, "_AGAIN_S", 0.0)

    async def taken(machines: Machines, slots: int) -> tuple[list[str], list[str]]:
        settings = SimpleNamespace(roles={"rollout": SimpleNamespace(slots=slots)})
        plan = SimpleNamespace(settings=settings, objects={"roles.rollout": None})
        placed = replace(_placed(), workers={"policy": [[0]], "rollout": [[1]]})
        job: Any = OneJob(plan, placed)
        come = list[str]()
        notes = list[str]()

        def admitted(one: Come) -> None:
            come.extend(one.replicas)

        names = ["controller.0"]
        taking = Taking(job, machines.site, None, names, set(), admitted, notes.append)
        task = asyncio.ensure_future(taking.run())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return come, notes

    return taken


async def test_machines_are_taken_in_until_the_role_has_its_slots(take: Any) -> None:
    machines = Machines("one", "two", "three")
    come, notes = await take(machines, slots=3)
    assert (come, notes) == (["rollout.1", "rollout.2"], [])
    assert machines.hosts == ["three"], "nobody may be asked for a machine without need"


async def test_a_machine_on_which_nothing_starts_is_let_go_and_the_run_goes_on(take: Any) -> None:
    """Its replica's number is given again: controllers have never heard of it."""
    machines = Machines("broken", "whole")
    come, notes = await take(machines, slots=2)
    assert come == ["rollout.1"]
    assert notes == ["broken has come and is not taken in: agent.2: its engine does not start"]
    assert machines.let == ["agent.2: its engine does not start"]
    assert machines.site.where == {"rollout.0": "agent.0", "rollout.1": "agent.1"}


class StartingAgent:
    """An agent whose workers all come up, and one of which ends when the agent is told so."""

    def __init__(self, taking: RunNewcomers, *, ends: bool) -> None:
        self.taking = taking
        self.ends = ends
        self.exits = asyncio.Queue[WorkerExit]()

    async def stream(self, *_: Any) -> AsyncIterator[WorkerExit]:
        while True:
            yield await self.exits.get()

    async def call(self, endpoint: Any, request: Any) -> None:
        if endpoint is SPAWN:
            self.taking.up("rollout.1")
        elif self.ends:  # all are told to be up
            self.exits.put_nowait(WorkerExit("rollout.1", 7, 1, False, "no memory"))
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_replica_that_ends_as_soon_as_it_is_up_keeps_its_machine_out(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking_in, "worker_specs", lambda job, site: [])
    job: Any = None
    deadlines = SimpleNamespace(seconds=lambda wait: 5.0)
    site: Any = SimpleNamespace(nodes={}, network=SimpleNamespace(deadlines=deadlines))
    taking = RunNewcomers(job, site, None, [], set(), lambda come: None, lambda line: None)
    site.nodes["agent.1"] = SimpleNamespace(agent=StartingAgent(taking, ends=ends))
    expected = pytest.raises(WorkerDied, match="ended with 1") if ends else nullcontext()
    with expected:
        await taking._start(job, "agent.1", ["rollout.1"])


# -- jobs whose weights reach no other machine -----------------------------------------------------


class Elastic:
    """A launcher that may find further machines."""

    async def nodes(self, devices: Any) -> Any: ...

    def site(self, where: Any, supervisor: Any, logs: Any) -> Any: ...

    async def find_nodes(self, devices: Any, *, again: bool) -> Any: ...


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_no_machine_is_taken_in_where_weights_would_not_reach_it(transport: str) -> None:
    """The first push to it would end the run. A job that is placed so is refused before it runs."""
    plan: Any = SimpleNamespace(objects={"controller": SyncConfig(push_transport=transport)})  # type: ignore[arg-type]
    job: Any = SimpleNamespace(plan=plan, may_lose_nodes=True)
    site: Any = SimpleNamespace(newcomers=object())
    launcher: Any = Elastic()
    assert not Job.grows(job, site)
    setting = f"controller.config.push_transport={transport}"
    line = f"no host is taken in while the run goes on: {setting} reaches no other machine"
    assert check_pushes(plan, _placed(), launcher) == line
    facts = NodeFacts(
        name="agent.1", devices=(Device(index=0, kind="cpu", node="agent.1"),), host="node2"
    )
    with pytest.raises(ConfigError, match=f"{setting} pushes weights to no other machine"):
        check_pushes(plan, place_newcomer(_placed(), facts, 1, 1), launcher)


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_machines_are_taken_in_where_weights_reach_them(transport: str) -> None:
    plan: Any = SimpleNamespace(objects={"controller": SyncConfig(push_transport=transport)})  # type: ignore[arg-type]
    job: Any = SimpleNamespace(plan=plan, may_lose_nodes=True)
    site: Any = SimpleNamespace(newcomers=object())
    launcher: Any = Elastic()
    assert Job.grows(job, site)
    assert check_pushes(plan, _placed(), launcher) == ""
