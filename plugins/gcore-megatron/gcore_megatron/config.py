"""What may be set under ``config:`` of a role that uses this plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gcore_language.settings import TrainerSettings, require


@dataclass(frozen=True, kw_only=True)
class MegatronTrainerConfig(TrainerSettings):
    """Settings of ``roles.<trainer>.config``: those of every trainer, and how a model is split."""

    tensor_parallel: int = 1
    """Slots that share each matrix and the vocabulary; must divide the query and key-value
    heads.
    """
    pipeline_parallel: int = 1
    """Slots that share the layers, one stage after the other (schedule 1F1B); must divide their
    number.
    """
    context_parallel: int = 1
    """Slots that share each sequence; keys and values are gathered. Goes with padded packing
    only.
    """
    sequence_parallel: bool = False
    """Share what lies between the matrices over the tensor-parallel slots too; saves memory."""
    distributed_optimizer: bool = True
    """Share AdamW's state over the data-parallel replicas."""
    overlap_grad_reduce: bool = False
    """Sum gradients over the replicas while the backward pass still runs."""
    checkpoint: Literal["distributed", "whole"] = "distributed"
    """How state is saved: Megatron-Core's distributed checkpoint, by all ranks while training goes
    on, loaded with the same ``distributed_optimizer``; or whole tensors in safetensors, which every
    trainer can load, by rank 0 while training waits. Both are loaded, whichever is set.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
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

    def replica_slots(self) -> int:
        """Slots that one replica takes together."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel
