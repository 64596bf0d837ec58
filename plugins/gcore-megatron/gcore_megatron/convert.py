"""Converts Hugging Face tensors to Megatron-Core's parameters and back, one tensor at a time.

The two sides differ in three ways:

- Megatron-Core fuses tensors. Query, key and value of a group of heads lie one after the other in
  ``linear_qkv``, gate and up in ``linear_fc1``.
- It splits tensors. A tensor-parallel rank holds some rows or columns of a matrix, and a pipeline
  stage holds some layers, which are counted from its own first one.
- It pads the vocabulary.

So a Hugging Face tensor is a slice of rows or columns on each tensor-parallel rank of one stage (of
two stages for tied embeddings). The slice lies in a *window*, which is a view of one parameter.
Loading copies slices into windows; exporting gathers windows.
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
from gcore_language.pretrained import Differences, refuse_not_finite, refuse_two_embeddings
from gcore_language.values import SCORE
from safetensors import safe_open
from torch import Tensor

from gcore_megatron.library import parallel_state
from gcore_megatron.model import Architecture

Window = Callable[[Tensor], Tensor]


def _whole(parameter: Tensor) -> Tensor:
    """The window that is the whole parameter."""
    return parameter


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A Hugging Face tensor and where its slices lie.

    name: the Hugging Face name.
    parameters: stage -> name of the parameter on that stage; the first one is exported.
    shape: shape of the whole Hugging Face tensor.
    split: the dimension that is split over the tensor-parallel ranks; None when each rank has the
        whole tensor.
    window: the view of the parameter in which a rank's slice lies.
    filled: size of the split dimension with its padding; 0 without padding.
    holder: expert-parallel rank that alone has the tensor; None when each has it.
    """

    name: str
    parameters: Mapping[int, str]
    shape: tuple[int, ...]
    split: int | None = None
    window: Window = _whole
    filled: int = 0
    holder: int | None = None

    def parameter_here(self) -> str | None:
        """Returns the name of the parameter on this rank; None where it has no part of it."""
        if self.holder not in (None, parallel_state.get_expert_model_parallel_rank()):
            return None
        return self.parameters.get(parallel_state.get_pipeline_model_parallel_rank())

    def slice_shape(self, ranks: int) -> tuple[int, ...]:
        """Returns the shape of one rank's slice, padding included."""
        if self.split is None:
            return self.shape
        slice_size = (self.filled or self.shape[self.split]) // ranks
        return (*self.shape[: self.split], slice_size, *self.shape[self.split + 1 :])


def pieces(
    model: Architecture, tensor_parallel: int, stages: int, expert_parallel: int = 1
) -> list[Piece]:
    """Lists all tensors of the model, in the same order on every rank."""
    last = stages - 1
    per_stage = model.layers // stages

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
        embedding[last] = "output_layer.weight"  # the last stage has a copy of its own
    all_pieces = [of_vocabulary("model.embed_tokens.weight", embedding)]
    for layer in range(model.layers):
        stage, stage_layer = divmod(layer, per_stage)
        all_pieces += _layer(model, layer, stage, stage_layer)
        if layer in model.sparse_layers():
            all_pieces += _sparse(model, layer, stage, stage_layer, expert_parallel)
    final = {last: "decoder.final_layernorm.weight"}
    all_pieces.append(Piece(name="model.norm.weight", parameters=final, shape=(model.hidden,)))
    if model.values:
        head = {last: "output_layer.weight"}
        all_pieces.append(Piece(name=SCORE, parameters=head, shape=(1, model.hidden)))
    elif not model.tied:
        all_pieces.append(of_vocabulary("lm_head.weight", {last: "output_layer.weight"}))
    return all_pieces


