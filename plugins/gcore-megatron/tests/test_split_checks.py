"""How a mixture of experts cannot be divided, refused before anything starts; no Megatron-Core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_megatron import gcore_check
from gcore_megatron.config import MegatronTrainerConfig

from gcore_core.contract.errors import ConfigError

SHARED = {"tensor_parallel": 2, "sequence_parallel": True}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}
QWEN = {
    **SIZES,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [0, 1],
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_parallel": 0}, "expert_parallel: must be at least 1, is 0"),
        (
            {"expert_parallel": 2, "context_parallel": 2},
            "context_parallel: does not go with experts: slots that share a sequence have not",
        ),
        (
            {"expert_parallel": 2, "tensor_parallel": 2},
            "sequence_parallel: must be true where tensor_parallel slots route tokens to experts",
        ),
        (
            {"expert_parallel": 4, "pipeline_parallel": 2, **SHARED},
            "expert_parallel: must be tensor_parallel, 2, where there are stages too, is 4",
        ),
        (
            {"expert_parallel": 2, "pipeline_parallel": 2},
            "expert_parallel: must be tensor_parallel, 1, where there are stages too, is 2",
        ),
        (
            {"expert_parallel": 3, **SHARED},
            "expert_parallel: must be a divisor or a multiple of tensor_parallel, 2, is 3",
        ),
        ({"router_aux_loss": -1.0}, "router_aux_loss: must not be negative, is -1.0"),
    ],
)
def test_settings_that_experts_cannot_have_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        MegatronTrainerConfig(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_parallel": 4},
        {"expert_parallel": 2, "pipeline_parallel": 2, **SHARED},
        {"expert_parallel": 8, **SHARED},
    ],
)
def test_sizes_that_go_together_are_taken(settings: dict[str, Any]) -> None:
    assert MegatronTrainerConfig(**settings).expert_parallel == settings["expert_parallel"]


def test_a_run_needs_recorded_experts_only_where_they_are_always_replayed() -> None:
    assert MegatronTrainerConfig(router_replay="always").traits().needs_routing
    assert not MegatronTrainerConfig().traits().needs_routing


def checked(
    config: dict[str, Any], slots: int, directory: Path | None = None, model: Any = None
) -> list[str]:
    """What ``g-core check`` says of a job whose policy has these settings."""
    role: dict[str, Any] = {"use": "megatron", "config": config, "slots": slots}
    if directory is not None:
        (directory / "config.json").write_text(json.dumps(model))
        role["model"] = {"path": str(directory)}
    return list(gcore_check({"roles": {"policy": role}}))


def test_experts_that_the_slots_of_a_stage_cannot_share_are_refused() -> None:
    config = {"expert_parallel": 4}
    assert checked(config, 6) == [
        "roles.policy.config.expert_parallel: must divide the 6 slots of a stage, is 4."
    ]
    assert checked(config, 8) == []


@pytest.mark.parametrize(
    ("config", "slots", "message"),
    [
        ({"expert_parallel": 3}, 3, "expert_parallel: must divide the model's 8 experts, is 3."),
        (
            {"pipeline_parallel": 2},
            2,
            "pipeline_parallel: must leave a layer with experts to each stage, which has 2 layers: "
            "Megatron-Core adds up the norm of experts' gradients over all stages.",
        ),
        (
            {"context_parallel": 2},
            2,
            "context_parallel: does not go with experts: slots that share a sequence have not been "
            "tested with them.",
        ),
    ],
)
def test_settings_that_a_mixture_cannot_have_are_refused(
    config: dict[str, Any], slots: int, message: str, tmp_path: Path
) -> None:
    assert checked(config, slots, tmp_path, QWEN) == [f"roles.policy.config.{message}"]


def test_a_mixture_that_slots_can_share_is_taken(tmp_path: Path) -> None:
    assert checked({"expert_parallel": 8, "router_replay": "always"}, 8, tmp_path, QWEN) == []
    every_layer = {**QWEN, "mlp_only_layers": []}
    assert checked({"pipeline_parallel": 2}, 2, tmp_path, every_layer) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"expert_parallel": 2}, "expert_parallel: is 2"),
        ({"router_replay": "always"}, "router_replay: is always"),
        ({"router_aux_loss": 0.5}, "router_aux_loss: is 0.5"),
    ],
)
def test_settings_of_experts_are_refused_for_a_dense_model(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    dense = {**SIZES, "model_type": "llama"}
    why = "and the model has no experts; leave it out."
    assert checked(config, 2, tmp_path, dense) == [f"roles.policy.config.{message}, {why}"]
    assert checked({"router_replay": "never"}, 2, tmp_path, dense) == []
