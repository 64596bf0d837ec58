"""An attempt ends at its next checkpoint when machines come or leave, where the job lets it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.errors import PlacementError
from gcore_core.contract.traits import Traits
from gcore_core.run import machines
from gcore_core.run.machines import MachineChanges

HOSTS = {"agent.0": "node1", "agent.1": "node2", "agent.2": "node3"}


class Machines:
    """A site of three machines, and a job with one replica on each."""

    def __init__(
        self, directory: Path, *, grow: str = "checkpoint", slots: int = 4, nearby: str = ""
    ) -> None:
        self.comes = asyncio.Event()
        self.asks = {node: asyncio.Event() for node in HOSTS}
        self.let_go: list[str] = []
        self.saves = 0
        self.notes: list[str] = []
        site: Any = SimpleNamespace(home="agent.0", newcomer=self._newcomer, nodes={})
        for node in HOSTS:
            go = None if node == "agent.0" else lambda node=node: self.let_go.append(node)
            asks = None if node == "agent.0" else self.asks[node].wait
            site.nodes[node] = SimpleNamespace(asks_to_leave=asks, let_go=go)
        settings = SimpleNamespace(
            cluster=SimpleNamespace(grow=grow), roles={"rollout": SimpleNamespace(slots=slots)}
        )
        traits = Traits(pushes_nearby=nearby)
        objects = {"controller": SimpleNamespace(traits=lambda: traits)}
        job: Any = SimpleNamespace(
            directory=directory,
            plan=SimpleNamespace(settings=settings, objects=objects),
            placed=SimpleNamespace(
                host=HOSTS.__getitem__,
                nodes=[SimpleNamespace(name=node) for node in HOSTS],
                window=SimpleNamespace(slots={"rollout": 3}),
            ),
        )
        self.changes = MachineChanges(job=job, site=site, note=self.notes.append, save=self._save)

    async def _newcomer(self) -> str:
        await self.comes.wait()
        return "node4"

    async def _save(self) -> None:
        self.saves += 1


@pytest.fixture
def leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which a person names machines."""

    def place_on_fewer(plan: Any, nodes: list[Any]) -> None:
        if len(nodes) < 2:
            raise PlacementError("rollout has 1 device", where="roles.rollout.slots")

    monkeypatch.setattr(machines, "_LOOK_S", 0.01)
    monkeypatch.setattr(machines, "place_on_fewer", place_on_fewer)
    (tmp_path / "leave").mkdir()
    return tmp_path / "leave"


async def _watched(machines: Machines) -> None:
    watching = asyncio.ensure_future(machines.changes.watch())
    await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_machine_that_comes_is_taken_in_at_the_next_checkpoint(leave: Path) -> None:
    """No checkpoint is made for its sake."""
    machines = Machines(leave.parent)
    await _watched(machines)
    assert not machines.changes.is_due and not machines.notes
    machines.comes.set()
    await _watched(machines)
    assert machines.changes.is_due and not machines.saves
    assert machines.notes == ["node4 has come; the run takes it in at its next checkpoint"]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"grow": "never"}, id="no attempt is to end for it"),
        pytest.param({"slots": 3}, id="there is no room"),
        pytest.param({"nearby": "push_transport"}, id="no weights would reach it"),
    ],
)
async def test_a_machine_that_comes_changes_nothing_where(
    leave: Path, changed: dict[str, Any]
) -> None:
    machines = Machines(leave.parent, **changed)
    machines.comes.set()
    await _watched(machines)
    assert not machines.changes.is_due


async def test_a_machine_that_says_that_it_leaves_is_let_go_and_a_checkpoint_made(
    leave: Path,
) -> None:
    machines = Machines(leave.parent)
    machines.asks["agent.1"].set()
    await _watched(machines)
    assert machines.changes.is_due and machines.saves == 1 and machines.let_go == ["agent.1"]
    assert machines.notes == ["node2 leaves; the run goes on without it at its next checkpoint"]


async def test_a_machine_that_a_person_names_leaves_and_the_answers_say_how(leave: Path) -> None:
    machines = Machines(leave.parent)
    (leave / "node2").touch()
    await _watched(machines)
    assert (leave / "node2").read_text() == "node2 leaves at the next checkpoint\n"
    assert machines.changes.is_due and machines.saves == 1 and machines.let_go == ["agent.1"]
    machines.changes.say_left()
    assert (leave / "node2").read_text() == "node2 has left\n"
    (leave / "node3").touch()
    await _watched(machines)
    assert machines.let_go == ["agent.1"], "two that leave are too many"
    assert "node3 does not leave: the job does not fit" in (leave / "node3").read_text()


@pytest.mark.parametrize(
    ("named", "grow", "why"),
    [
        ("node1", "checkpoint", "g-core run is there"),
        ("node9", "checkpoint", "the run has node1, node2, node3"),
        ("node2", "never", "cluster.grow is never"),
    ],
)
async def test_a_machine_that_does_not_leave_is_told_why(
    leave: Path, named: str, grow: str, why: str
) -> None:
    machines = Machines(leave.parent, grow=grow)
    (leave / named).touch()
    await _watched(machines)
    assert (leave / named).read_text() == f"{named} does not leave: {why}\n"
    assert not machines.changes.is_due and not machines.let_go
