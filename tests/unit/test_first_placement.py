"""Which generators sleep while the trainer works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gcore_core.config.plan import load_plan
from gcore_core.contract.placement import Device, Need, Window
from gcore_core.run import initial_placement
from gcore_core.testing import fake

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
    ("wanted", "kind", "devices", "resting"),
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
    resting: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = tuple(Device(index=index, kind=kind) for index in range(devices))
    monkeypatch.setattr(initial_placement, "find_devices", lambda wanted: found)
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    plan = load_plan(tmp_path / "job.yaml", [f"placement.sleep_in_training={wanted}"])
    assert initial_placement.place(plan).resting == resting


@pytest.mark.parametrize(
    ("moves", "judge_sleeps", "note"),
    [
        (True, False, "judge cannot sleep, so generators never take turns on a device"),
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
    assert initial_placement.Placed(window=window, moves=moves).note == note
