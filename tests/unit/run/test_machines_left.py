"""A run that has lost machines goes on with those that are left, or waits for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import fake

from gcore_core.config.plan import Plan, load_plan
from gcore_core.contract.errors import ConfigError, PlacementError
from gcore_core.contract.launching import ElasticLauncher, FoundNodes, NodeFacts
from gcore_core.contract.placement import Device
from gcore_core.run.initial_placement import Placed, place_on_fewer
from gcore_core.run.machines import changes, place_run

TWO = ("roles.rollout.slots=2", "roles.rollout.least=2")  # no less than two devices will do


def planned(tmp_path: Path, *overrides: str) -> Plan:
    job = {
        "run": {"name": "fake"},
        "local": [fake.__file__],
        "data": {"use": "fake"},
        "advantage": {"use": "fake"},
        "objective": {"use": "fake"},
        "roles": {"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
        "rewards": {"letters": {"use": "fake"}},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    return load_plan(tmp_path / "job.yaml", overrides)


def machines(number: int, devices: int = 1) -> list[NodeFacts]:
    return [
        NodeFacts(
            name=f"agent.{index}",
            devices=tuple(Device(index=at, kind="cpu") for at in range(devices)),
            host=f"node{index}",
        )
        for index in range(number)
    ]


@pytest.mark.parametrize(
    ("overrides", "left", "slots"),
    [
        pytest.param(("roles.rollout.slots=4",), 4, (1, 4), id="all are left"),
        pytest.param(("roles.rollout.slots=4",), 3, (1, 3), id="a generator gives one up"),
        pytest.param(("roles.rollout.slots=4", "roles.rollout.least=3"), 3, (1, 3), id="its least"),
        pytest.param(("roles.rollout.slots=4", "roles.rollout.least=4"), 3, None, id="less"),
        pytest.param(("roles.policy.slots=2",), 1, None, id="a trainer keeps its ranks"),
        pytest.param(
            ("roles.policy.slots=2", "roles.policy.least=1", "roles.rollout.slots=2"),
            1,
            (1, 1),
            id="unless its least is less",
        ),
        pytest.param(
            ("roles.policy.slots=4", "roles.policy.least=1", "roles.rollout.slots=4"),
            3,
            (3, 3),
            id="none gives up more than it must",
        ),
        pytest.param(
            ("roles.policy.slots=3", "roles.policy.least=1", "roles.rollout.slots=4"),
            3,
            (3, 3),
            id="generators give up theirs first",
        ),
        pytest.param(
            ("roles.rollout.slots=4", "controller.shards=3", "controller.replicas=owned"),
            2,
            None,
            id="each controller owns one",
        ),
    ],
)
def test_roles_that_do_not_fit_give_up_replicas(
    tmp_path: Path, overrides: tuple[str, ...], left: int, slots: tuple[int, int] | None
) -> None:
    plan = planned(tmp_path, *overrides)
    # A trainer of several ranks is on one machine.
    nodes = machines(1, devices=left)
    if slots is None:
        with pytest.raises(PlacementError):
            place_on_fewer(plan, nodes)
    else:
        placed = place_on_fewer(plan, nodes)
        assert dict(placed.window.slots) == {"policy": slots[0], "rollout": slots[1]}
        assert [len(placed.workers[role]) for role in ("policy", "rollout")] == list(slots)


class Launcher:
    """Finds what it is told to, one after the other; the last again and again."""

    def __init__(self, *found: FoundNodes) -> None:
        self.found = list(found)
        self.asked: list[bool] = []

    async def nodes(self, devices: int | str) -> list[NodeFacts]:
        raise AssertionError("find_nodes is called in place of nodes")

    def site(self, where: Mapping[str, str], supervisor: Any, logs: Path) -> Any:
        raise AssertionError("no site is opened here")

    async def find_nodes(self, devices: int | str, *, again: bool) -> FoundNodes:
        self.asked.append(again)
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def placed_again(plan: Plan, launcher: Launcher, said: list[str]) -> Placed:
    clock = Clock()
    assert isinstance(launcher, ElasticLauncher)
    return asyncio.run(
        place_run(plan, launcher, said.append, again=True, pause=clock.pause, clock=clock)
    )


def found(nodes: Sequence[NodeFacts], refusal: str = "") -> FoundNodes:
    """Returns that these are left of two."""
    there = {node.host for node in nodes}
    missing = {host: "connect:\nNo route" for host in ("node0", "node1") if host not in there}
    return FoundNodes(nodes=list(nodes), missing=missing, refusal=refusal)


def test_it_goes_on_without_a_machine_at_once_where_it_fits(tmp_path: Path) -> None:
    said: list[str] = []
    launcher = Launcher(found(machines(1)))
    now = placed_again(planned(tmp_path), launcher, said)
    assert (said, launcher.asked) == ([], [True])
    assert now.missing == {"node1": "connect:\nNo route"}
    assert now.workers == {"policy": [[0]], "rollout": [[0]]}


def test_it_waits_for_machines_and_says_so_every_half_a_minute(tmp_path: Path) -> None:
    said: list[str] = []
    launcher = Launcher(*[found(machines(1))] * 14, found(machines(2)))
    now = placed_again(planned(tmp_path, *TWO), launcher, said)
    assert now.missing == {}
    assert set(launcher.asked) == {True}
    assert len(launcher.asked) == 15  # the last one 70 s later
    assert [line.split(":")[0] for line in said] == [
        "the run waits for node1, 600 s more",
        "the run waits for node1, 570 s more",
        "the run waits for node1, 540 s more",
    ]


def test_too_few_for_the_launcher_are_waited_for_too(tmp_path: Path) -> None:
    said: list[str] = []
    launcher = Launcher(found(machines(1), "2 hosts are the least"), found(machines(2)))
    assert placed_again(planned(tmp_path), launcher, said).missing == {}
    assert said == ["the run waits for node1, 600 s more: 2 hosts are the least"]


def test_it_ends_with_what_is_missing_when_it_has_waited_long_enough(tmp_path: Path) -> None:
    said: list[str] = []
    launcher = Launcher(found(machines(1)))
    with pytest.raises(ConfigError) as error:
        placed_again(planned(tmp_path, *TWO, "cluster.wait_s=42"), launcher, said)
    assert error.value.what == "the run does not fit on the machines that are left"
    assert "node1: No route" in error.value.why
    assert error.value.facts["missing"] == ["node1"]
    assert len(said) == 2
    assert len(launcher.asked) == 10  # at 0, 5, ... 40 and 42 s


def test_a_run_that_begins_asks_for_all(tmp_path: Path) -> None:
    launcher = Launcher(found(machines(2)))
    plan = planned(tmp_path, "roles.rollout.slots=3")
    with pytest.raises(PlacementError):  # none is missing, so nothing is given up
        asyncio.run(place_run(plan, launcher, print, again=False))
    assert launcher.asked == [False]
    fewer = Launcher(found(machines(1, devices=2)))
    placed = asyncio.run(place_run(plan, fewer, print, again=False))
    assert placed.window.slots["rollout"] == 2


def test_what_has_come_and_gone_is_told_once() -> None:
    assert changes({"a": "x"}, {"b": "tried\nno route"}) == [
        "b is missing, the run goes on without it: no route",
        "a is there again",
    ]
    assert changes({"a": "x"}, {"a": "y"}) == []
