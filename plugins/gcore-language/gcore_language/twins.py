"""Makes tiny random twins of language models, for jobs that are to be tried where there is no room.

A twin has the model type of the original, its proportions where they matter (grouped heads,
experts, tied embeddings), a tokenizer of the same kind, and a chat template. It has learned
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_language.architecture import UnknownSizes, read_config

#: Most tokens of a prompt and an answer of a twin.
LONGEST = 2048
#: Most tokens that a twin writes.
_ACTIONS = 16
#: Settings of trainers and generators that say how a model is split: a twin is whole.
_SPLITS: dict[str, Any] = {
    "context": {"ulysses": 1, "ring": 1},
    "sharding": {"replicas": 1, "tensor": 1, "experts": 1},
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "sequence_parallel": False,
}
#: Sizes by their names in a ``config.json``. A head has 32 numbers, the fewest that engines have
#: kernels for.
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "max_window_layers": 2,
    "max_position_embeddings": 2 * LONGEST,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
#: What a ``config.json`` says of the original's tokens, layers, files and classes.
_NOT_A_TWINS = (
    "architectures",
    "auto_map",
    "bos_token_id",
    "decoder_sparse_step",
    "dtype",
    "eos_token_id",
    "id2label",
    "label2id",
    "layer_types",
    "mlp_only_layers",
    "model_type",
    "num_labels",
    "pad_token_id",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_sliding_window",
)
#: Model types whose tokenizers split by spaces that they write as a sign, and fall back on bytes
#: (SentencePiece); those of all others are byte-level.
_SPACED = ("llama", "mistral", "mixtral", "gemma")
_VOCABULARY = 320
_END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", _END)
_IMAGE_SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: What the tokenizer learns its pairs from.
_TEXTS = (
    "Let's think step by step. The answer is 42.",
    "How many apples does Tom have? Tom has 3 apples and buys 4 more, so 3+4=7.",
    "system user assistant Score: 7 question answer",
)


def twin_of_role(node: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Makes a twin of a role's model; returns what replaces the role's settings.

    node: the role as the job writes it: ``model``, ``config``.
    directory: where models go; twins of the same model are one directory.

    Raises ConfigError where the model's type is not known here.
    """
    changes: dict[str, Any] = {}
    model = node.get("model") or {}
    if model.get("path"):
        changes["model"] = {
            "path": str(twin_of_model(model, directory, like=node.get("like"))),
            "revision": None,
        }
    config = node.get("config") or {}
    smaller: dict[str, Any] = {name: one for name, one in _SPLITS.items() if name in config}
    for name, most in {"max_new_tokens": _ACTIONS, "context_length": LONGEST}.items():
        if name in config:
            given = config[name]  # None: as many as the model allows
            smaller[name] = most if given is None else min(most, int(given))
    if "budget_tokens" in config:
        smaller["budget_tokens"] = 2 * LONGEST
    if config.get("reference_path"):
        reference = {"path": config["reference_path"]}
        like = node.get("like")
        smaller["reference_path"] = str(twin_of_model(reference, directory, like=like))
    if smaller:
        changes["config"] = smaller
    return changes


