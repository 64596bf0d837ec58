"""What is asked of Ray while it has not enough; a stand-in answers in Ray's place."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from gcore_nodes.ray import cluster as module
from gcore_nodes.ray.cluster import Cluster, Refused
from gcore_nodes.ray.messages import Event, Waiting, Wish


class FakeRay:
    """Has nodes, and makes placement groups that are ready when ``is_ready`` says so.

    asked: the bundles of every group that was asked for.
    removed: how many groups were given back.
    """

    def __init__(self) -> None:
        self.gpus: dict[str, float] = {}
        self.asked: list[list[dict[str, float]]] = []
        self.removed = 0
        self.looks = 0
        self.is_ready: Callable[[], bool] = lambda: True

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": address,
                "NodeManagerAddress": address,
                "Alive": True,
                "Resources": {"CPU": 4.0, "GPU": gpus, f"node:{address}": 1.0},
            }
            for address, gpus in self.gpus.items()
        ]

    def free(self) -> dict[str, dict[str, float]]:
        return {node["NodeID"]: node["Resources"] for node in self.nodes()}

    def group(self, made: list[dict[str, float]], strategy: str, name: str) -> Any:
        assert strategy == "STRICT_SPREAD"
        self.asked.append(made)
        return SimpleNamespace(wait=self._wait)

    def _wait(self, timeout_s: float) -> bool:
        self.looks += 1
        return self.is_ready()

    def remove(self, group: Any) -> None:
        self.removed += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()

    def stand_in(name: str, **names: Any) -> None:
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    stand_in("ray", nodes=fake.nodes, __path__=[])
    stand_in("ray._private", __path__=[])
    stand_in("ray._private.state", available_resources_per_node=fake.free)
    stand_in("ray.util", remove_placement_group=fake.remove, __path__=[])
    stand_in("ray.util.placement_group", placement_group=fake.group)
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    monkeypatch.setattr(module, "_SAY_S", 0.0)
    return fake


def wish(**settings: Any) -> Wish:
    usual: dict[str, Any] = {"nodes": None, "resources": {}, "wait_s": 30.0}
    return Wish(cluster="auto", python=None, start_s=30.0, **{**usual, **settings})


def reserve(wish: Wish) -> tuple[list[dict[str, float]], list[str]]:
    """Returns the bundles that Ray has set aside, and what was said meanwhile."""
    said: list[str] = []

    def tell(event: Event) -> None:
        assert isinstance(event, Waiting)
        said.append(event.why)

    return asyncio.run(Cluster(wish, tell)._reserve()), said


def test_a_group_that_is_pending_is_told_until_it_is_ready(ray: FakeRay) -> None:
    """One group is asked for, and stays: it is what an autoscaler starts nodes for."""
    ray.gpus = {"10.0.0.1": 8.0}

    def is_ready() -> bool:
        if ray.looks == 3:
            ray.gpus["10.0.0.2"] = 8.0
        return ray.looks > 3

    ray.is_ready = is_ready
    made, said = reserve(wish(nodes=2, resources={"GPU": 8.0}))
    assert made == [{"GPU": 8.0}, {"GPU": 8.0}]
    assert (ray.asked, ray.removed) == ([made], 0)
    assert said[0] == "2 nodes with GPU 8 free are asked for; Ray has 1"


def test_a_node_that_dies_while_it_is_waited_for_is_no_longer_asked_for(ray: FakeRay) -> None:
    ray.gpus = {"10.0.0.1": 8.0, "10.0.0.2": 8.0}

    def is_ready() -> bool:
        if ray.looks == 2:
            del ray.gpus["10.0.0.2"]
        return len(ray.gpus) == 1 and ray.looks > 2

    ray.is_ready = is_ready
    made, _ = reserve(wish())
    assert [len(bundles) for bundles in ray.asked] == [2, 1]
    assert made == [{"CPU": 4.0, "GPU": 8.0, "node:10.0.0.1": 0.001}]
    assert ray.removed == 1


def test_a_run_that_has_lost_a_node_takes_fewer_after_a_while(ray: FakeRay) -> None:
    """First as many as before are asked for, so that an autoscaler may bring one."""
    ray.gpus = {"10.0.0.1": 8.0}
    ray.is_ready = lambda: len(ray.asked) == 2
    made, _ = reserve(wish(nodes=2, resources={"GPU": 8.0}, settle_s=0.2))
    assert ray.asked == [[{"GPU": 8.0}] * 2, made]
    assert made == [{"GPU": 8.0, "node:10.0.0.1": 0.001}]


def test_fewer_than_the_least_are_not_taken(ray: FakeRay) -> None:
    ray.gpus = {"10.0.0.1": 8.0}
    ray.is_ready = lambda: False
    with pytest.raises(Refused, match="no such machines"):
        reserve(wish(nodes=3, resources={"GPU": 8.0}, settle_s=0.0, least=2, wait_s=0.3))
    assert all(len(bundles) == 3 for bundles in ray.asked)


def test_a_run_that_is_placed_gets_the_nodes_that_it_was_placed_on(ray: FakeRay) -> None:
    ray.gpus = {"10.0.0.1": 8.0, "10.0.0.2": 8.0, "10.0.0.3": 8.0}
    made, _ = reserve(wish(resources={"GPU": 4.0}, addresses=["10.0.0.3", "10.0.0.1"]))
    assert made == [
        {"GPU": 4.0, "node:10.0.0.3": 0.001},
        {"GPU": 4.0, "node:10.0.0.1": 0.001},
    ]
    with pytest.raises(Refused) as error:
        reserve(wish(addresses=["10.0.0.1", "10.0.0.9"]))
    assert (error.value.failed.where, error.value.failed.is_lost) == ("10.0.0.9", True)


def test_waiting_ends_and_says_what_is_missing(ray: FakeRay) -> None:
    ray.gpus = {"10.0.0.1": 4.0}
    ray.is_ready = lambda: False
    with pytest.raises(Refused) as error:
        reserve(wish(nodes=1, resources={"GPU": 8.0}, wait_s=0.2))
    assert error.value.failed.what == "Ray has no such machines after 0.2 s"
    assert error.value.failed.why.endswith("Ray has 0; 10.0.0.1 has GPU 4 of 8")
    assert "wait_s" in error.value.failed.todo


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (ConnectionError("Could not find any running Ray instance."), "a node of no Ray cluster"),
        (
            RuntimeError("Version mismatch: The cluster was started with: Ray: 2.9.0"),
            "another version of Ray or Python",
        ),
        (ValueError("odd"), "cannot be joined"),
    ],
)
def test_why_a_cluster_cannot_be_joined(error: Exception, what: str) -> None:
    failed = module._not_joined("auto", "2.60.0", error)
    assert what in failed.what
    assert f"{error}" in failed.why
    assert failed.where == "launcher.config.cluster"


def test_a_machine_where_ray_was_started_again_is_one_node(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.gpus = {"10.0.0.1": 8.0}
    (node,) = ray.nodes()
    monkeypatch.setattr(sys.modules["ray"], "nodes", lambda: [node, {**node, "NodeID": "new"}])
    assert [one.address for one in module.alive()] == ["10.0.0.1"]


def test_a_placed_run_asks_for_what_it_was_placed_on(ray: FakeRay) -> None:
    """Of two nodes that differ, each gives what the smaller one has, also when the site opens."""
    ray.gpus = {"10.0.0.1": 8.0, "10.0.0.2": 4.0}
    found, _ = reserve(wish(nodes=2))
    placed, _ = reserve(wish(nodes=2, addresses=["10.0.0.1", "10.0.0.2"]))
    assert found == [{"CPU": 4.0, "GPU": 4.0}] * 2
    assert placed == [
        {"CPU": 4.0, "GPU": 4.0, "node:10.0.0.1": 0.001},
        {"CPU": 4.0, "GPU": 4.0, "node:10.0.0.2": 0.001},
    ]
