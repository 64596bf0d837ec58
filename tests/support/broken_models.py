"""Model directories that are whole, and ones that are broken in some way, made of tiny models.

``GOOD`` and ``BROKEN`` map a name to a function that changes the directory of a tiny model. What a
function changes it draws from the generator that it is given: the same seed, the same directory.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from gcore_language.tiny import CONFIGS, EXPERT_CONFIGS, save_image_model, save_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

IMAGE_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
#: Families of which a tiny model can be made.
FAMILIES = (*CONFIGS, *EXPERT_CONFIGS, *IMAGE_FAMILIES)
#: Families whose output embedding is their input embedding, and others, in their tiny models.
TIED = ("qwen2", "qwen3", "gpt2")
UNTIED = ("llama", "llama-head16", "mixtral")

Tensors = dict[str, Tensor]
Change = Callable[[Path, random.Random], None]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def save_family(directory: Path, family: str, seed: int = 0) -> Path:
    """Writes the tiny model of a family; returns its directory."""
    save = save_image_model if family in IMAGE_FAMILIES else save_model
    save(directory, family, seed)
    return directory


def make_directory(
    kind: str,
    directory: Path,
    seed: int = 0,
    models: Callable[[str], Path] | None = None,
    family: str = "",
) -> Path:
    """Makes the directory of a name of ``GOOD`` or ``BROKEN``; returns it.

    models: returns the directory of a family's tiny model, which is copied; None: one is made.
    family: of the model; "": any that the kind is for.
    """
    families, change = (GOOD | BROKEN)[kind]
    draw = random.Random(f"{kind} {seed}")
    family = family or draw.choice(families)
    if models is None:
        save_family(directory, family, seed)
    else:
        shutil.copytree(models(family), directory)
    change(directory, draw)
    return directory


# -- ways to change a directory --------------------------------------------------------------------


def _config(**values: Any) -> Change:
    """Sets keys of config.json."""

    return lambda directory, draw: set_config(directory, **values)


def set_config(directory: Path, **values: Any) -> None:
    """Sets keys of a directory's config.json."""
    file = directory / _CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _drawn_config(of: Callable[[dict[str, Any], random.Random], dict[str, Any]]) -> Change:
    """Sets the keys of config.json that ``of`` returns for what it says and a generator."""

    def change(directory: Path, draw: random.Random) -> None:
        config = json.loads((directory / _CONFIG).read_text())
        set_config(directory, **of(config, draw))

    return change


def _tensors(edit: Callable[[Tensors, random.Random], Tensors | None]) -> Change:
    """Writes the weights again, after ``edit`` has changed them or returned others."""

    def change(directory: Path, draw: random.Random) -> None:
        tensors = load_file(directory / _WEIGHTS)
        edited = edit(tensors, draw)
        write_weights(directory / _WEIGHTS, tensors if edited is None else edited)

    return change


def write_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})


def _bytes(edit: Callable[[bytes, random.Random], bytes], name: str = _WEIGHTS) -> Change:
    """Writes a file again with other bytes."""

    def change(directory: Path, draw: random.Random) -> None:
        file = directory / name
        file.write_bytes(edit(file.read_bytes(), draw))

    return change


def _then(*changes: Change) -> Change:
    def change(directory: Path, draw: random.Random) -> None:
        for each in changes:
            each(directory, draw)

    return change


def _file(name: str, content: str | bytes) -> Change:
    """Writes a file beside the model's."""

    def change(directory: Path, draw: random.Random) -> None:
        data = content.encode() if isinstance(content, str) else content
        (directory / name).write_bytes(data)

    return change


def _without(*names: str) -> Change:
    def change(directory: Path, draw: random.Random) -> None:
        for name in names:
            (directory / name).unlink()

    return change


def shard(directory: Path, draw: random.Random, parts: int = 3) -> None:
    """Writes the weights again as some files with an index."""
    tensors = load_file(directory / _WEIGHTS)
    (directory / _WEIGHTS).unlink()
    names = [f"model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
    places = {name: names[place % parts] for place, name in enumerate(sorted(tensors))}
    for file in names:
        write_weights(directory / file, {n: t for n, t in tensors.items() if places[n] == file})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / _INDEX).write_text(json.dumps(index))


