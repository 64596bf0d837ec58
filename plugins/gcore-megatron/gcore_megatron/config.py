"""What may be set under ``config:`` of a role that uses this plugin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from gcore_language.lora_settings import LoraSettings
from gcore_language.settings import TrainerSettings, require

from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class MegatronTrainerConfig(TrainerSettings):
    """Settings of ``roles.<trainer>.config``: those of every trainer, and how a model is split."""

    tensor_parallel: int = 1
    """Number of slots that share each matrix and the vocabulary; at least 1. It must divide the
    model's query heads, key-value heads and feed-forward channels.
    """
    pipeline_parallel: int = 1
    """Number of slots that share the layers, one stage after the other (schedule 1F1B); at least 1.
    It must divide the number of layers.
    """
    context_parallel: int = 1
    """Number of slots that share each sequence and gather its keys and values; at least 1. Above 1
    records are packed padded.
    """
    expert_parallel: int = 1
    """Number of slots over which the experts of each layer of a mixture of experts are spread; at
    least 1. It must divide the model's experts and the slots of a stage, and be a divisor or a
    multiple of ``tensor_parallel``; where there are several stages, that number itself.
    """
    sequence_parallel: bool = False
    """Whether the tensor-parallel slots also share what lies between the matrices, which saves
    memory; needs ``tensor_parallel`` above 1.
    """
    distributed_optimizer: bool = True
    """Whether the data-parallel replicas share out AdamW's state, in place of each holding all of
    it.
    """
    overlap_grad_reduce: bool = False
    """Whether gradients are summed over the replicas while the backward pass still runs."""
    router_replay: Literal["auto", "always", "never"] = "auto"
    """Whether a mixture of experts takes the experts by which a record was sampled, in place of
    those that its own routers choose: auto where records have them; always refuses a generator that
    does not give them; never leaves the choice to the routers.
    """
    router_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts, at least 0; 0 adds none. The
    loss is 1 where all experts of a layer get equally many tokens.
    """
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters, which this trainer does not have: they must be off, as in the job of a run that
    another trainer began without them.
    """
    checkpoint: Literal["distributed", "whole"] = "distributed"
    """Format in which state is saved; both are loaded, whichever is set. distributed:
    Megatron-Core's own, written by all ranks while training goes on, and loaded only with the same
    ``distributed_optimizer``. whole: whole tensors in safetensors, which every trainer can load,
    written by rank 0 while training waits.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.lora.on,
            "lora",
            "Megatron-Core splits and joins the matrices that adapters of peft's layout go on "
            "(queries, keys and values are one), so they cannot be trained here; use the trainer "
            "torch or deepspeed",
        )
        for name in (
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
            "expert_parallel",
        ):
            size = getattr(self, name)
            require(size >= 1, name, f"must be at least 1, is {size}")
        require(
            not self.sequence_parallel or self.tensor_parallel > 1,
            "sequence_parallel",
            (
                "shares work over tensor-parallel slots, but tensor_parallel is "
                f"{self.tensor_parallel}"
            ),
        )
        require(
            self.packing != "shared_prompt" or self.context_parallel == 1,
            "packing",
            (
                "shared_prompt does not go with context_parallel, which is "
                f"{self.context_parallel}; "
                "use padded"
            ),
        )

        require(
            0 <= self.router_aux_loss < math.inf,
            "router_aux_loss",
            f"must not be negative, is {self.router_aux_loss}",
        )
        if self.expert_parallel > 1:
            for setting, why in problems_of_experts(self):
                require(False, setting, why)

    def traits(self) -> Traits:
        return replace(
            super().traits(),
            needs_routing=self.router_replay == "always",
            replica_slots=self.tensor_parallel * self.pipeline_parallel * self.context_parallel,
        )


def problems_of_experts(config: MegatronTrainerConfig) -> Iterator[tuple[str, str]]:
    """Yields (setting, why) where a mixture of experts cannot be split as the settings say.

    An expert is whole on its slot, so experts are spread over the slots of a stage that otherwise
    split matrices or hold replicas. With stages they are spread over the first alone: where
    replicas vary slowest, Megatron-Core wants as many replicas of experts as of the rest.
    """
    tensor = config.tensor_parallel
    experts = config.expert_parallel
    if config.context_parallel > 1:
        yield (
            "context_parallel",
            "does not go with experts: slots that share a sequence have not been tested with them",
        )
    if tensor > 1 and not config.sequence_parallel:
        yield (
            "sequence_parallel",
            "must be true where tensor_parallel slots route tokens to experts: each of them routes "
            "its own part of a row",
        )
    if config.pipeline_parallel > 1 and experts != tensor:
        yield (
            "expert_parallel",
            f"must be tensor_parallel, {tensor}, where there are stages too, is {experts}",
        )
    if tensor % experts and experts % tensor:
        yield (
            "expert_parallel",
            f"must be a divisor or a multiple of tensor_parallel, {tensor}, is {experts}",
        )
