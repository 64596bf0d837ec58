"""Low-rank adapters in place of full training (LoRA, Hu et al. 2021), by the library peft.

A target's weight is W + scale * B A. W is frozen; A (rank, inputs) and B (outputs, rank) are
trained. Every trainer on torch uses this module, and so does a generator that gets an adapter
alone.

``merged`` is the one place where W + scale * B A is computed: by the trainer for whole weights, by
a generator on arrival, and in the forward pass of ``flat``. So all three have the same bits. Other
layouts compute x W' + scale * (x A') B' in place of it, which differs by rounding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.installing import install_command
from gcore_core.contract.records import AdapterFacts
from gcore_language.adapter_books import tensor_names
from gcore_language.images import takes_images
from gcore_language.lora_settings import (
    AUTO,
    BASE_KEY,
    CONFIG_FILE,
    TENSORS_FILE,
    LoraSettings,
    choose_targets,
    read_adapter,
)
from gcore_language.model_files import weights_sha256
from gcore_language.pretrained import refuse_not_finite
from gcore_language.weights import like, named_tensors

#: peft's name for the adapter of a module.
_NAME = "default"
_FIRST = "lora_A"
_SECOND = "lora_B"
#: Key under which a checkpoint's numbers hold what its adapter is.
NUMBERS = "lora"
#: Folder of a run's weights that holds the adapter alone.
ADAPTER = "adapter"
_TRIAL_STD = 0.1


def merged(base: Tensor, halves: Sequence[Tensor], scale: float) -> Tensor:
    """Returns W + scale * B A, in the dtype of A and B.

    base: W [outputs, inputs], of any floating dtype.
    halves: A [rank, inputs] and B [outputs, rank].
    """
    first, second = halves
    # In place, which has the same bits: of each matrix a CPU's heap would keep two more.
    return (second @ first).mul_(scale).add_(base.to(first.dtype))


def weight_of(module: Any) -> Tensor:
    """Returns the weight by which a linear layer multiplies now: with its adapter, if that is on.

    It has gradient to the adapter.
    """
    weight: Tensor = module.weight
    if not hasattr(module, _FIRST) or module.disable_adapters:
        return weight
    halves = [getattr(module, half)[_NAME].weight for half in (_FIRST, _SECOND)]
    return merged(weight, halves, module.scaling[_NAME])


class Adapters:
    """The adapters of one model, which ``add_adapters`` makes.

    targets: full names of the modules that have one, in the model's order.
    rank, scale: as in ``AdapterFacts``.
    alpha: as in ``LoraSettings``.
    push_alone: whether a push may bring the adapter alone, as ``LoraSettings.push`` says.
    """

    def __init__(self, model: Any, lora: LoraSettings, targets: list[str], directory: Path) -> None:
        self.rank = lora.rank
        self.alpha = lora.alpha
        self.scale = lora.alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)
        self.targets = targets
        self._targets = frozenset(targets)
        self.push_alone = lora.push == "auto"
        self._use_rslora = lora.use_rslora
        self._named = lora.targets
        self._model = model
        self._directory = directory
        self._base_sha256 = ""
        self._start: dict[str, Tensor] = {}  # see ``keep_start``; empty for new adapters

    # -- tensors -----------------------------------------------------------------------------------

    def trained(self) -> dict[str, Tensor]:
        """Returns peft's name -> parameter, A then B of each target; call it after sharding."""
        return {
            name: getattr(self._model.get_submodule(target), half)[_NAME].weight
            for target in self.targets
            for name, half in zip(tensor_names(target), (_FIRST, _SECOND), strict=True)
        }

    def base(self) -> dict[str, Tensor]:
        """Returns Hugging Face name -> tensor of the base; a tied one under its first name only."""
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in named_tensors(self._model).items()
            if f".{_FIRST}." not in name and f".{_SECOND}." not in name
        }

    @torch.no_grad()
    def whole(self, full: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields Hugging Face name and whole tensor of the model with the adapters merged.

        full: makes a tensor whole that may be sharded; all ranks must iterate where it is.
        """
        for name, tensor in self.base().items():
            halves = [full(half) for half in self.halves(name)]
            yield name, self.put_on(full(tensor), halves)

    def halves(self, name: str) -> list[Tensor]:
        """Returns A and B of the weight ``name`` of the base; none where it has no adapter."""
        target = name.removesuffix(".weight")
        if target not in self._targets:
            return []
        layer = self._model.get_submodule(target)
        return [getattr(layer, half)[_NAME].weight for half in (_FIRST, _SECOND)]

    @torch.no_grad()
    def put_on(self, base: Tensor, halves: Sequence[Tensor]) -> Tensor:
        """Returns a whole weight of the base with its adapter, if it has one, merged."""
        return merged(base, halves, self.scale) if halves else base

    # -- on and off --------------------------------------------------------------------------------

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Has the model compute as it did before the first update, within a ``with`` block.

        New adapters are off: what is computed is the base's own forward pass. An adapter that was
        gone on from has the values with which it came.
        """
        if self._start:
            with self._holding(self._start):
                yield
            return
        layers = [self._model.get_submodule(target) for target in self.targets]
        for layer in layers:
            # not by enable_adapters(): that takes requires_grad off, which sharded tensors keep off
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    @contextmanager
    def _holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Lends the trained tensors other values."""
        trained = self.trained()
        own = {name: tensor.detach().clone() for name, tensor in trained.items()}
        _assign(trained, values)
        try:
            yield
        finally:
            _assign(trained, own)

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Gives the adapters values that matter, within a ``with`` block.

        New ones change nothing, so that a layout which leaves them out would pass its trial.
        """
        draw = torch.Generator().manual_seed(0)
        values = {
            name: (torch.randn(tensor.shape, generator=draw) * _TRIAL_STD).to(tensor.device)
            for name, tensor in self.trained().items()
        }
        with self._holding(values):
            yield

    def keep_start(self) -> None:
        """Remembers the present values for ``at_start``; call it after sharding."""
        self._start = {name: tensor.detach().clone() for name, tensor in self.trained().items()}

    # -- what it is --------------------------------------------------------------------------------

    def facts(self) -> AdapterFacts:
        """Returns what a push says of the adapters. The first call hashes the base's files."""
        if not self._base_sha256:
            self._base_sha256 = weights_sha256(self._directory)
        return AdapterFacts(self.rank, self.scale, self.targets, self._base_sha256)

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint says of the adapters, for ``check_numbers``."""
        facts = self.facts()
        return {"rank": facts.rank, "scale": facts.scale, "base": facts.base}

    def check_base(self, base: str, where: str) -> None:
        """Raises DataError when ``base``, a weights_sha256, is not that of this model's files."""
        own = self.facts().base
        if base and base != own:
            raise DataError(
                "this adapter is for another base.",
                where=where,
                why=f"It was trained on weights_sha256 {base[:12]}, model.path has {own[:12]}.",
                todo="Set model.path to the model on which it was trained.",
            )

    # -- files -------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_files(self, directory: Path) -> None:
        """Takes the values of an adapter in peft's layout.

        Raises DataError when it is damaged or not finite, for other modules or shapes, or of
        another base.
        """
        file = directory / TENSORS_FILE
        try:
            with safe_open(file, "pt") as opened:
                base = (opened.metadata() or {}).get(BASE_KEY, "")
                given = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(
                "adapter is missing, damaged or half written.", where=str(file), why=str(error)
            ) from error
        self.check_base(base, str(file))
        trained = self.trained()
        for name in sorted(trained.keys() ^ given.keys()):
            what = "lacks" if name in trained else "has besides"
            raise DataError(f"this adapter is of another model: it {what} {name}.", where=str(file))
        for name, tensor in given.items():
            if tensor.shape != trained[name].shape:
                raise DataError(
                    f"this adapter is of another model: {name} has shape {tuple(tensor.shape)}, "
                    f"{tuple(trained[name].shape)} would fit.",
                    where=str(file),
                )
            trained[name].copy_(tensor)
        refuse_not_finite(given.items(), file)

    def save_files(self, directory: Path, values: Mapping[str, Tensor]) -> None:
        """Writes the adapter in peft's layout, in float32.

        values: peft's name -> whole tensor.
        """
        directory.mkdir(parents=True, exist_ok=True)
        names = self._named
        if names == AUTO:
            names = list(dict.fromkeys(target.rpartition(".")[2] for target in self.targets))
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._directory),
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "use_rslora": self._use_rslora,
            "target_modules": names,
            "bias": "none",
            "inference_mode": True,
        }
        text = json.dumps(config, indent=2) + "\n"
        (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
        metadata = {"format": "pt", BASE_KEY: self.facts().base}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in values.items()}
        save_file(tensors, directory / TENSORS_FILE, metadata)


