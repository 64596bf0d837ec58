"""What may be set of the low-rank adapters that a trainer trains in place of the weights.

Light: no torch. ``gcore_language.lora`` makes the adapters.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gcore_core.contract.errors import ConfigError, DataError, GcoreError, did_you_mean
from gcore_core.contract.installing import install_command
from gcore_language.settings import TrainerSettings, require

#: The word for all matrices of the layers.
AUTO = "auto"
#: Modules whose matrix is no layer's: that of tokens going in, and that of tokens coming out.
_EMBEDDINGS = frozenset({"embed_tokens", "lm_head", "wte", "embed_in", "embed_out"})
_HEADS = frozenset({"lm_head", "embed_out", "score"})
_SHOWN = 8

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
#: Key of the safetensors metadata of an adapter that names its base.
BASE_KEY = "base_weights_sha256"
#: What peft's config may say without changing W + scale B A, where W is the base as it is. Of any
#: other key, those of later versions too, only a value that says nothing.
_PLAIN = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal")}
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
#: Keys that name things, that are read here, or that say how something else is done.
_OF_ANY_VALUE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Adapters that are trained in place of the model's weights (LoRA, Hu et al. 2021)."""

    rank: int = 0
    """Rank of the adapters (peft's ``r``), at least 0; 0 trains the weights themselves, unless
    ``path`` names an adapter, whose rank is then taken.
    """
    alpha: float = 16.0
    """Number above 0 that scales the adapters: their product is multiplied by alpha / rank, or by
    alpha / sqrt(rank) with ``use_rslora``.
    """
    use_rslora: bool = False
    """Whether the scale is alpha / sqrt(rank) (Kalajdzievski, 2023)."""
    targets: Any = AUTO
    """Which modules get an adapter (peft's ``target_modules``): auto for all linear layers of the
    decoder, or a list of their names or ends of names, such as [q_proj, v_proj].
    """
    dropout: float = 0.0
    """Dropout of the adapters' input; only 0 is allowed."""
    load_in_4bit: bool = False
    """Whether to hold the frozen base in 4 bits (QLoRA); only false is allowed."""
    path: str = ""
    """Directory of an adapter in peft's layout to go on from; empty: a new one, which changes
    nothing until the first update. The reference is then the model with this adapter.
    """
    push: Literal["auto", "merged"] = "auto"
    """What generators get: auto the adapter alone where all of them can take it, else whole
    weights; merged always whole weights with the adapter merged.
    """

    @property
    def on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0 or bool(self.path)

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", f"must not be negative, is {self.rank}")
        require(
            self.alpha > 0 and math.isfinite(self.alpha),
            "lora.alpha",
            f"must be above 0 and finite, is {self.alpha}",
        )
        require(
            self.dropout == 0,
            "lora.dropout",
            f"must be 0, is {self.dropout}: with dropout the same tokens have other log-probs each "
            "time, so that ratios compare with a chance",
        )
        require(
            not self.load_in_4bit,
            "lora.load_in_4bit",
            "must be false: a base in 4 bits needs bitsandbytes' CUDA kernels, and a generator "
            "that holds the base in another dtype samples from another policy than is trained",
        )
        names = self.targets
        require(
            names == AUTO
            or (isinstance(names, list) and bool(names) and all(map(_is_name, names))),
            "lora.targets",
            f"must be auto or a list of names of modules, is {names!r}",
        )
        for name in () if names == AUTO else names:
            require(
                name.rpartition(".")[2] not in _EMBEDDINGS,
                "lora.targets",
                f"{name} is an embedding: it may be tied to the other end of the model, and an "
                "adapter on one would change both; take layers, or train the weights themselves",
            )


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name)


@dataclass(frozen=True, kw_only=True)
class LoraTrainerSettings(TrainerSettings):
    """Settings of a trainer that can train adapters."""

    lora: LoraSettings = field(default_factory=LoraSettings)
    """Low-rank adapters in place of full training; ``lora: {rank: 8}`` turns it on."""


# -- which modules ---------------------------------------------------------------------------------


def choose_targets(names: Any, linear: Collection[str], where: str) -> list[str]:
    """Returns the modules that get an adapter, in the order of ``linear``.

    names: ``LoraSettings.targets``.
    linear: full names of the model's linear layers.
    where: the path of the setting, for the error.

    Raises ConfigError when a name fits no layer, or the model has none.
    """
    layers = [name for name in linear if name.rpartition(".")[2] not in _HEADS]
    if not layers:
        raise ConfigError(
            "this model has no linear layer that an adapter could go on.",
            where=where,
            why="Its layers are of another kind, such as GPT-2's Conv1D.",
            todo="Leave lora out: the weights themselves can be trained.",
        )
    if names == AUTO:
        return layers
    for name in names:
        if not any(_fits(name, layer) for layer in layers):
            last = list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
            raise ConfigError(
                f"the model has no linear layer {name!r}{did_you_mean(name, last)}.",
                where=where,
                why=f"It has {', '.join(last[:_SHOWN])}{' and others' * (len(last) > _SHOWN)}.",
            )
    return [layer for layer in layers if any(_fits(name, layer) for name in names)]


