"""What may be set under ``config:`` of a role that uses this plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gcore_language.settings import TrainerSettings, require


@dataclass(frozen=True, kw_only=True)
class DeepSpeedTrainerConfig(TrainerSettings):
    """Settings of ``roles.<trainer>.config``. Other settings of DeepSpeed go under ``engine:``."""

    stage: int = 2
    """What the ranks share out: 1 the optimizer's moments and float32 weights, 2 gradients too, 3
    the weights too.
    """
    offload_optimizer: bool = False
    """Keep moments and float32 weights in host memory, and make AdamW's step there."""
    offload_params: bool = False
    """Keep the weights' shares in host memory; with stage 3."""
    bucket_elements: int = 2**25
    """Numbers reduced, gathered or exported in one piece; a larger tensor is a piece of its own."""
    checkpoint: Literal["whole", "universal"] = "whole"
    """How state is saved: whole tensors in safetensors, which every trainer can load; or
    DeepSpeed's universal format, which holds pickles and so is for storage that nobody else can
    write to. Both are loaded, whichever is set.
    """
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention of transformers; auto is its own choice for the model; flash_attention_2 goes with
    packing: padded.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.stage in (1, 2, 3), "stage", f"must be 1, 2 or 3, is {self.stage}")
        require(
            self.stage == 3 or not self.offload_params,
            "offload_params",
            f"only stage 3 shares the weights out, and stage is {self.stage}",
        )
        require(
            self.bucket_elements > 0,
            "bucket_elements",
            f"must be positive, is {self.bucket_elements}",
        )
        require(
            self.attn_implementation != "flash_attention_2" or self.packing == "padded",
            "attn_implementation",
            "flash_attention_2 takes no mask, so it needs packing: padded",
        )