@torch.no_grad()
def _assign(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in targets.items():
        value = values[name]
        tensor.copy_(value if hasattr(value, "placements") else like(value, tensor))


def add_adapters(
    model: Any,
    lora: LoraSettings,
    directory: Path,
    role: str,
    dtype: torch.dtype,
    *,
    narrow: bool = True,
) -> Adapters:
    """Freezes a causal language model and gives it adapters, the same in every process.

    New adapters have B = 0, so that nothing changes until the first update, and A as peft draws it.
    The base is rounded to ``dtype``, which is that of pushes: so the trainer's base is the
    generators'.

    directory: the model's.
    narrow: whether linear layers are held in ``dtype`` too, for engines that allow several dtypes.

    Raises ConfigError without peft, or when a target fits no module, and DataError for a model or
    an adapter that cannot be used.
    """
    where = f"roles.{role}.config.lora"
    if takes_images(model.config):
        raise ConfigError(
            "adapters are not for models that take images.",
            where=where,
            why="No generator was tested with them beside images.",
            todo="Leave lora out.",
        )
    files = read_adapter(Path(lora.path), lora, where) if lora.path else None
    if files is not None:
        lora = LoraSettings(
            rank=files.rank,
            alpha=files.alpha,
            use_rslora=files.use_rslora,
            targets=files.targets,
            push=lora.push,
        )
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = choose_targets(lora.targets, linear, f"{where}.targets")
    _freeze(model, dtype, narrow=narrow)
    _inject(model, lora, targets, where)
    adapters = Adapters(model, lora, targets, directory)
    if files is not None:
        adapters.load_files(files.directory)
    return adapters


@torch.no_grad()
def _freeze(model: nn.Module, dtype: torch.dtype, *, narrow: bool) -> None:
    """Takes gradients off all weights and rounds them to ``dtype``.

    narrow: whether linear layers are held in ``dtype``; all else stays float32.
    """
    model.requires_grad_(False)
    if dtype == torch.float32:
        return
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    if not narrow:
        return
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:  # the head may be tied
            module.weight.data = module.weight.data.to(dtype)


@contextmanager
def _standing_in(model: nn.Module, targets: Sequence[str]) -> Iterator[None]:
    """Lends weights without numbers some that take no memory, within a ``with`` block.

    peft puts an adapter where its layer's weight is, and on the meta device it would have no
    numbers either.
    """
    layers = [model.get_submodule(target) for target in targets]
    lent = [(layer, layer.weight) for layer in layers if layer.weight.is_meta]
    for layer, weight in lent:
        zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        layer.weight = nn.Parameter(zeros, requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in lent:
            layer.weight = weight


def _inject(model: nn.Module, lora: LoraSettings, targets: list[str], where: str) -> None:
    """Has peft put float32 adapters on the targets. Raises ConfigError without peft."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            "adapters need the library peft.",
            where=where,
            why=str(error),
            todo=install_command("gcore-language[lora]"),
        ) from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.use_rslora,
        target_modules=list(targets),
    )
    # a fixed seed makes the processes agree; the fork leaves the caller's random stream alone
    with torch.random.fork_rng(devices=[]), _standing_in(model, targets):
        torch.manual_seed(0)
        inject_adapter_in_model(config, model, adapter_name=_NAME)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # peft gives them the base's dtype
        elif f".{_FIRST}." in name or f".{_SECOND}." in name:
            raise ConfigError(f"peft left {name} frozen.", where=where)


def check_numbers(numbers: Mapping[str, Any], adapters: Adapters | None, directory: Path) -> None:
    """Raises DataError when a checkpoint's weights are of another kind than the trainer's.

    numbers: the checkpoint's.
    adapters: what this trainer trains; None: the weights themselves.
    """
    saved = numbers.get(NUMBERS)
    if (saved is None) == (adapters is None):
        if saved and adapters:
            adapters.check_base(saved["base"], str(directory))
            _check_shape(saved, adapters, directory)
        return
    kinds = ("an adapter", "whole weights")
    was, wanted = kinds if saved else kinds[::-1]
    raise DataError(
        f"this state is of {was}, and the trainer trains {wanted}.",
        where=str(directory),
        todo="Resume with the settings of lora that the run began with.",
    )


def _check_shape(saved: Mapping[str, Any], adapters: Adapters, directory: Path) -> None:
    if (saved["rank"], saved["scale"]) == (adapters.rank, adapters.scale):
        return
    raise DataError(
        f"this state is of an adapter of rank {saved['rank']} and scale {saved['scale']:g}; the "
        f"settings make rank {adapters.rank} and scale {adapters.scale:g}.",
        where=str(directory),
        todo="Resume with the settings of lora that the run began with.",
    )
