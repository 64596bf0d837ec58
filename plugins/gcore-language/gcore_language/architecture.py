"""Reads the sizes of a decoder-only language model off its ``config.json``, and counts its weights.

Nothing is loaded and no library is imported: what a model needs is known before there is one.

Legend of sizes: D hidden size, V vocabulary, I feed-forward channels, H query heads, K key-value
heads, E head size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gcore_language.model_places import directory_here
from gcore_language.published import PUBLISHED

#: Families whose equations are those counted here.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_QKV_BIASED = ("qwen2",)
_NORMED_HEADS = ("qwen3", "qwen3_moe")


class UnknownSizes(ValueError):
    """Says why the sizes of a model cannot be told."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Describes tensors of one shape.

    shape: of each.
    count: how many there are.
    """

    shape: tuple[int, ...]
    count: int = 1

    @property
    def numbers(self) -> int:
        """How many numbers all of them hold."""
        return self.count * math.prod(self.shape)

    def of_rank(self, ranks: int) -> int:
        """How many numbers the fullest of so many ranks holds, where each tensor's rows are shared
        out as FSDP2 does: in equal blocks, the last ones shorter or empty.
        """
        rows, *rest = self.shape
        return self.count * -(-rows // ranks) * math.prod(rest)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Holds the sizes of a Llama-like decoder.

    family: ``model_type`` of the config.
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocabulary: as in the config.
    tied: whether the output embedding is the input embedding.
    qkv_bias, output_bias, mlp_bias: which linear maps have a bias.
    normed_heads: whether queries and keys are normalised.
    experts: experts of a sparse layer; 0: there are none.
    experts_per_token: how many of them compute a token.
    expert_channels: feed-forward channels of an expert.
    dense_layers: how many layers have no experts.
    spread: over how many ranks the experts of a layer are spread; tensors are those of one rank.
    longest: most tokens of a sequence.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    normed_heads: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_channels: int = 0
    dense_layers: int = 0
    spread: int = 1
    longest: int = 0

    @property
    def query_size(self) -> int:
        """Numbers of a token's queries in one layer, H E."""
        return self.heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Numbers of a token's keys in one layer, K E; its values are as many."""
        return self.kv_heads * self.head_dim

    def root(self) -> list[Tensors]:
        """The tensors outside the layers: embeddings and the last norm."""
        embeddings = 1 if self.tied else 2
        return [
            Tensors(shape=(self.vocabulary, self.hidden), count=embeddings),
            Tensors(shape=(self.hidden,)),
        ]

    def layer(self, *, sparse: bool | None = None) -> list[Tensors]:
        """The tensors of one layer.

        sparse: whether it has experts; None: as the largest layer of the model.
        """
        sparse = self.experts > 0 if sparse is None else sparse
        feed_forward = self._sparse() if sparse else self._dense(self.intermediate)
        return [*self._attention(), *feed_forward, Tensors(shape=(self.hidden,), count=2)]

    def _attention(self) -> list[Tensors]:
        tensors = [
            Tensors(shape=(self.query_size, self.hidden)),
            Tensors(shape=(self.key_size, self.hidden), count=2),
            Tensors(shape=(self.hidden, self.query_size)),
        ]
        if self.qkv_bias:
            tensors.append(Tensors(shape=(self.query_size,)))
            tensors.append(Tensors(shape=(self.key_size,), count=2))
        if self.output_bias:
            tensors.append(Tensors(shape=(self.hidden,)))
        if self.normed_heads:
            tensors.append(Tensors(shape=(self.head_dim,), count=2))
        return tensors

    def _dense(self, channels: int) -> list[Tensors]:
        tensors = [
            Tensors(shape=(channels, self.hidden), count=2),
            Tensors(shape=(self.hidden, channels)),
        ]
        if self.mlp_bias:
            tensors.append(Tensors(shape=(channels,), count=2))
            tensors.append(Tensors(shape=(self.hidden,)))
        return tensors

    def _sparse(self) -> list[Tensors]:
        """A router, and the experts' matrices, which transformers holds as two tensors."""
        channels = self.expert_channels
        own = self.experts // self.spread
        return [
            Tensors(shape=(self.experts, self.hidden)),
            Tensors(shape=(own, 2 * channels, self.hidden)),
            Tensors(shape=(own, self.hidden, channels)),
        ]

    def all_layers(self) -> Iterator[list[Tensors]]:
        """Yields the tensors of each layer."""
        for number in range(self.layers):
            yield self.layer(sparse=self.experts > 0 and number >= self.dense_layers)

    @property
    def parameters(self) -> int:
        """How many numbers the weights are; a tied embedding counts once."""
        return numbers(self.root()) + sum(map(numbers, self.all_layers()))

    @property
    def active_parameters(self) -> int:
        """How many of them compute a token."""
        if not self.experts:
            return self.parameters
        idle = self.experts - self.experts_per_token
        expert = 3 * self.hidden * self.expert_channels
        return self.parameters - (self.layers - self.dense_layers) * idle * expert

    @property
    def matrices(self) -> int:
        """How many numbers the linear maps of all layers hold."""
        tensors = (item for layer in self.all_layers() for item in layer)
        return sum(item.numbers for item in tensors if len(item.shape) > 1)

    def of_rank(self, ranks: int) -> int:
        """How many numbers the fullest of so many FSDP2 ranks holds."""
        every = [*self.root(), *(item for layer in self.all_layers() for item in layer)]
        return sum(item.of_rank(ranks) for item in every)

    def of_slice(self, parts: int) -> int:
        """How many numbers one of so many tensor-parallel parts holds: matrices are split, vectors
        and routers are whole.
        """
        every = [*self.root(), *(item for layer in self.all_layers() for item in layer)]
        total = 0
        for item in every:
            whole = len(item.shape) == 1 or item.shape == (self.experts, self.hidden)
            total += item.numbers if whole else -(-item.numbers // parts)
        return total

    @property
    def cached_numbers(self) -> int:
        """How many numbers the key-value cache holds for each token."""
        return self.layers * 2 * self.key_size


def numbers(tensors: list[Tensors]) -> int:
    """Returns how many numbers some tensors hold."""
    return sum(item.numbers for item in tensors)


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Returns the sizes that a ``config.json`` tells.

    Raises UnknownSizes for another family, and where a size is missing or no positive number.
    """
    family = config.get("model_type")
    if "text_config" in config:
        raise UnknownSizes("of a model that takes images only its language part could be counted")
    if family not in FAMILIES:
        raise UnknownSizes(f"model_type {family!r} is none of {', '.join(FAMILIES)}")
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    sparse = family in ("mixtral", "qwen3_moe")
    layers = _size(config, "num_hidden_layers")
    biased = bool(config.get("attention_bias", False))
    return Architecture(
        family=str(family),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        intermediate=_size(config, "intermediate_size"),
        vocabulary=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=biased or family in _QKV_BIASED,
        output_bias=biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
        normed_heads=family in _NORMED_HEADS,
        experts=_experts(config) if sparse else 0,
        experts_per_token=_size(config, "num_experts_per_tok") if sparse else 0,
        expert_channels=_size(config, "moe_intermediate_size", _size(config, "intermediate_size"))
        if sparse
        else 0,
        dense_layers=_dense_layers(config, layers) if sparse else 0,
        longest=_size(config, "max_position_embeddings", 1),
    )


def _experts(config: Mapping[str, Any]) -> int:
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return _size(config, name)


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Returns how many layers of a sparse model have no experts (Qwen3-MoE's settings)."""
    step = config.get("decoder_sparse_step", 1)
    only = config.get("mlp_only_layers") or []
    return sum(1 for number in range(layers) if number in only or (number + 1) % step)


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise UnknownSizes(f"config.json: {name} is {value!r}, not a positive number")
    return value


def read_architecture(model: Mapping[str, Any]) -> Architecture:
    """Returns the sizes of the model that a role's ``model:`` names.

    model: its ``path`` is a directory, or a name on the hub that the hub's cache has or that is one
        of ``published``. Nothing is downloaded.
    Raises UnknownSizes.
    """
    return architecture_of(read_config(model))


def read_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the ``config.json`` of the model that a role's ``model:`` names.

    Raises UnknownSizes where there is none.
    """
    if not model.get("path"):
        made = "make" in model
        raise UnknownSizes("the run makes this model first" if made else "no model.path is given")
    path = str(model["path"])
    directory = directory_here(path, model.get("revision"))
    if directory is None:
        if path not in PUBLISHED:
            raise UnknownSizes(f"{path} is neither a directory nor in the hub's cache")
        return PUBLISHED[path]
    file = directory / "config.json"
    if not file.is_file():
        raise UnknownSizes(f"{directory} has no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownSizes(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnknownSizes(f"{file} is no mapping")
    return config