def _sparse(
    model: Architecture, layer: int, stage: int, stage_layer: int, ranks: int
) -> Iterator[Piece]:
    """Yields router and experts of one layer.

    stage_layer: number of the layer in its stage.
    ranks: over how many ranks the experts are spread.
    """
    experts = model.experts
    if experts is None:
        raise RuntimeError(f"layer {layer} has no experts")
    names = experts.names
    block = f"decoder.layers.{stage_layer}.mlp"
    stem = f"model.layers.{layer}.{names.block}"
    yield Piece(
        name=f"{stem}.gate.weight",
        parameters={stage: f"{block}.router.weight"},
        shape=(experts.count, model.hidden),
    )
    wide = (experts.channels, model.hidden)
    own = experts.count // ranks
    for expert in range(experts.count):
        holder, place = divmod(expert, own)
        for matrix, parameter, shape, window in (
            (names.gate, "linear_fc1", wide, _half(0)),
            (names.up, "linear_fc1", wide, _half(1)),
            (names.down, "linear_fc2", wide[::-1], _whole),
        ):
            yield Piece(
                name=f"{stem}.experts.{expert}.{matrix}.weight",
                parameters={stage: f"{block}.experts.local_experts.{place}.{parameter}.weight"},
                shape=shape,
                window=window,
                holder=holder,
            )


def _layer(model: Architecture, layer: int, stage: int, stage_layer: int) -> Iterator[Piece]:
    """Yields the tensors of one layer, without those of experts.

    stage_layer: number of the layer in its stage.
    """

    def piece(
        name: str,
        parameter: str,
        shape: tuple[int, ...],
        split: int | None = None,
        window: Window = _whole,
    ) -> Piece:
        parameters = {stage: f"decoder.layers.{stage_layer}.{parameter}"}
        return Piece(
            name=f"model.layers.{layer}.{name}",
            parameters=parameters,
            shape=shape,
            split=split,
            window=window,
        )

    hidden = model.hidden
    size = model.head_size
    feed_forward = model.feed_forward
    group = model.query_heads // model.kv_heads  # query heads for each key-value head
    # in a group of linear_qkv's rows: where each part lies, counted in heads
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
    if layer not in model.sparse_layers():
        wide = (feed_forward, hidden)
        yield piece("mlp.gate_proj.weight", "mlp.linear_fc1.weight", wide, 0, _half(0))
        yield piece("mlp.up_proj.weight", "mlp.linear_fc1.weight", wide, 0, _half(1))
        yield piece("mlp.down_proj.weight", "mlp.linear_fc2.weight", (hidden, feed_forward), 1)
    yield piece("input_layernorm.weight", "input_layernorm.weight", (hidden,))
    yield piece("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", (hidden,))


def _heads(width: int, start: int, stop: int) -> Window:
    """Makes the window of rows ``start`` to ``stop`` of every ``width`` rows."""
    return lambda parameter: parameter.view(-1, width, *parameter.shape[1:])[:, start:stop]


def _half(which: int) -> Window:
    """Makes the window of the first or second half of the rows."""
    return lambda parameter: parameter.view(2, -1, *parameter.shape[1:])[which]


# -- loading ---------------------------------------------------------------------------------------


def check(files: ModelFiles, model_pieces: Sequence[Piece]) -> None:
    """Raises DataError unless a model directory holds these tensors, in these shapes, and no
    others.
    """
    expected = {piece.name: piece.shape for piece in model_pieces}
    Differences(
        missing=sorted(expected.keys() - files.shapes.keys()),
        unused=sorted(files.shapes.keys() - expected.keys()),
        reshaped=[
            (name, files.shapes[name], shape)
            for name, shape in sorted(expected.items())
            if files.shapes.get(name, shape) != shape
        ],
    ).refuse(files.directory)
    if "lm_head.weight" not in expected and SCORE not in expected:
        refuse_two_embeddings(files.directory, "model.embed_tokens.weight", "lm_head.weight")


