"""Weights that sleeping generators keep must fit the memory of the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import PlacementError
from gcore_core.run.host_memory import host_memory
from gcore_core.run.initial_placement import find_nodes, place

RECIPE = Path(__file__).parents[2] / "recipes/judge.yaml"
DEVICES = ["cluster.devices=2", "roles.rollout.slots=2", "roles.judge.slots=2"]


@pytest.fixture
def models(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Of the policy 3 GiB, of the judge 1 GiB; files without content."""
    for name, gib in {"policy": 3, "judge": 1}.items():
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(gib << 30)
    path = {"policy": "policy", "rollout": "policy", "judge": "judge"}
    return {role: {"path": str(tmp_path / name)} for role, name in path.items()}


def test_memory_kept_on_the_host_is_reported(models: dict[str, dict[str, str]]) -> None:
    plan = load_plan(RECIPE, DEVICES)
    placed = place(plan, find_nodes(plan))
    gib = sum(
        {"rollout": 3, "judge": 1}.get(role, 0) * len(workers)
        for role, workers in placed.workers.items()
    )
    told = host_memory(plan, placed, models, host_bytes=64 << 30)
    assert told == f"generators that sleep keep {gib}.00 of 64.00 GiB of the memory of this machine"


def test_weights_that_do_not_fit_are_refused_with_the_memory_of_each_role(
    models: dict[str, dict[str, str]],
) -> None:
    plan = load_plan(RECIPE, DEVICES)
    with pytest.raises(
        PlacementError,
        match=r"would keep \d.00 GiB of weights in the memory of this machine, which has 2.00 GiB",
    ) as caught:
        host_memory(plan, place(plan, find_nodes(plan)), models, host_bytes=2 << 30)
    assert "rollout: " in str(caught.value) and "judge: " in str(caught.value)
    assert "config.sleep: discard" in str(caught.value)


def test_generators_that_discard_weights_keep_none_on_the_host(
    models: dict[str, dict[str, str]],
) -> None:
    discard = [f"roles.{role}.config.sleep=discard" for role in ("rollout", "judge")]
    plan = load_plan(RECIPE, [*DEVICES, *discard])
    assert host_memory(plan, place(plan, find_nodes(plan)), models, host_bytes=1) == ""


def test_a_model_that_is_no_directory_here_is_told_and_not_counted_as_nothing(
    models: dict[str, dict[str, str]],
) -> None:
    plan = load_plan(RECIPE, DEVICES)
    placed = place(plan, find_nodes(plan))
    hub = {**models, "judge": {"path": "some/judge"}}
    told = host_memory(plan, placed, hub, host_bytes=64 << 30)
    assert "GiB of the memory of this machine; of judge it is not known" in told
    none = {**hub, "rollout": {"path": "some/policy"}}
    told = host_memory(plan, placed, none, host_bytes=64 << 30)
    assert told.startswith(
        "generators that sleep keep weights in host memory; of rollout, judge it is not known"
    )