def _of_shard(change: Callable[[Path, random.Random], None]) -> Change:
    """Shards the model, and changes one of its files, by its path."""

    def sharded(directory: Path, draw: random.Random) -> None:
        shard(directory, draw)
        change(draw.choice(sorted(directory.glob("model-*.safetensors"))), draw)

    return sharded


def _matrices(tensors: Tensors) -> list[str]:
    return sorted(name for name, tensor in tensors.items() if tensor.dim() == 2)


def _pick(names: Iterable[str], draw: random.Random) -> str:
    return draw.choice(sorted(names))


# -- what is broken --------------------------------------------------------------------------------


def _remove_one(tensors: Tensors, draw: random.Random) -> None:
    del tensors[_pick(tensors, draw)]


def _misspell_one(tensors: Tensors, draw: random.Random) -> None:
    name = _pick(tensors, draw)
    tensors[name.replace("weight", "wieght").replace("bias", "bais")] = tensors.pop(name)


def _shorten_one(tensors: Tensors, draw: random.Random) -> None:
    name = _pick(tensors, draw)
    tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()


def _spoil(value: float) -> Callable[[Tensors, random.Random], None]:
    def spoil(tensors: Tensors, draw: random.Random) -> None:
        flat = tensors[_pick(tensors, draw)].view(-1)
        flat[draw.randrange(len(flat))] = value

    return spoil


def _begin_with(*beginnings: str) -> Callable[[Tensors, random.Random], Tensors]:
    def rename(tensors: Tensors, draw: random.Random) -> Tensors:
        beginning = draw.choice(beginnings)
        return {f"{beginning}{name}": tensor for name, tensor in tensors.items()}

    return rename


def _pack(*dtypes: torch.dtype) -> Callable[[Tensors, random.Random], None]:
    """Writes some matrices in a dtype of quantised weights."""

    def pack(tensors: Tensors, draw: random.Random) -> None:
        dtype = draw.choice(dtypes)
        for name in draw.sample(_matrices(tensors), 2):
            tensors[name] = tensors[name].to(dtype)

    return pack


