"""Hugging Face tensors to Megatron-Core's parameters and back, one tensor at a time.

Both sides differ in three ways. Megatron-Core fuses: query, key and value of a group of heads lie
one after the other in ``linear_qkv``, gate and up in ``linear_fc1``. It splits: a tensor-parallel
rank holds some rows or columns of a matrix, a pipeline stage some layers, counted from its own
first. And it fills up the vocabulary.

So a Hugging Face tensor is a slice of rows or columns on each tensor-parallel rank of one stage (of
two for tied embeddings), and the slice lies in a *window*, a view of one parameter. Loading copies
slices into windows; exporting gathers windows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gcore_language.model_files import ModelFiles
from safetensors import safe_open
from torch import Tensor

from gcore_core.contract.errors import DataError
from gcore_megatron.library import parallel_state
from gcore_megatron.model import Architecture

Window = Callable[[Tensor], Tensor]


def _whole(parameter: Tensor) -> Tensor:
    return parameter


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A Hugging Face tensor and where its slices lie.

    parameters: stage -> name of the parameter there; the first one is exported. split: the
    dimension that the tensor-parallel ranks share, None when each has all. filled: size of that
    dimension, with what fills it up.
    """

    name: str
    parameters: Mapping[int, str]
    shape: tuple[int, ...]
    split: int | None = None
    window: Window = _whole
    filled: int = 0

    def slice_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's slice."""
        if self.split is None:
            return self.shape
        own = (self.filled or self.shape[self.split]) // ranks
        return (*self.shape[: self.split], own, *self.shape[self.split + 1 :])


def pieces(model: Architecture, tensor_parallel: int, stages: int) -> list[Piece]:
    """All tensors of the model, in an order that every rank shares."""
    last, per_stage = stages - 1, model.layers // stages

    def of_vocabulary(name: str, parameters: Mapping[int, str]) -> Piece:
        shape = (model.vocabulary, model.hidden)
        return Piece(
            name=name,
            parameters=parameters,
            shape=shape,
            split=0,
            filled=model.rows(tensor_parallel),
        )

    embedding = {0: "embedding.word_embeddings.weight"}
    if model.tied and stages > 1:
        embedding[last] = "output_layer.weight"
    found = [of_vocabulary("model.embed_tokens.weight", embedding)]
    for layer in range(model.layers):
        found += _layer(model, layer, *divmod(layer, per_stage))
    final = {last: "decoder.final_layernorm.weight"}
    found.append(Piece(name="model.norm.weight", parameters=final, shape=(model.hidden,)))
    if not model.tied:
        found.append(of_vocabulary("lm_head.weight", {last: "output_layer.weight"}))
    return found


def _layer(model: Architecture, layer: int, stage: int, own: int) -> Iterator[Piece]:
    """The tensors of a layer that is number ``own`` of its stage."""

    def piece(
        name: str,
        parameter: str,
        shape: tuple[int, ...],
        split: int | None = None,
        window: Window = _whole,
    ) -> Piece:
        parameters = {stage: f"decoder.layers.{own}.{parameter}"}
        return Piece(
            name=f"model.layers.{layer}.{name}",
            parameters=parameters,
            shape=shape,
            split=split,
            window=window,
        )

    hidden, size, feed_forward = model.hidden, model.head_size, model.feed_forward
    group = model.query_heads // model.kv_heads  # query heads for each key-value head
    spans = {"q": (0, group), "k": (group, group + 1), "v": (group + 1, group + 2)}
    for part, (start, stop) in spans.items():
        width = model.kv_heads * (stop - start) * size
        window = _heads((group + 2) * size, start * size, stop * size)
        yield piece(
            f"self_attn.{part}_proj.weight",
            "self_attention.linear_qkv.weight",
            (width, hidden),
            0,
            window,
        )
        if model.qkv_bias:
            yield piece(
                f"self_attn.{part}_proj.bias", "self_attention.linear_qkv.bias", (width,), 0, window
            )
    width = model.query_heads * size
    yield piece("self_attn.o_proj.weight", "self_attention.linear_proj.weight", (hidden, width), 1)
    if model.head_norm:
        yield piece("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", (size,))
        yield piece("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", (size,))
    yield piece(
        "mlp.gate_proj.weight", "mlp.linear_fc1.weight", (feed_forward, hidden), 0, _half(0)
    )
    yield piece("mlp.up_proj.weight", "mlp.linear_fc1.weight", (feed_forward, hidden), 0, _half(1))
    yield piece("mlp.down_proj.weight", "mlp.linear_fc2.weight", (hidden, feed_forward), 1)
    yield piece("input_layernorm.weight", "input_layernorm.weight", (hidden,))
    yield piece("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", (hidden,))