def twin_of_generator(node: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Does what ``twin_of_role`` does, and holds answers short whatever the job says."""
    changes = twin_of_role(node, directory)
    config = changes.setdefault("config", {})
    config.setdefault("max_new_tokens", _ACTIONS)
    config.setdefault("context_length", LONGEST)
    return changes


def twin_of_reward(node: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Makes a twin of a reward model, whose directory or name is ``config.path``."""
    path = (node.get("config") or {}).get("path")
    if not path or _is_tiny(str(path)):
        return {}
    twin = twin_of_model({"path": path}, directory, head=True, like=node.get("like"))
    return {"config": {"path": str(twin)}}


def twin_of_model(
    model: Mapping[str, Any],
    directory: Path,
    *,
    head: bool = False,
    like: Mapping[str, Any] | None = None,
) -> Path:
    """Makes a random model of the original's type, unless it is there; returns its directory.

    model: the original, as under ``model:``.
    head: whether it is a sequence classifier with one output.
    like: the model that counts where the original is a directory that an earlier job will make.

    Raises ConfigError where the original is neither here nor one of those that are known.
    """
    path = str(model["path"])
    if _is_tiny(path):
        return Path(path)
    if like and like.get("path") and Path(path).is_absolute() and not Path(path).exists():
        if _is_tiny(str(like["path"])) and not head:
            return Path(str(like["path"]))
        model = like
    try:
        original = read_config(model)
    except UnknownSizes as error:
        raise ConfigError(
            f"there is no twin of {path}: {error}.",
            where="model.path",
            todo="download its config.json, or name a model of the same family that is known",
        ) from error
    place = directory / (path.strip("/").replace("/", "--") + ("-reward" if head else ""))
    if not (place / "config.json").is_file():
        place.mkdir(parents=True, exist_ok=True)
        _make(original, place, head=head)
    return place


def _is_tiny(path: str) -> bool:
    """Returns whether a model here is a twin already, or as small as one."""
    files = list(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    return bool(files) and sum(file.stat().st_size for file in files) < 2**23


def _make(original: Mapping[str, Any], place: Path, *, head: bool) -> None:
    """Writes a random model with its tokenizer into a directory.

    original: the ``config.json`` of the model that it is a twin of.
    head: as for ``twin_of_model``.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    family = str(original["model_type"])
    spaced = family in _SPACED and not _is_byte_level(original)
    seeing = "vision_config" in original
    special = (*_SPECIAL, *_IMAGE_SPECIAL) if seeing else _SPECIAL
    tokenizer = _tokenizer(special, spaced=spaced)
    ids = {"bos_token_id": None, "eos_token_id": special.index(_END), "pad_token_id": 0}
    if seeing:
        config = _image_config(original, family, len(tokenizer), special, ids)
        AutoModelForImageTextToText.from_config(config).save_pretrained(place)
        _save_processor(place)
    else:
        config = AutoConfig.for_model(family, **_shrunk(original, len(tokenizer)), **ids)
        config.num_labels = 1 if head else config.num_labels
        kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
        kind.from_config(config).save_pretrained(place)
    tokenizer.save_pretrained(place)


def _shrunk(original: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """Returns a config with the original's words and a twin's sizes."""
    kept = {key: value for key, value in original.items() if key not in _NOT_A_TWINS}
    sizes = {name: size for name, size in _SIZES.items() if name in original}
    sizes |= {name: _SIZES[name] for name in ("hidden_size", "num_hidden_layers")}
    heads, keys = (
        int(original.get(name) or 1) for name in ("num_attention_heads", "num_key_value_heads")
    )
    # grouped heads stay grouped, and so does one whose size is not hidden / heads
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1 if keys < heads else 2}
    return {**kept, **sizes, "vocab_size": vocabulary, "sliding_window": None}


def _image_config(
    original: Mapping[str, Any],
    family: str,
    vocabulary: int,
    special: Sequence[str],
    ids: Mapping[str, Any],
) -> Any:
    from transformers import AutoConfig

    text = _shrunk(original["text_config"], vocabulary) | dict(ids)
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
    }
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "in_chans": 3}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    names = ("vision_start", "image", "vision_end", "video")
    tokens = {
        f"{name}_token_id": special.index(token)
        for name, token in zip(names, _IMAGE_SPECIAL, strict=True)
    }
    return AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens
    )


def _save_processor(place: Path) -> None:
    """Writes the settings of an image processor: at most 64 patches of 4 by 4 pixels."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    (place / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _is_byte_level(original: Mapping[str, Any]) -> bool:
    """Returns whether a Llama is one of the third generation or newer, by its vocabulary."""
    return original["model_type"] == "llama" and int(original.get("vocab_size") or 0) > 100_000


def _tokenizer(special: Sequence[str], *, spaced: bool) -> Any:
    """Returns a tokenizer that has learned from a few sentences.

    spaced: SentencePiece's kind, which writes spaces as a sign and falls back on bytes; else
        byte-level.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if spaced:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        first = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet: list[str] = []
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        first = list(special)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY + (256 if spaced else 0),
        special_tokens=first,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=special[0],
        unk_token=special[0],
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _TEMPLATE
    return fast
