"""Names the weights of experts as a checkpoint does.

transformers holds the experts of a layer in two tensors, gate_up_proj[E, 2 I, D] and
down_proj[E, D, I]. Checkpoints, and engines that read them, have three matrices for each expert:

    qwen3_moe   model.layers.0.mlp.experts.3.{gate_proj,up_proj,down_proj}.weight
    mixtral     model.layers.0.block_sparse_moe.experts.3.{w1,w3,w2}.weight

What is pushed and saved has the names of the checkpoint. Every piece is a view of the tensor that
transformers holds, so it costs no memory, and what is written into it is written into the model.

Legend of shapes: E experts, I inner size of an expert, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gcore_core.contract.errors import ConfigError
from gcore_language.weights import full, named_tensors

_GATE_UP = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Says how a family's checkpoints name the parts of a layer of experts.

    block: the module of a layer that holds router and experts.
    gate, up, down: the matrices of one expert.
    """

    block: str
    gate: str
    up: str
    down: str


#: ``config.model_type`` -> names of its checkpoints.
FAMILIES = {
    "qwen3_moe": ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    "mixtral": ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
}


def expert_names(config: Any) -> ExpertNames | None:
    """Returns how a model's checkpoints name its experts; None for a model without any."""
    return FAMILIES.get(getattr(config, "model_type", ""))


@dataclass(frozen=True)
class _Piece:
    """A tensor of a checkpoint: a part of one that transformers holds.

    source: the name of that one.
    part: makes the part of it.
    """

    source: str
    part: Callable[[Tensor], Tensor]


def _pieces(name: str, tensor: Tensor, names: ExpertNames) -> Iterator[tuple[str, _Piece]]:
    """Yields the name and place of every tensor of a checkpoint that lies in this one."""
    renamed = name.replace(".mlp.", f".{names.block}.")
    if renamed.endswith(_DOWN):
        stem = renamed.removesuffix("down_proj")
        for expert in range(tensor.shape[0]):
            piece = _Piece(name, lambda whole, e=expert: whole[e])  # type: ignore[misc]
            yield f"{stem}{expert}.{names.down}.weight", piece
    elif renamed.endswith(_GATE_UP):
        stem = renamed.removesuffix("gate_up_proj")
        inner = tensor.shape[1] // 2
        for expert in range(tensor.shape[0]):
            for matrix, rows in ((names.gate, slice(inner)), (names.up, slice(inner, None))):
                piece = _Piece(name, lambda whole, e=expert, r=rows: whole[e, r])  # type: ignore[misc]
                yield f"{stem}{expert}.{matrix}.weight", piece
    else:
        yield renamed, _Piece(name, lambda whole: whole)


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a model under the names of its checkpoint, as views of what it holds now.

    A view is made when it is asked for, so it is right also after the model's tensors have been
    moved. Of sharded tensors the whole is made for each piece anew: use ``cut`` where all are
    wanted.

    held: name of transformers -> tensor.
    """

    def __init__(self, held: Mapping[str, Tensor], names: ExpertNames) -> None:
        self._held = held
        self._pieces = {
            name: piece
            for source, tensor in held.items()
            for name, piece in _pieces(source, tensor, names)
        }

    def __getitem__(self, name: str) -> Tensor:
        piece = self._pieces[name]
        return piece.part(full(self._held[piece.source]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def checkpoint_tensors(model: Any) -> Mapping[str, Tensor]:
    """Returns a model's tensors under the names of its checkpoint; tied ones once."""
    held = named_tensors(model)
    names = expert_names(model.config)
    return held if names is None else CheckpointTensors(held, names)


def cut(name: str, whole: Tensor, names: ExpertNames | None) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a checkpoint that lie in one of transformers, with their names.

    whole: not sharded.
    names: of the model's family; None: the tensor is one of the checkpoint.
    """
    if names is None:
        yield name, whole
        return
    for own, piece in _pieces(name, whole, names):
        yield own, piece.part(whole)


def refuse_experts(config: Any, role: str) -> None:
    """Raises ConfigError for a mixture of experts, in a trainer that has none.

    config: of a Hugging Face model.
    """
    if expert_names(config) is not None:
        raise ConfigError(
            f"this trainer has no experts, and the model is a {config.model_type}.",
            where=f"roles.{role}.use",
            todo="Take the trainer torch or megatron.",
        )
