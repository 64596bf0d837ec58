"""What may be set under ``config:`` of a role that uses this plugin."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from gcore_language.context.settings import ContextSettings
from gcore_language.lora_settings import LoraTrainerSettings
from gcore_language.settings import require

from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class DeepSpeedTrainerConfig(LoraTrainerSettings):
    """Settings of ``roles.<trainer>.config``. Other settings of DeepSpeed go under ``engine:``."""

    stage: int = 2
    """What the ranks share out among them: 1 the optimizer's moments and float32 weights; 2 also
    the gradients; 3 also the weights.
    """
    offload_optimizer: bool = False
    """Whether moments and float32 weights lie in host memory, where AdamW then makes its step."""
    offload_params: bool = False
    """Whether the weights' shares lie in host memory; for stage 3 only."""
    bucket_elements: int = 2**25
    """Most numbers that are reduced, gathered or exported in one piece, at least 1; a larger tensor
    is a piece of its own.
    """
    checkpoint: Literal["whole", "universal"] = "whole"
    """Format in which state is saved; both are loaded, whichever is set. whole: whole tensors in
    safetensors, which every trainer can load. universal: DeepSpeed's own, which holds pickles and
    so is for storage that nobody else can write to.
    """
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Implementation of attention in transformers: auto is its own choice for the model;
    flash_attention_2 needs ``packing: padded``.
    """

    context: ContextSettings = field(default_factory=ContextSettings)
    """Slots that share each micro-batch, for long contexts; ``context: {ulysses: 2, ring: 4}`` has
    eight of them share it. ``budget_tokens`` is then the tokens of one slot.
    """

    def traits(self) -> Traits:
        return replace(super().traits(), replica_slots=self.context.degree)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context.degree > 1:
            _check_shared(self)
        require(self.stage in (1, 2, 3), "stage", f"must be 1, 2 or 3, is {self.stage}")
        require(
            self.stage == 3 or not self.offload_params,
            "offload_params",
            f"only stage 3 shares the weights out, and stage is {self.stage}",
        )
        require(
            not self.lora.on or self.checkpoint == "whole",
            "checkpoint",
            "must be whole with lora: DeepSpeed's own format has the frozen base in it",
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


def _check_shared(config: DeepSpeedTrainerConfig) -> None:
    """Raises ConfigError for what has not been tested with slots that share a micro-batch."""
    for name, has in (
        ("packing", config.packing),
        ("attn_implementation", config.attn_implementation),
    ):
        require(
            has == "auto",
            name,
            f"must be auto with context, whose rows and attention are its own, is {has}",
        )
    require(
        not config.lora.on,
        "lora",
        "does not go with context: adapters of slots that share records are not tested here; leave "
        "one out, or take the trainer torch, which has both",
    )
