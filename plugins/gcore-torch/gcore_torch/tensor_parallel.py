"""Splits a model's layers over the ranks of a tensor group, by transformers' own plan.

A plan (``base_model_tp_plan`` of a model's config) names linear maps. Those that are split by
columns give a rank some heads, or some channels of the feed-forward; the one behind them is split
by rows and its outputs are added up over the group. What follows is whole again on every rank. This
is Megatron-LM's split (Shoeybi et al. 2019, section 3); torch's DTensor computes it, gradients
included.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_torch.sharding_settings import problem_of_model

#: Families whose gradients have been found to be those of one rank.
FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
#: The dimension of heads in the input of a norm of heads, [rows, tokens, heads, numbers]. Each rank
#: has its own heads there.
_HEADS = 2


def split_layers(model: Any, mesh: Any, role: str) -> None:
    """Makes DTensors of the weights of a model's layers, and lets the layers compute with them.

    mesh: of the tensor group, with one dimension.

    Raises ConfigError for a model that nobody has tried so.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    config = model.config
    words = getattr(config, "base_model_tp_plan", None) or {}
    # the embeddings are shared out by FSDP2, over the tensor group too
    plan = {name: word for name, word in words.items() if name.startswith("layers.")}
    unknown = sorted(set(plan.values()) - _styles().keys())
    if config.model_type not in FAMILIES or not plan or unknown:
        raise ConfigError(
            f"a model of the family {config.model_type} cannot be split over a tensor group.",
            where=f"roles.{role}.config.sharding.tensor",
            why=f"Its plan has the words {', '.join(unknown)}."
            if unknown
            else f"Tested are {', '.join(sorted(FAMILIES))}.",
            todo="Set it to 1.",
        )
    problem = problem_of_model(config, mesh.size())
    if problem:
        raise ConfigError(f"{problem}.", where=f"roles.{role}.config.sharding.tensor")
    # it says that a matrix is put together in two steps, which is how it has been cut
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    base = model.base_model
    named = {name: re.sub(r"\.\d+\.", ".*.", name) for name, _ in base.named_modules()}
    styles = {name: _styles()[plan[word]] for name, word in named.items() if word in plan}
    parallelize_module(base, mesh, styles, src_data_rank=None)


def _styles() -> dict[str, Any]:
    """Returns torch's style of each known word of a plan."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    return {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        # each rank has the gradient of its own heads, and DTensor adds them up
        "replicated_with_grad_allreduce": SequenceParallel(
            sequence_dim=_HEADS, use_local_output=True
        ),
    }
