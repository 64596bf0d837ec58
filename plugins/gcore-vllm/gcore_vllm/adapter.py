"""Checks a LoRA adapter in peft's layout before vLLM loads it.

vLLM itself takes an adapter of a smaller model in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import DataError

#: Sizes of vLLM's buffers for adapters (its ``max_lora_rank``).
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter that fits the model (Hu et al., 2021).

    directory: where it lies.
    max_rank: the smallest of vLLM's buffers that holds all of its ranks.
    """

    directory: Path
    max_rank: int

    def request(self) -> Any:
        """Returns what names the adapter in a request to vLLM."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, str(self.directory))


def open_adapter(path: str, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    """Opens the adapter in a directory.

    Raises DataError unless the directory holds a whole adapter for the model with these tensors.

    shapes: name -> shape of the model's tensors.
    """
    directory = Path(path).resolve()
    if not directory.is_dir():
        raise DataError(
            "adapter directory does not exist.", where=path, todo="Correct config.lora_path."
        )
    rank = _largest_rank(directory / "adapter_config.json")
    if rank > _RANKS[-1]:
        raise DataError(
            f"adapter has rank {rank}, vLLM takes {_RANKS[-1]} at most.", where=str(directory)
        )
    _check_tensors(directory / "adapter_model.safetensors", shapes)
    return Adapter(directory=directory, max_rank=room_for(rank))


def room_for(rank: int) -> int:
    """Returns the smallest of vLLM's buffers that holds a rank."""
    return next(room for room in _RANKS if room >= rank)


def _largest_rank(file: Path) -> int:
    """Returns the largest rank in an adapter's config.

    Raises DataError when it cannot be read or is not of a LoRA adapter.
    """
    if not file.is_file():
        raise DataError(
            f"adapter directory has no {file.name}.",
            where=str(file.parent),
            todo="Save the adapter with peft: model.save_pretrained(directory).",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config["peft_type"]
        ranks = [int(rank) for rank in (config["r"], *(config.get("rank_pattern") or {}).values())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            "adapter config is not readable.", where=str(file), why=repr(error)
        ) from error
    if kind != "LORA" or min(ranks) < 1:
        raise DataError(
            "vLLM does not support this adapter.",
            where=str(file),
            why=f"peft_type {kind!r}, ranks {ranks}.",
        )
    return max(ranks)


def _check_tensors(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises DataError unless every pair of the adapter's matrices fits a matrix of the model.

    A (rank x inputs) and B (outputs x rank) fit a matrix of outputs x inputs.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise DataError(f"adapter directory has no {file.name}.", where=str(file.parent))
    try:
        with safe_open(file, framework="np") as opened:
            names = opened.keys()  # it cannot be iterated over itself
            tensor_shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise DataError(
            "adapter is damaged or half written.", where=str(file), why=str(error)
        ) from error
    for name, shape in tensor_shapes.items():
        module, _, half = name.removeprefix("base_model.model.").rpartition(".lora_")
        if half not in ("A.weight", "B.weight") or ".experts" in module:
            # vLLM refuses other tensors by itself. Experts have other names in a checkpoint, so
            # their matrices are not found here.
            continue
        base = shapes.get(f"{module}.weight")
        if base is None:
            raise DataError(
                f"adapter is for {module}, which the model does not have.", where=str(file)
            )
        adapter_size, model_size = (
            (shape[-1], base[-1]) if half == "A.weight" else (shape[0], base[0])
        )
        if adapter_size != model_size:
            raise DataError(
                (
                    f"adapter is of another model: {name} has {adapter_size} rows or columns where "
                    f"the model has {model_size}."
                ),
                where=str(file),
            )