def _fits(name: str, layer: str) -> bool:
    """Returns whether a name is a layer's or the end of it, as in peft."""
    return layer == name or layer.endswith(f".{name}")


def linear_of(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns the modules of a checkpoint that have a matrix, embeddings left out.

    shapes: tensor's name -> shape, as in ``ModelFiles``.
    """
    modules = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    ]
    return [name for name in modules if name.rpartition(".")[2] not in _EMBEDDINGS]


def is_of(role: Mapping[str, Any], plugin: str) -> bool:
    """Returns whether a role of the resolved configuration uses a plugin's default provider."""
    used, _, provider = role["use"].partition("/")
    return used == plugin and provider in ("", "default")


def problems(role: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields what ``g-core check`` can know of a trainer's adapters before anything starts.

    It looks at directories that are there, and reads no tensor.

    role: of the resolved configuration.
    where: path of the setting ``lora``.
    """
    try:
        lora = LoraSettings(**role["config"].get("lora", {}))
    except (ConfigError, TypeError):
        return  # its own check says so
    if not lora.on:
        return
    if not role.get("python") and importlib.util.find_spec("peft") is None:
        command = install_command("gcore-language[lora]")
        yield f"{where}: adapters need the library peft: {command}"
    if lora.path and not Path(lora.path).is_dir():
        yield f"{where}.path: there is no directory {lora.path}."
        return
    path = (role.get("model") or {}).get("path")
    if not path or not Path(path).is_dir():
        return
    try:
        named = read_adapter(Path(lora.path), lora, where).targets if lora.path else lora.targets
        if matrices := _matrices_in(Path(path)):
            choose_targets(named, matrices, f"{where}.targets")
    except GcoreError as error:
        yield f"{error.where or where}: {' '.join(filter(None, (error.what, error.why)))}"


def adapters_of_values(role: str) -> ConfigError:
    """Returns the error of a trainer of values whose settings ask for adapters."""
    return ConfigError(
        "a model with a value head takes no adapters.",
        where=f"roles.{role}.config.lora",
        why="Its head is new, so it is trained as a whole.",
        todo="Leave lora out of this role.",
    )


def _matrices_in(directory: Path) -> list[str]:
    """Returns the modules that have a matrix in a model's files; none where they are quantised."""
    # which opens files by a library
    from gcore_language.model_files import is_quantised, shapes_in

    return [] if is_quantised(directory) else linear_of(shapes_in(directory))


# -- an adapter's files ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """An adapter in peft's layout.

    directory: where it lies.
    rank, alpha, use_rslora: as in ``LoraSettings``.
    targets: names or ends of names of modules, or "auto".
    """

    directory: Path
    rank: int
    alpha: float
    use_rslora: bool
    targets: Any


def read_adapter(directory: Path, lora: LoraSettings, where: str) -> AdapterFiles:
    """Reads an adapter's config.

    where: path of the setting ``lora``, for errors.

    Raises DataError when it cannot be read, is of a kind that cannot be trained here, or differs
    from a rank or targets that are set beside ``path``.
    """
    file = directory / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config["peft_type"]
        rank = int(config["r"])
        alpha = float(config["lora_alpha"])
        named = config["target_modules"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            "this is no adapter in peft's layout.",
            where=str(file),
            why=repr(error),
            todo=f"Correct {where}.path.",
        ) from error
    other = [
        name
        for name, value in config.items()
        if name not in _OF_ANY_VALUE and value not in (*_NOTHING, *_PLAIN.get(name, ()))
    ]
    if kind != "LORA" or other:
        raise DataError(
            "this kind of adapter cannot be trained here.",
            where=str(file),
            why=f"peft_type is {kind}" if kind != "LORA" else f"It sets {', '.join(other)}.",
        )
    targets = AUTO if named == "all-linear" else sorted([named] if _is_name(named) else named)
    if lora.rank not in (0, rank):
        raise DataError(
            f"the adapter has rank {rank}, and {where}.rank is {lora.rank}.",
            where=str(file),
            todo=f"Leave {where}.rank out: the adapter's own is taken.",
        )
    return AdapterFiles(
        directory=directory,
        rank=rank,
        alpha=alpha,
        use_rslora=bool(config.get("use_rslora")),
        targets=targets,
    )
