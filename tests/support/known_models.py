"""Sizes of eight well-known models, as their ``config.json`` has them: no weights are needed.

The numbers of parameters are those that the models' files hold on the hub, a tied embedding once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """Holds the published facts of a model.

    parameters: how many numbers its weights are.
    config: the sizes in its ``config.json``.
    """

    name: str
    parameters: int
    config: Mapping[str, Any]


KNOWN = (
    KnownModel(
        name="Qwen2.5-0.5B",
        parameters=494_032_768,
        config={
            "model_type": "qwen2",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
    ),
    KnownModel(
        name="Qwen3-0.6B",
        parameters=596_049_920,
        config={
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 40960,
        },
    ),
    KnownModel(
        name="Llama-3.2-1B",
        parameters=1_235_814_400,
        config={
            "model_type": "llama",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
    ),
    KnownModel(
        name="Qwen3-4B",
        parameters=4_022_468_096,
        config={
            "model_type": "qwen3",
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 40960,
        },
    ),
    KnownModel(
        name="Llama-3.1-8B",
        parameters=8_030_261_248,
        config={
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
        },
    ),
    KnownModel(
        name="Qwen2.5-32B",
        parameters=32_763_876_352,
        config={
            "model_type": "qwen2",
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "intermediate_size": 27648,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
            "max_position_embeddings": 32768,
        },
    ),
    KnownModel(
        name="Mixtral-8x7B",
        parameters=46_702_792_704,
        config={
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
        },
    ),
    KnownModel(
        name="Qwen3-235B-A22B",
        parameters=235_093_634_560,
        config={
            "model_type": "qwen3_moe",
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": 40960,
        },
    ),
)
