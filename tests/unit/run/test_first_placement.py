"""Which generators sleep while the trainer works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gcore_testing import fake

from gcore_core.config.plan import Plan, load_plan
from gcore_core.contract.errors import PlacementError
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.placement import Device, Need, Window
from gcore_core.node.devices import share_of_cores
from gcore_core.node.launchers import InlineLauncher
from gcore_core.run.initial_placement import Placed, place
from gcore_core.run.jobs import Job, _facts, _last_ordinal

JOB = {
    "run": {"name": "fake"},
    "local": [fake.__file__],
    "data": {"use": "fake"},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
    "rewards": {"letters": {"use": "fake"}},
}


@pytest.mark.parametrize(
    ("wanted", "kind", "devices", "asleep_in_training"),
    [
        ("auto", "cuda", 1, ["rollout"]),
        ("auto", "cuda", 2, []),  # one for each
        ("auto", "cpu", 1, []),
        ("always", "cpu", 2, ["rollout"]),
        ("never", "cuda", 1, []),
    ],
)
def test_by_default_generators_sleep_only_if_they_share_an_accelerator_with_the_trainer(
    wanted: str,
    kind: str,
    devices: int,
    asleep_in_training: list[str],
    tmp_path: Path,
) -> None:
    found = tuple(Device(index=index, kind=kind) for index in range(devices))
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    plan = load_plan(tmp_path / "job.yaml", [f"placement.sleep_in_training={wanted}"])
    assert (
        place(plan, [NodeFacts(name="agent.0", devices=found)]).asleep_in_training
        == asleep_in_training
    )


@pytest.mark.parametrize(
    ("moves", "judge_sleeps", "note"),
    [
        (
            True,
            False,
            "judge cannot sleep in a rollout, so no generators take turns on a device",
        ),
        (True, True, ""),
        (False, False, ""),
    ],
)
def test_a_generator_that_cannot_sleep_is_named_where_devices_may_move(
    moves: bool, judge_sleeps: bool, note: str
) -> None:
    needs = {
        "policy": Need(kind="trainer", sleeps=False),
        "rollout": Need(kind="generator", follows="policy"),
        "judge": Need(kind="generator", sleeps=judge_sleeps),
    }
    window = Window(devices=(), slots={}, needs=needs)
    assert Placed(window=window, moves=moves).note == note


def two_nodes(devices: int) -> list[NodeFacts]:
    """Returns two machines with so many devices each, both numbered from 0."""
    found = tuple(Device(index=index, kind="cpu") for index in range(devices))
    hosts = {"agent.0": "10.0.0.1", "agent.1": "10.0.0.2"}
    return [NodeFacts(name=name, devices=found, host=host) for name, host in hosts.items()]


def planned(tmp_path: Path, *overrides: str) -> Plan:
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    return load_plan(tmp_path / "job.yaml", overrides)


def test_devices_are_numbered_through_and_workers_get_their_nodes_numbers(tmp_path: Path) -> None:
    plan = planned(tmp_path, "roles.policy.slots=2", "roles.rollout.slots=2")
    placed = place(plan, two_nodes(2))
    assert [device.index for device in placed.window.devices] == [0, 1, 2, 3]
    assert [placed.node_of("policy", rank) for rank in range(2)] == ["agent.0", "agent.0"]
    assert [placed.node_of("rollout", rank) for rank in range(2)] == ["agent.1", "agent.1"]
    assert [placed.local_devices("rollout", rank) for rank in range(2)] == [(0,), (1,)]


def job_of(plan: Plan, placed: Placed) -> Job:
    return Job(
        plan=plan,
        directory=Path("run"),
        models={},
        rows={"train": 100},
        launcher=InlineLauncher(),
        placed=placed,
    )


def test_scorers_and_controllers_take_the_nodes_in_turn(tmp_path: Path) -> None:
    plan = planned(tmp_path, "controller.shards=3", "rewards.letters.workers=2")
    job = Job(
        plan=plan,
        directory=tmp_path,
        models={},
        rows={},
        launcher=InlineLauncher(),
        placed=place(plan, two_nodes(1)),
    )
    where = job.where()
    assert where.keys() == set(job.names())
    numbered = {
        name: node for name, node in where.items() if name.startswith(("controller.", "scorer."))
    }
    assert numbered == {
        "controller.0": "agent.0",
        "controller.1": "agent.1",
        "controller.2": "agent.0",
        "scorer.0": "agent.0",
        "scorer.1": "agent.1",
    }


def test_a_trainer_on_several_nodes_is_refused_with_their_hosts(tmp_path: Path) -> None:
    plan = planned(tmp_path, "roles.policy.slots=4")
    with pytest.raises(PlacementError, match=r"policy would have ranks on 10.0.0.1 and 10.0.0.2"):
        place(plan, two_nodes(2))


def test_a_node_without_devices_gets_no_worker(tmp_path: Path) -> None:
    """Such as the machine that the supervisor runs on, when none of its devices are used."""
    plan = planned(tmp_path, "controller.shards=2")
    nodes = [NodeFacts(name="agent.0", devices=()), *two_nodes(1)[1:]]
    job = Job(
        plan=plan,
        directory=tmp_path,
        models={},
        rows={},
        launcher=InlineLauncher(),
        placed=place(plan, nodes),
    )
    assert set(job.where().values()) == {"agent.1"}


@pytest.mark.parametrize(("epochs", "ordinal"), [(1.1, 110), (2.0, 200), (0.335, 34)])
def test_epochs_end_at_the_row_that_their_decimals_name(
    epochs: float, ordinal: int, tmp_path: Path
) -> None:
    """In binary 1.1 times 100 is above 110, by which the run would make one more step."""
    plan = planned(tmp_path, f"run.epochs={epochs}")
    placed = place(plan, two_nodes(1))
    job = Job(
        plan=plan,
        directory=tmp_path,
        models={},
        rows={"train": 100},
        launcher=InlineLauncher(),
        placed=placed,
    )
    assert _last_ordinal(job) == ordinal


@pytest.mark.parametrize(
    ("overlaps", "in_use"),
    [
        (False, {"policy": 2, "teacher": 2, "rollout": 1}),  # the teacher is of the trainer's turn
        (True, {"policy": 3, "teacher": 3, "rollout": 3}),
    ],
)
def test_a_workers_part_of_the_cores_is_shared_with_what_works_meanwhile(
    overlaps: bool, in_use: dict[str, int]
) -> None:
    kinds = {"policy": "trainer", "teacher": "annotator", "rollout": "generator"}
    needs = {role: Need(kind=kind) for role, kind in kinds.items()}
    devices = tuple(Device(index=index, kind="cpu", node=f"n{index // 3}") for index in range(6))
    workers = {"policy": [[0], [3]], "teacher": [[1]], "rollout": [[2]]}
    window = Window(devices=devices, slots={}, needs=needs, overlaps=overlaps)
    placed = Placed(workers=workers, window=window)
    assert {role: placed.in_use(role, 0) for role in kinds} == in_use
    assert placed.in_use("policy", 1) == 1  # alone on another machine


@pytest.mark.parametrize(
    ("devices", "in_use", "limit", "threads"),
    [
        ((0,), 1, "", 8),
        ((0,), 3, "", 2),
        ((0, 1), 4, "", 4),
        ((0,), 16, "", 1),
        ((), 0, "", 1),
        ((0,), 1, "2", 2),
        ((0,), 1, "many", 8),
    ],
)
def test_cores_are_shared_out_by_devices(
    devices: tuple[int, ...],
    in_use: int,
    limit: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert share_of_cores(devices, in_use) == threads


ACTING = """
from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_testing.fake_judge import InTurns


