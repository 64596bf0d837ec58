"""Knows the ``config.json`` of some models of the hub, so that jobs can be planned and shrunk where
the hub is not reached.

The sizes are those of the files on the hub, as their authors published them; a model's own file,
where it lies in the hub's cache, comes first. Only what ``architecture`` and ``twins`` read is
kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _qwen2(hidden: int, layers: int, heads: int, keys: int, channels: int, **more: Any) -> Any:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": channels,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        **more,
    }


def _qwen3(hidden: int, layers: int, heads: int, channels: int, *, tied: bool) -> Any:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": channels,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
    }


_QWEN2_05B = _qwen2(896, 24, 14, 2, 4864)
_QWEN2_15B = _qwen2(1536, 28, 12, 2, 8960)
_OWN = {"vocab_size": 152064, "tie_word_embeddings": False}
_QWEN2_7B = _qwen2(3584, 28, 28, 4, 18944, **_OWN)
_QWEN2_32B = _qwen2(5120, 64, 40, 8, 27648, **_OWN)
_QWEN2_VL_2B = {
    "model_type": "qwen2_vl",
    "text_config": {**_QWEN2_15B, "model_type": "qwen2_vl_text"},
    "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "patch_size": 14},
}

#: Name on the hub -> what its config.json says.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2-VL-2B-Instruct": _QWEN2_VL_2B,
    "Qwen/Qwen2.5-0.5B": _QWEN2_05B,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN2_05B,
    "Qwen/Qwen2.5-1.5B": {**_QWEN2_15B, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2_15B,
    "Qwen/Qwen2.5-32B": {**_QWEN2_32B, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-32B-Instruct": _QWEN2_32B,
    "Qwen/Qwen2.5-7B": {**_QWEN2_7B, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_7B,
    "Qwen/Qwen2.5-Math-1.5B": {**_QWEN2_15B, "max_position_embeddings": 4096},
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288, tied=False),
}
