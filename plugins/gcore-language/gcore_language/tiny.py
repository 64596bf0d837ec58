"""Makes tiny random models with a tokenizer of single characters, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CHARACTERS = "0123456789+=,-*?yn:"
SPECIAL = ("<pad>", "<bos>", "<eos>")
_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}:"
_IMAGE_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% "
    "else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' "
    "%}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}:"
)
VOCABULARY = len(CHARACTERS) + len(SPECIAL)

#: head_dim is 32, the smallest that vLLM has kernels for on CPUs; vocabulary, heads and layers
#: split in two
_SIZES = {"vocab_size": VOCABULARY, "intermediate_size": 96, "num_hidden_layers": 2}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128}
_GROUPED = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(
        **_SIZES, **_IDS, hidden_size=64, num_attention_heads=2, num_key_value_heads=2
    ),
    "llama-head16": lambda: LlamaConfig(
        **_SIZES, **_IDS, hidden_size=64, num_attention_heads=4, num_key_value_heads=4
    ),
    "qwen2": lambda: Qwen2Config(**_SIZES, **_IDS, **_GROUPED),
    "qwen3": lambda: Qwen3Config(**_SIZES, **_IDS, **_GROUPED, head_dim=32),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
#: Mixtures of experts: 8 experts, of which 2 compute each token.
EXPERT_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SIZES,
        **_IDS,
        **_GROUPED,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[],
    ),
    "mixtral": lambda: MixtralConfig(
        **_SIZES,
        **_IDS,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
}


def save_tokenizer(directory: Path, extra: int = 0, special: Sequence[str] = ()) -> None:
    """Writes a tokenizer that has one token for each character.

    extra: how many unused tokens are added at the end.
    special: special tokens that are added at the end.
    """
    words = [*SPECIAL, *CHARACTERS, *(f"<extra{i}>" for i in range(extra)), *special]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    # unk_token, or transformers adds its own for Qwen
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<pad>",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.chat_template = _IMAGE_TEMPLATE if special else _TEMPLATE
    fast.save_pretrained(directory)


def save_image_model(
    directory: Path, family: str = "qwen2_vl", seed: int = 0, patch: int = 4
) -> None:
    """Writes a random image-text model, of family qwen2_vl or qwen2_5_vl; see ``save_model``.

    patch: side of a patch in pixels; four patches are a token.
    """
    names = ("vision_start", "image", "vision_end", "video")
    ids = {f"{name}_token_id": VOCABULARY + i for i, name in enumerate(names)}
    text: dict[str, Any] = {
        **_SIZES,
        **_IDS,
        "vocab_size": VOCABULARY + len(ids),
        "hidden_size": 64,
        "num_attention_heads": 2,
    }
    text |= {"num_key_value_heads": 2}
    text |= {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        }
    }
    # in_chans: as published models have it, and SGLang reads it
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": patch, "in_chans": 3}
    by_family: dict[str, dict[str, Any]] = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        "qwen2_5_vl": {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "window_size": 4 * patch,
            "fullatt_block_indexes": [1],
        },
    }
    vision |= by_family[family]
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )
    _save_random(AutoModelForImageTextToText, config, directory, seed, 3.0)
    size = {"shortest_edge": 4 * patch**2, "longest_edge": 256 * patch**2}
    processor: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessor", "size": size}
    processor |= {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    save_tokenizer(
        directory, special=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    )


def save_untrained(directory: Path, words: int = 2048) -> None:
    """Writes an untrained Llama of 4 layers and a few million weights, for measuring speed.

    Its large vocabulary makes the end token rare.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    ids = {**_IDS, "max_position_embeddings": 256}
    LlamaForCausalLM(LlamaConfig(vocab_size=words, **sizes, **heads, **ids)).save_pretrained(
        directory
    )
    save_tokenizer(directory, extra=words - VOCABULARY)


def save_model(
    directory: Path,
    family: str,
    seed: int = 0,
    scale: float = 3.0,
    extra: int = 0,
    untold: int = 0,
) -> None:
    """Writes a random model of a family.

    Its weights are larger than usual, so that log-probs differ by more than rounding.

    extra: how many tokens are added to the vocabulary; see ``save_tokenizer``.
    untold: how many ids the model has that the tokenizer does not know.
    """
    config = (CONFIGS | EXPERT_CONFIGS)[family]()
    config.vocab_size += extra + untold
    _save_random(AutoModelForCausalLM, config, directory, seed, scale)
    save_tokenizer(directory, extra)


def _save_random(kind: Any, config: Any, directory: Path, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
