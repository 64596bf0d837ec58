"""Spreads the experts of each layer over the ranks of a group, which send each other tokens.

A rank holds whole experts, neighbouring ones. Before a layer's experts are computed, a rank sends
each token to the ranks that hold its experts (all-to-all, with as many tokens as there are for
each), and the results come back the same way; that is GShard's arrangement (Lepikhin et al. 2020,
arXiv:2006.16668, section 3.1) without a capacity, so that no token is dropped. transformers sends
and computes (its style ``ep_dispatch_experts``); FSDP2 shares out a rank's experts over the groups.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gcore_core.contract.errors import ConfigError
from gcore_torch.sharding_settings import problem_of_experts


def experts_of(model: Any) -> list[nn.Module]:
    """Returns the modules that hold the experts of a layer, from the first layer to the last."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]


def spread_experts(model: Any, mesh: Any, role: str) -> None:
    """Makes DTensors of the experts' weights, cut by experts, and lets the layers send tokens.

    mesh: of the group that the experts are spread over, with one dimension.

    Raises ConfigError for a model that nobody has tried so, and where transformers cannot do it.
    """
    where = f"roles.{role}.config.sharding.experts"
    problem = problem_of_experts(model.config, mesh.size())
    if problem:
        raise ConfigError(f"{problem}.", where=where)
    try:
        from transformers.distributed.tensor_parallel import (
            EpDispatchExpertsParallel,
            MoEParamShard,
            Shard,
        )
    except ImportError as error:
        raise ConfigError(
            "experts cannot be spread with this transformers.",
            where=where,
            why=f"It lacks what sends tokens to their experts: {error}.",
            todo="Install transformers 5.19 or newer, or set it to 1.",
        ) from error
    shards = MoEParamShard(Shard(0), shards_expert_dim=True)
    for experts in experts_of(model):
        for name in [name for name, _ in experts.named_parameters(recurse=False)]:
            shards.shard_param(experts, name, mesh)
        EpDispatchExpertsParallel().install_forward(experts, mesh)
