"""Says how slots cannot be divided among the parts of a mixture of experts. It imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from gcore_core.contract.errors import ConfigError
from gcore_megatron.config import MegatronTrainerConfig, problems_of_experts

#: Settings of a mixture of experts -> what they are for a model without experts.
_WITHOUT = {"expert_parallel": (1,), "router_replay": ("auto", "never"), "router_aux_loss": (0.0,)}


def problems_of_slots(config: MegatronTrainerConfig, slots: int) -> Iterator[tuple[str, str]]:
    """Yields (setting, why) where experts cannot be spread over so many slots."""
    of_stage, rest = divmod(slots, config.pipeline_parallel)
    if not rest and of_stage % config.expert_parallel:
        yield (
            "expert_parallel",
            f"must divide the {of_stage} slots of a stage, is {config.expert_parallel}",
        )


def problems_of_model(
    config: MegatronTrainerConfig, experts: int, sparse: tuple[int, ...], layers: int
) -> Iterator[tuple[str, str]]:
    """Yields (setting, why) where the settings do not go with a model's experts, or their lack.

    experts: of a layer; 0 for a model without experts.
    sparse: numbers of the layers that have experts.
    layers: of the model.
    """
    if not experts:
        for setting, values in _WITHOUT.items():
            value = getattr(config, setting)
            if value not in values:
                yield setting, f"is {value}, and the model has no experts; leave it out"
        return
    yield from problems_of_experts(config)
    if experts % config.expert_parallel:
        yield (
            "expert_parallel",
            f"must divide the model's {experts} experts, is {config.expert_parallel}",
        )
    stages = config.pipeline_parallel
    of_stage, rest = divmod(layers, stages)
    if not rest and len({layer // of_stage for layer in sparse}) < stages:
        yield (
            "pipeline_parallel",
            f"must leave a layer with experts to each stage, which has {of_stage} layers: "
            "Megatron-Core adds up the norm of experts' gradients over all stages",
        )


def sparse_layers(config: Any) -> tuple[int, ...]:
    """Returns the numbers of the layers that have experts, of a Hugging Face config of a mixture.

    They are those of Qwen3-MoE's settings; a family without them has experts in each layer.
    """
    dense = getattr(config, "mlp_only_layers", None) or ()
    every = getattr(config, "decoder_sparse_step", None) or 1
    return tuple(
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in dense and (layer + 1) % every == 0
    )


def problems(plan: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yields what ``g-core check`` can know of how a trainer's slots share experts.

    plan: the resolved configuration.
    name: of the trainer's role.
    """
    from gcore_language.architecture import UnknownSizes, architecture_of

    role = plan["roles"][name]
    try:
        config = msgspec.convert(role.get("config") or {}, MegatronTrainerConfig)
    except (ConfigError, msgspec.ValidationError):
        return  # its own check says so
    found = list(problems_of_slots(config, int(role.get("slots", 1))))
    path = (role.get("model") or {}).get("path")
    try:
        read = json.loads((Path(path or "") / "config.json").read_text(encoding="utf-8"))
        experts = architecture_of(read).experts
        sparse = sparse_layers(SimpleNamespace(**read)) if experts else ()
        found += problems_of_model(config, experts, sparse, read["num_hidden_layers"])
    except (OSError, ValueError, TypeError, AttributeError, UnknownSizes):
        pass  # whoever opens the model says so
    for setting, why in dict(found).items():
        yield f"roles.{name}.config.{setting}: {why}."
