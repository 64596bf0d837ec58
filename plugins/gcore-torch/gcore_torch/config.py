"""What may be set under ``config:`` of a role that uses this plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gcore_language.settings import GeneratorSettings, TrainerSettings, require


@dataclass(frozen=True, kw_only=True)
class TorchTrainerConfig(TrainerSettings):
    """Settings of ``roles.<trainer>.config``."""

    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention of transformers; auto is its own choice for the model; flash_attention_2 goes with packing: padded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.attn_implementation != "flash_attention_2" or self.packing == "padded",
            "attn_implementation",
            "flash_attention_2 takes no mask, so it needs packing: padded",
        )


@dataclass(frozen=True, kw_only=True)
class TorchGeneratorConfig(GeneratorSettings):
    """Settings of ``roles.<generator>.config``."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is one."""
    decoder: Literal["auto", "fused", "transformers"] = "auto"
    """fused is this plugin's decoder (Llama, Mistral, Qwen2, Qwen3); auto takes it where its logits are the model's."""
