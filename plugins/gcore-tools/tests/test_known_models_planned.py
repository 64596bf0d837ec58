"""Eight well-known models, dense and sparse, are planned on 1 to 64 devices by config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gcore_tools.plan.memory_needs import GIB, MemoryNeeds, Pool, memory_needs

from gcore_core.config.plan import load_plan
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.placement import Device
from gcore_core.run.initial_placement import place
from tests.support.known_models import KNOWN, KnownModel

COUNTS = (1, 2, 4, 8, 16, 32, 64)
DEVICE_GIB = 80
#: Adam in float32: weight, gradient and two moments of each number.
STATE_BYTES = 16

TORCH = {"use": "torch", "config": {"gradient_checkpointing": True, "budget_tokens": 4096}}
#: Of the devices that were tried, the least on which a full step of the trainer torch fits.
LEAST = {
    "Qwen2.5-0.5B": 1,
    "Qwen3-0.6B": 1,
    "Llama-3.2-1B": 1,
    "Qwen3-4B": 1,
    "Llama-3.1-8B": 2,
    "Qwen2.5-32B": 16,
    "Mixtral-8x7B": None,  # FSDP2 shares out eight experts over eight ranks, however many there are
    "Qwen3-235B-A22B": None,
}


def planned(
    folder: Path, model: KnownModel, policy: Mapping[str, Any], devices: int
) -> MemoryNeeds:
    """Plans a job of a trainer alone, on one machine of so many devices."""
    (folder / "config.json").write_text(json.dumps(model.config))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    role = {**policy, "slots": devices, "model": {"path": "."}}
    job = {
        "controller": {"use": "offline/sft"},
        "data": {"use": "core/jsonl", "config": {"path": "rows.jsonl"}},
        "objective": {"use": "offline/sft"},
        "roles": {"policy": role, "rollout": {"use": "offline"}},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    found = tuple(Device(index=index, kind="cuda") for index in range(devices))
    nodes = [NodeFacts(name="agent.0", devices=found, host="large", device_bytes=DEVICE_GIB * GIB)]
    plan = load_plan(folder / "job.yaml")
    return memory_needs(plan, place(plan, nodes), {})


def of_fullest_rank(model: KnownModel, ranks: int) -> float:
    """Returns the numbers of a rank; with more ranks than experts no rank has less than one."""
    config = model.config
    experts = config.get("num_local_experts", 0)
    of_one = 3 * config["hidden_size"] * config["intermediate_size"] * config["num_hidden_layers"]
    others = model.parameters - experts * of_one
    return others / ranks + of_one * experts / min(ranks, experts or 1)


@pytest.mark.parametrize("model", KNOWN, ids=lambda model: model.name)
def test_weights_gradients_and_moments_are_shared_out_and_the_least_devices_are_found(
    model: KnownModel, tmp_path: Path
) -> None:
    least = None
    for devices in COUNTS:
        needs = planned(tmp_path, model, TORCH, devices)
        rows = needs.held[Pool("agent.0", 0)]["training"]
        names = {"weights", "gradients", "optimizer"}
        state = sum(row.nbytes for row in rows if row.need.what in names)
        # 1%: FSDP2 shares out whole rows, and of a vector of 896 numbers 64 ranks have 14 each
        assert state == pytest.approx(STATE_BYTES * of_fullest_rank(model, devices), rel=0.01)
        if least is None and not needs.too_full():
            least = devices
    assert least == LEAST[model.name]


def test_a_model_fits_with_copies_in_bfloat16_of_one_layer_at_a_time(tmp_path: Path) -> None:
    """As with checkpointing in torch, and with matrices that Megatron-Core splits."""
    model = next(model for model in KNOWN if model.name == "Qwen2.5-32B")
    settings = {**TORCH["config"], "dtype": "bfloat16"}  # type: ignore[dict-item]
    checkpointed = {**TORCH, "config": {**settings, "gradient_checkpointing": True}}
    kept = {**TORCH, "config": {**settings, "gradient_checkpointing": False}}
    split = {"tensor_parallel": 8, "dtype": "bfloat16", "gradient_checkpointing": True}
    megatron = {"use": "megatron", "config": {**split, "budget_tokens": 4096}}
    fits = [
        not planned(tmp_path, model, policy, 16).too_full()
        for policy in (checkpointed, kept, megatron)
    ]
    assert fits == [True, False, True]