@hookimpl
def gcore_environments():
    yield p.EnvironmentProvider(
        summary="two turns", factory="gcore_testing.fake_environment:FakeEnvironment"
    )


@hookimpl
def gcore_placement_policies():
    yield p.PlacementProvider(summary="in turns", factory=f"{__name__}:InTurns")
"""


def acting(tmp_path: Path, *overrides: str) -> Plan:
    """Returns the plan of a job in which the role judge speaks in the policy's episodes."""
    (tmp_path / "acting.py").write_text(ACTING)
    files = [fake.__file__, "acting.py"]
    speaks = {"use": "acting", "roles": {"1": "judge"}}
    roles = {**JOB["roles"], "judge": {"use": "fake"}}  # type: ignore[dict-item]
    job = {**JOB, "local": files, "environment": speaks, "roles": roles}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    return load_plan(tmp_path / "job.yaml", overrides)


def test_a_role_that_speaks_in_episodes_sleeps_in_training_and_not_in_rollouts(
    tmp_path: Path,
) -> None:
    device = Device(index=0, kind="cuda")
    placed = place(acting(tmp_path), [NodeFacts(name="agent.0", devices=(device,))])
    assert {role: need.sleeps for role, need in placed.window.needs.items()} == {
        "policy": True,
        "rollout": True,
        "judge": False,
    }
    assert placed.asleep_in_training == ["rollout", "judge"]


def test_a_placement_in_which_an_episode_would_wait_for_a_role_for_ever_is_refused(
    tmp_path: Path,
) -> None:
    slots = ("roles.rollout.slots=4", "roles.judge.slots=4")
    plan = acting(tmp_path, "placement.use=acting", *slots)
    with pytest.raises(PlacementError, match="speaks in the policy's episodes") as caught:
        place(plan, two_nodes(2))
    assert caught.value.where == "roles.judge.use"
    assert "acting has every device serve one model after the other" in str(caught.value)
    assert "placement/split" in str(caught.value)


def test_controllers_know_the_replicas_of_a_role_that_speaks_in_episodes(tmp_path: Path) -> None:
    """They say which of them are awake to the policy's replicas, which ask them."""
    plan = acting(tmp_path, "roles.judge.slots=2")
    facts = _facts(job_of(plan, place(plan, two_nodes(2))), 0)
    assert facts.judges == {"judge": ["judge.0", "judge.1"]}