@torch.no_grad()
def load(directory: Path, model_pieces: Sequence[Piece], parameters: Mapping[str, Tensor]) -> None:
    """Fills this rank's parameters from a model directory that ``check`` has accepted.

    It reads only this rank's slice of each tensor. Raises DataError for one that is not finite.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    with contextlib.ExitStack() as stack:
        files = _open(directory, stack)
        for piece in model_pieces:
            name = piece.parameter_here()
            if name is None:
                continue
            stored = files[piece.name].get_slice(piece.name)
            window = piece.window(parameters[name])
            part = slice_of(stored, piece, rank, ranks)
            refuse_not_finite([(piece.name, part)], directory)
            window.copy_(part.reshape(window.shape))


def slice_of(stored: Any, piece: Piece, rank: int, ranks: int) -> Tensor:
    """Returns one rank's slice of a whole tensor, with zeros as padding.

    stored: a tensor, or a slice object of safetensors, of which only the slice is read.
    """
    shape = piece.slice_shape(ranks)
    if piece.split is None:
        return stored[:]
    size = shape[piece.split]
    whole_size = piece.shape[piece.split]
    # the last ranks may hold padding in part, or nothing else
    start = min(rank * size, whole_size)
    stop = min((rank + 1) * size, whole_size)
    part: Tensor = stored[start:stop] if piece.split == 0 else stored[:, start:stop]
    if stop - start == size:
        return part
    filled = part.new_zeros(shape)
    filled[: stop - start] = part
    return filled


def _open(directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Opens a model's files until the stack closes; returns tensor name -> file that holds it."""
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
    model_pieces: Sequence[Piece], parameter: Callable[[str], Tensor], like: Tensor
) -> Iterator[tuple[Piece, Tensor | None]]:
    """Yields each tensor whole on global rank 0, and None on the other ranks.

    All ranks must iterate to the same point, because they send each other their slices. The ranks
    of the tensor's stage join their slices; the first of them sends the result to rank 0 unless it
    is on rank 0's stage. An expert comes from the first rank that holds it.

    parameter: parameter's name -> this rank's part; all replicas call it at once.
    like: a tensor with the dtype and device of the parts.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    # the first context-parallel rank of the first replica is enough, since the others hold the same
    takes_part = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    first_of_stage = parallel_state.get_tensor_model_parallel_rank() == 0
    for piece in model_pieces:
        if piece.holder is not None:
            yield piece, _expert(piece, piece.holder, parameter, like)
            continue
        owner, name = next(iter(piece.parameters.items()))
        part = parameter(name) if stage == owner else None
        whole = None
        if takes_part and part is not None:
            whole = _join(piece, piece.window(part))
            if owner and first_of_stage:
                dist.send(whole, 0, group=parallel_state.get_pipeline_model_parallel_group())
                whole = None
        elif takes_part and stage == 0 and first_of_stage:
            whole = like.new_empty(piece.shape)
            source = parallel_state.get_pipeline_model_parallel_group()
            dist.recv(whole, dist.get_global_rank(source, owner), group=source)
        yield piece, whole if dist.get_rank() == 0 else None


def _expert(
    piece: Piece, holder: int, parameter: Callable[[str], Tensor], like: Tensor
) -> Tensor | None:
    """Returns a tensor of an expert on global rank 0, as ``gather`` does; it is whole on a rank."""
    name = piece.parameter_here()
    part = None if name is None else piece.window(parameter(name)).detach().contiguous()
    if parallel_state.get_expert_data_parallel_rank() != 0:
        return None  # the first replica of the experts is enough
    rank = dist.get_rank()
    group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    source = ranks[_place(next(iter(piece.parameters)), holder, len(ranks))]
    if rank == source == 0:
        return part
    if rank == source and part is not None:
        dist.send(part, 0, group=group)
    if rank != 0:
        return None
    whole = like.new_empty(piece.shape)
    dist.recv(whole, source, group=group)
    return whole


def _place(stage: int, holder: int, ranks: int) -> int:
    """Returns where a stage's expert-parallel rank is among the ranks of one replica of the
    experts: stages vary slowest.
    """
    stages: int = parallel_state.get_pipeline_model_parallel_world_size()
    return holder + stage * (ranks // stages)


def _join(piece: Piece, window: Tensor) -> Tensor:
    """Joins the slices of a stage's tensor-parallel ranks and cuts off the padding.

    All tensor-parallel ranks of the stage call it together.
    """
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    own_slice = window.detach().reshape(piece.slice_shape(ranks)).contiguous()
    if piece.split is None:
        return own_slice
    slices = [own_slice]
    if ranks > 1:
        slices = [torch.empty_like(own_slice) for _ in range(ranks)]
        dist.all_gather(slices, own_slice, group=parallel_state.get_tensor_model_parallel_group())
    return (
        torch.cat(slices, piece.split).narrow(piece.split, 0, piece.shape[piece.split]).contiguous()
    )