def _heads(width: int, start: int, stop: int) -> Window:
    """Rows ``start`` to ``stop`` of every ``width`` rows."""
    return lambda parameter: parameter.view(-1, width, *parameter.shape[1:])[:, start:stop]


def _half(which: int) -> Window:
    return lambda parameter: parameter.view(2, -1, *parameter.shape[1:])[which]


# -- loading ---------------------------------------------------------------------------------------


def check(files: ModelFiles, found: Sequence[Piece]) -> None:
    """Raises DataError unless a model directory holds these tensors and no others."""
    expected, where = {piece.name: piece.shape for piece in found}, str(files.directory)
    for name in sorted(expected.keys() | files.shapes.keys()):
        if name not in files.shapes:
            raise DataError(f"model directory lacks {name}.", where=where)
        if name not in expected:
            raise DataError(
                f"model directory holds {name}, for which its config has no use.", where=where
            )
        if files.shapes[name] != expected[name]:
            raise DataError(
                f"{name} has shape {files.shapes[name]}, its config says {expected[name]}.",
                where=where,
            )


@torch.no_grad()
def load(directory: Path, found: Sequence[Piece], parameters: Mapping[str, Tensor]) -> None:
    """Fills this rank's parameters from a directory that was checked; reads what it needs of each
    tensor.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    with contextlib.ExitStack() as stack:
        files = _open(directory, stack)
        for piece in found:
            if stage not in piece.parameters:
                continue
            stored = files[piece.name].get_slice(piece.name)
            window = piece.window(parameters[piece.parameters[stage]])
            window.copy_(slice_of(stored, piece, rank, ranks).reshape(window.shape))


def slice_of(stored: Any, piece: Piece, rank: int, ranks: int) -> Tensor:
    """One rank's slice of a whole tensor, or of one that is stored; what fills it up is zero."""
    shape = piece.slice_shape(ranks)
    if piece.split is None:
        return stored[:]
    size, whole = shape[piece.split], piece.shape[piece.split]
    start, stop = min(rank * size, whole), min((rank + 1) * size, whole)
    part: Tensor = stored[start:stop] if piece.split == 0 else stored[:, start:stop]
    if stop - start == size:
        return part
    filled = part.new_zeros(shape)
    filled[: stop - start] = part
    return filled


def _open(directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Tensor name -> open file that holds it."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [directory / name for name in names]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    files = {}
    for path in paths:
        file = stack.enter_context(safe_open(path, "pt"))
        files.update(dict.fromkeys(file.keys(), file))
    return files


# -- exporting -------------------------------------------------------------------------------------


@torch.no_grad()
def gather(
    found: Sequence[Piece], parameter: Callable[[str], Tensor], like: Tensor
) -> Iterator[tuple[Piece, Tensor | None]]:
    """Whole tensors, one at a time, on global rank 0, and None on the others. All ranks iterate
    alike.

    ``parameter`` gives this rank's part by the parameter's name, on all replicas at once; dtype and
    device as ``like``.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    # one replica's first context-parallel rank has everything
    takes_part = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    first_of_stage = parallel_state.get_tensor_model_parallel_rank() == 0
    for piece in found:
        owner, name = next(iter(piece.parameters.items()))
        held = parameter(name) if stage == owner else None
        whole = None
        if takes_part and held is not None:
            whole = _join(piece, piece.window(held))
            if owner and first_of_stage:
                dist.send(whole, 0, group=parallel_state.get_pipeline_model_parallel_group())
                whole = None
        elif takes_part and stage == 0 and first_of_stage:
            whole = like.new_empty(piece.shape)
            source = parallel_state.get_pipeline_model_parallel_group()
            dist.recv(whole, dist.get_global_rank(source, owner), group=source)
        yield piece, whole if dist.get_rank() == 0 else None


def _join(piece: Piece, window: Tensor) -> Tensor:
    """The slices of a stage's tensor-parallel ranks, put together and without what fills them
    up.
    """
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    own = window.detach().reshape(piece.slice_shape(ranks)).contiguous()
    if piece.split is None:
        return own
    slices = [own]
    if ranks > 1:
        slices = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(slices, own, group=parallel_state.get_tensor_model_parallel_group())
    return (
        torch.cat(slices, piece.split).narrow(piece.split, 0, piece.shape[piece.split]).contiguous()
    )