def _as_gptq(tensors: Tensors, draw: random.Random) -> None:
    name = _pick(_matrices(tensors), draw)
    height, width = tensors.pop(name).shape
    base = name.removesuffix("weight")
    tensors[f"{base}qweight"] = torch.zeros(max(1, width // 8), height, dtype=torch.int32)
    tensors[f"{base}qzeros"] = torch.zeros(1, max(1, height // 8), dtype=torch.int32)
    tensors[f"{base}scales"] = torch.ones(1, height, dtype=torch.float16)


def _remove_expert(tensors: Tensors, draw: random.Random) -> None:
    experts = [name for name in tensors if ".experts." in name]
    del tensors[_pick(experts, draw)]


def _reshape_expert(tensors: Tensors, draw: random.Random) -> None:
    name = _pick([name for name in tensors if ".experts." in name], draw)
    tensors[name] = tensors[name][:-1].clone()


def _remove_eye(tensors: Tensors, draw: random.Random) -> None:
    del tensors[_pick([name for name in tensors if "visual" in name], draw)]


def _add(*names: str) -> Callable[[Tensors, random.Random], None]:
    def add(tensors: Tensors, draw: random.Random) -> None:
        tensors[draw.choice(names)] = torch.zeros(4, 4)

    return add


def _drop_head(tensors: Tensors, draw: random.Random) -> None:
    del tensors["lm_head.weight"]


def _other_layers(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    layers = draw.choice([config[key] - 1, config[key] + 1, config[key] + 7])
    types = config.get("layer_types")
    kept = {"layer_types": [types[0]] * layers} if types else {}
    return {key: layers, **kept}


def _other_vocabulary(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    return {"vocab_size": config["vocab_size"] + draw.choice([1, 10, 1000])}


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(1, len(content))]


def _cut_file(file: Path, draw: random.Random) -> None:
    file.write_bytes(_cut(file.read_bytes(), draw))


def _flip_header(content: bytes, draw: random.Random) -> bytes:
    return content[:9] + b"\xff\xfe" + content[11:]


def _double(file: Path, draw: random.Random) -> None:
    """Adds a tensor of another shard."""
    other = draw.choice([each for each in file.parent.glob("model-*") if each != file])
    with safe_open(other, "pt") as opened:
        name = sorted(opened.keys())[0]
        extra = {name: opened.get_tensor(name)}
    write_weights(file, load_file(file) | extra)


def _index(**values: Any) -> Change:
    def change(directory: Path, draw: random.Random) -> None:
        shard(directory, draw)
        (directory / _INDEX).write_text(json.dumps(values))

    return change


def _second_set(directory: Path, draw: random.Random) -> None:
    """Shards the model and leaves the old file beside the index."""
    old = (directory / _WEIGHTS).read_bytes()
    shard(directory, draw)
    (directory / _WEIGHTS).write_bytes(old)


def _to_classifier(directory: Path, draw: random.Random) -> None:
    """Turns a language model into a reward model, whose output embedding is gone."""

    def edit(tensors: Tensors, draw: random.Random) -> None:
        head = tensors.pop("lm_head.weight")
        tensors["score.weight"] = head[:1].clone()

    _tensors(edit)(directory, draw)


_QUANTISED = ("bitsandbytes", "gptq", "awq", "fp8", "compressed-tensors", "mxfp4")

#: Name -> (families, change). A model that is broken so is nobody's to train.
BROKEN: dict[str, tuple[tuple[str, ...], Change]] = {
    # names and shapes
    "a tensor is missing": (FAMILIES, _tensors(_remove_one)),
    "a name is misspelled": (FAMILIES, _tensors(_misspell_one)),
    "a tensor is shorter": (("llama", "qwen2", "qwen3", "gpt2"), _tensors(_shorten_one)),
    "names are peft's": (FAMILIES, _tensors(_begin_with("base_model.model."))),
    "names have a beginning": (
        FAMILIES,
        _tensors(_begin_with("module.", "_orig_mod.", "actor.", "policy.")),
    ),
    "a value head is in the files": (
        FAMILIES,
        _tensors(_add("v_head.summary.weight", "score.weight", "value_head.weight")),
    ),
    "an adapter is in the files": (
        ("llama", "qwen2"),
        _tensors(_add("model.layers.0.self_attn.q_proj.lora_A.default.weight")),
    ),
    "an expert lacks a tensor": (tuple(EXPERT_CONFIGS), _tensors(_remove_expert)),
    "an expert has another shape": (tuple(EXPERT_CONFIGS), _tensors(_reshape_expert)),
    "the image encoder lacks a tensor": (IMAGE_FAMILIES, _tensors(_remove_eye)),
    "it is a reward model": (("llama",), _to_classifier),
    # numbers
    "a weight is NaN": (FAMILIES, _tensors(_spoil(float("nan")))),
    "a weight is infinite": (FAMILIES, _tensors(_spoil(float("-inf")))),
    # quantised
    "config.json says quantised": (
        FAMILIES,
        _drawn_config(
            lambda _, draw: {"quantization_config": {"quant_method": draw.choice(_QUANTISED)}}
        ),
    ),
    "config.json says quantised, and not how": (FAMILIES, _config(quantization_config={})),
    "weights are bytes": (FAMILIES, _tensors(_pack(torch.int8, torch.uint8))),
    "weights are in 8 bits": (
        FAMILIES,
        _tensors(_pack(torch.float8_e4m3fn, torch.float8_e5m2)),
    ),
    "a matrix is packed as by GPTQ": (("llama", "qwen2", "qwen3"), _tensors(_as_gptq)),
    # config.json
    "config.json has other layers": (
        ("llama", "qwen2", "qwen3", "gpt2"),
        _drawn_config(_other_layers),
    ),
    "config.json has a billion layers": (("llama",), _config(num_hidden_layers=10**9)),
    "config.json has more words": ((*UNTIED, *TIED), _drawn_config(_other_vocabulary)),
    "config.json has wider layers": (("llama", "qwen2"), _config(intermediate_size=100)),
    "config.json has other experts": (("mixtral",), _config(num_local_experts=4)),
    "config.json is of another family": (("llama",), _config(model_type="qwen2")),
    "config.json is of no known family": (FAMILIES, _config(model_type="lama")),
    "config.json ties what is two": (UNTIED, _config(tie_word_embeddings=True)),
    "config.json parts what is one": (
        TIED,
        _config(tie_word_embeddings=False),
    ),
    "config.json ties nothing, and a head is missing": (UNTIED, _tensors(_drop_head)),
    "config.json has no dtype of torch": (FAMILIES, _config(dtype="float99")),
    "config.json has text for a number": (("llama", "qwen2"), _config(hidden_size="64")),
    "config.json has text for the words": (UNTIED, _config(vocab_size="22")),
    "config.json has no heads": (UNTIED, _config(num_attention_heads=0)),
    "config.json has an unknown activation": (UNTIED, _config(hidden_act="swish-swoosh")),
    "config.json names other weights": (
        UNTIED,
        _config(transformers_weights="old.safetensors"),
    ),
    "config.json is cut": (FAMILIES, _bytes(_cut, _CONFIG)),
    "config.json is a list": (FAMILIES, _file(_CONFIG, "[]")),
    "config.json is no text": (FAMILIES, _file(_CONFIG, b"\xff\xfe\x00")),
    "config.json is missing": (FAMILIES, _without(_CONFIG)),
    # files
    "the file is cut": (FAMILIES, _bytes(_cut)),
    "the file is empty": (FAMILIES, _file(_WEIGHTS, "")),
    "the header is damaged": (FAMILIES, _bytes(_flip_header)),
    "the file goes on behind its tensors": (FAMILIES, _bytes(lambda content, _: content + b"more")),
    "the file is a pointer of git LFS": (
        FAMILIES,
        _file(_WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"),
    ),
    "a shard is missing": (FAMILIES, _of_shard(lambda file, _: file.unlink())),
    "a shard is cut": (FAMILIES, _of_shard(_cut_file)),
    "a tensor is in two shards": (FAMILIES, _of_shard(_double)),
    "the index is no JSON": (FAMILIES, _then(shard, _bytes(_cut, _INDEX))),
    "the index has no map": (FAMILIES, _index(metadata={})),
    "the index is empty": (FAMILIES, _index(weight_map={})),
    "the index leads out of the directory": (
        FAMILIES,
        _index(weight_map={"a": "../a.safetensors"}),
    ),
    "the index is missing": (FAMILIES, _then(shard, _without(_INDEX))),
    "there are two sets of weights": (FAMILIES, _second_set),
    "there is only an adapter": (
        FAMILIES,
        _then(
            _without(_CONFIG, _WEIGHTS),
            _file("adapter_config.json", json.dumps(_ADAPTER)),
            _file("adapter_model.safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00{}"),
        ),
    ),
    "there is an adapter, too": (FAMILIES, _file("adapter_config.json", json.dumps(_ADAPTER))),
    "there are only pickles": (FAMILIES, _then(_without(_WEIGHTS), _file("pytorch_model.bin", ""))),
    "there is only GGUF": (FAMILIES, _then(_without(_WEIGHTS), _file("model-q4.gguf", "GGUF"))),
}


# -- what is whole ---------------------------------------------------------------------------------


def _as(dtype: torch.dtype) -> Change:
    return _tensors(lambda tensors, _: {name: t.to(dtype) for name, t in tensors.items()})


def _nothing(directory: Path, draw: random.Random) -> None:
    pass


def _add_rotary(tensors: Tensors, draw: random.Random) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)


def _add_masks(tensors: Tensors, draw: random.Random) -> None:
    mask = torch.ones(1, 1, 128, 128, dtype=torch.uint8)
    tensors["transformer.h.0.attn.bias"] = mask
    tensors["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)


def _add_equal_head(tensors: Tensors, draw: random.Random) -> None:
    (embedding,) = [n for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight"))]
    tensors["lm_head.weight"] = tensors[embedding].clone()


def _without_beginning(tensors: Tensors, draw: random.Random) -> Tensors:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


#: Name -> (families, change). Such a model is as good as the tiny one that it was made of.
GOOD: dict[str, tuple[tuple[str, ...], Change]] = {
    **{f"a tiny {family}": ((family,), _nothing) for family in FAMILIES},
    "in shards": (FAMILIES, shard),
    "in bfloat16": (FAMILIES, _as(torch.bfloat16)),
    "in float16": (("llama", "qwen2"), _as(torch.float16)),
    "tables of old rotary embeddings": (("llama",), _tensors(_add_rotary)),
    "masks of old attention": (("gpt2",), _tensors(_add_masks)),
    "an equal head beside a tied embedding": (TIED, _tensors(_add_equal_head)),
    "names of the hub's GPT-2": (("gpt2",), _tensors(_without_beginning)),
    "a null for quantisation": (FAMILIES, _config(quantization_config=None)),
    "an untied model": (("llama",), _config(tie_word_embeddings=False)),
}
