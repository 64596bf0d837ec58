"""Gives a model that was opened without its weights the rows that a rank holds of each tensor.

A sharded model has, of each tensor, the part of one rank: its rows, or of a matrix that a tensor
group splits some columns. They are read from the safetensors files one tensor at a time, so that no
rank ever holds a whole tensor. The files are mapped: their pages belong to the system's cache,
which gives them up when memory is short.

A tensor of the model is one of the files' tensors, or it is put together from several of them, as
the experts of a layer are: each expert has its own tensors in the files, and one row in the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gcore_language.cuts import Cut, cut_of
from gcore_language.image_requests import name_in_checkpoint
from gcore_language.model_files import tensors_in
from gcore_language.pretrained import refuse_not_finite
from gcore_language.weights import named_tensors

#: What a layer calls its experts' tensor -> (block of the files, tensors there of which a row, one
#: expert's, is made, from above): first as Qwen's models have it, then as Mixtral's.
_EXPERTS = {
    "gate_up_proj": (
        ("mlp", ("gate_proj.weight", "up_proj.weight")),
        ("block_sparse_moe", ("w1.weight", "w3.weight")),
    ),
    "down_proj": (("mlp", ("down_proj.weight",)), ("block_sparse_moe", ("w2.weight",))),
}
#: How the model and Mixtral's files call the router of a layer.
_ROUTER = (".mlp.gate.", ".block_sparse_moe.gate.")
_OF_EXPERTS = re.compile(r"(?P<layer>.*\.)mlp\.experts\.(?P<what>gate_up_proj|down_proj)$")


def tensors_in_files(model: Any) -> dict[str, Tensor]:
    """Returns a model's tensors by their names in its files, a tied one under its first name.

    peft renames the weights of layers that it gives an adapter; here they have their old names.
    """
    return {
        name.replace(".base_layer.", "."): tensor for name, tensor in named_tensors(model).items()
    }


def empty_tensors(model: Any) -> dict[str, Tensor]:
    """Returns the tensors of ``tensors_in_files`` that have no numbers yet: on the meta device."""
    return {name: tensor for name, tensor in tensors_in_files(model).items() if tensor.is_meta}


#: Reads a part of a tensor of the files, by its name there.
_Read = Callable[[str, Cut], Tensor]


@dataclass(frozen=True)
class _Alone:
    """A tensor that the files have as it is, under this name."""

    name: str

    def fill(self, local: Tensor, cut: Cut, read: _Read) -> None:
        local.copy_(read(self.name, cut))


@dataclass(frozen=True)
class _Experts:
    """A tensor of experts. rows: for each expert the names of what its row has, from above."""

    rows: Sequence[Sequence[str]]

    def fill(self, local: Tensor, cut: Cut, read: _Read) -> None:
        for row, names in zip(local, self.rows[cut[0]], strict=True):
            start = 0
            for name in names:
                part = read(name, (slice(None),))
                row[start : start + len(part)].copy_(part)
                start += len(part)


class OwnRows:
    """The tensors of a model directory, of which any rows can be read.

    directory: the model's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = tensors_in(directory)

    def lacks(self, model: Any) -> list[str]:
        """Returns the names of a model's ``empty_tensors`` that the files do not have."""
        return [
            name
            for name, tensor in empty_tensors(model).items()
            if self._source(name, tensor.shape) is None
        ]

    @torch.no_grad()
    def fill(
        self,
        tensors: Mapping[str, Tensor],
        rounding: torch.dtype = torch.float32,
    ) -> None:
        """Reads this rank's part of each tensor; they must not be among those that are lacking.

        Raises DataError for a weight that is not finite.

        tensors: name in the model -> tensor, of which a rank holds what ``cut_of`` says. Experts
            are cut by rows alone.
        rounding: dtype to which numbers are rounded before they take the tensor's.
        """
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def read(name: str, cut: Cut) -> Tensor:
                file = self._files[name].file
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(file, "pt"))
                found: Tensor = opened[file].get_slice(name)[cut]
                return found if rounding == torch.float32 else found.to(rounding)

            for name, tensor in tensors.items():
                source = self._source(name, tensor.shape)
                if source is None:
                    raise KeyError(name)
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if local.numel():
                    source.fill(local, cut_of(tensor), read)
                    refuse_not_finite([(name, local)], self._directory)

    def _source(self, name: str, shape: Sequence[int]) -> _Alone | _Experts | None:
        """Returns where the files have a tensor; None when they do not have it in that shape."""
        if not shape:
            return None
        for other in (name, name_in_checkpoint(name), name.replace(*_ROUTER)):
            if other in self._files and self._files[other].shape == tuple(shape):
                return _Alone(other)
        match = _OF_EXPERTS.match(name)
        if match is None:
            return None
        for block, parts in _EXPERTS[match["what"]]:
            rows = [
                [f"{match['layer']}{block}.experts.{expert}.{part}" for part in parts]
                for expert in range(shape[0])
            ]
            if all(self._fits(row, shape[1:]) for row in rows):
                return _Experts(rows)
        return None

    def _fits(self, names: Sequence[str], shape: Sequence[int]) -> bool:
        """Returns whether the files have these tensors, which together have the shape of a row."""
        if not all(name in self._files for name in names):
            return False
        shapes = [self._files[name].shape for name in names]
        height = sum(each[0] for each in shapes)
        return height == shape[0] and all(each[1:] == tuple(shape[1:]) for each in shapes)
