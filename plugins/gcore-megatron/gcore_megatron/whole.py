"""Saves a trainer's state as whole tensors in Hugging Face layout, which every trainer loads.

The format is that of ``gcore_language.state_files``. Moments are gathered and split by ``convert``,
as weights are. Where AdamW's state is distributed over the replicas, each replica has a span of
every flattened parameter, or nothing of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gcore_language.agreed_saves import agreed
from gcore_language.ranks import Ranks
from gcore_language.state_files import MOMENTS, load_numbers, load_parts, save_state, take_steps
from torch import Tensor

from gcore_core.contract.errors import CheckpointError
from gcore_megatron import convert
from gcore_megatron.checkpoint import PendingSave
from gcore_megatron.library import parallel_state
from gcore_megatron.model import is_of_expert


class OptimizerState:
    """Float32 weights and AdamW's moments of Megatron-Core's optimizers.

    They are addressed by the names of the model's parameters.

    optimizers: of the model; where there are two, the second is that of the experts.
    like: an empty float32 tensor on the parameters' device.
    """

    def __init__(self, optimizers: Sequence[Any], parameters: Mapping[str, Tensor]) -> None:
        self._inner = [optimizer.optimizer for optimizer in optimizers]
        self._parameters = parameters
        # name -> the replicas that the state is distributed over; None when each has all of it
        self._replicas: dict[str, Any] = {}
        self.like = next(iter(parameters.values())).new_empty(0, dtype=torch.float32)
        # name -> (this rank's span of the flattened parameter, the float32 weights of that span,
        # the optimizer that updates them)
        self._shards: dict[str, tuple[slice, Tensor, Any]] = {}
        for name, parameter in parameters.items():
            optimizer = optimizers[-1 if is_of_expert(name) else 0]
            inner = optimizer.optimizer
            self._replicas[name] = getattr(optimizer, "data_parallel_group", None)
            if self._replicas[name] is None:
                # with a model in bfloat16 the optimizer updates a float32 copy
                main = getattr(parameter, "main_param", parameter)
                self._shards[name] = slice(0, parameter.numel()), main, inner
            elif parameter in optimizer.model_param_group_index_map:
                group, place = optimizer.model_param_group_index_map[parameter]
                span = optimizer._get_model_param_range_map(parameter)["param"]
                self._shards[name] = (
                    slice(span.start, span.end),
                    inner.param_groups[group]["params"][place],
                    inner,
                )

    @property
    def steps(self) -> int:
        """How many steps AdamW has made; 0 on a replica that holds none of the state."""
        counts = []
        for inner in self._inner:
            counts += [state["step"] for state in inner.state.values() if "step" in state]
            # fused optimizers count once for each parameter group
            counts += [group["step"] for group in inner.param_groups if "step" in group]
        return max(map(int, counts), default=0)

    def reset(self, steps: int) -> None:
        """Makes moments of zeros that count this many steps; for 0 that is a new optimizer."""
        for inner in self._inner:
            counts_apart = isinstance(inner, torch.optim.AdamW)
            for group in inner.param_groups:
                if not counts_apart:
                    group["step"] = steps
                for main in group["params"]:
                    state = {moment: torch.zeros_like(main) for moment in MOMENTS}
                    inner.state[main] = state | (
                        {"step": torch.tensor(float(steps))} if counts_apart else {}
                    )

    @torch.no_grad()
    def whole(self, part: str, name: str) -> Tensor:
        """Returns a part of this rank's parameter, joined from the spans of all replicas.

        All replicas call it together. Each puts its span into zeros; the sum over them is whole.

        part: "weight", or the name of a moment.
        """
        parameter = self._parameters[name]
        joined = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        if name in self._shards:
            span, values = self._part(part, name)
            joined.view(-1)[span] = values
        if self._replicas[name] is not None:
            dist.all_reduce(joined, group=self._replicas[name])
        return joined

    @torch.no_grad()
    def set(self, part: str, name: str, window: convert.Window, values: Tensor) -> None:
        """Puts values into a window of this rank's parameter.

        Only the span that this replica holds is changed. For weights the model's parameter is set
        as well.

        part: "weight", or the name of a moment.
        """
        parameter = self._parameters[name]
        values = values.to(parameter.device).reshape(window(parameter).shape)
        if name in self._shards:
            span, shard = self._part(part, name)
            # A window is a view of a whole parameter, but shard is a flat span of one: spread the
            # span over a whole parameter, set the window in it, and copy the span back.
            scratch = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            flat = scratch.view(-1)[span]
            flat.copy_(shard)
            window(scratch).copy_(values)
            shard.copy_(flat)
        if part == "weight":
            window(parameter).copy_(values)

    def _part(self, part: str, name: str) -> tuple[slice, Tensor]:
        span, main, inner = self._shards[name]
        values: Tensor = main if part == "weight" else inner.state[main][part]
        return span, values.detach().view(-1)


def save_whole(
    directory: Path,
    pieces: Sequence[convert.Piece],
    state: OptimizerState,
    numbers: Mapping[str, Any],
    ranks: Ranks,
) -> PendingSave:
    """Saves the state at once: rank 0 writes one tensor at a time.

    Every rank calls it. When rank 0 could not write, ``wait`` of what it returns raises
    CheckpointError on every rank.
    """
    steps = int(ranks.max([state.steps])[0])  # a replica may hold nothing
    counted = {piece.name: float(steps) for piece in pieces} if steps else {}
    parts = _parts(pieces, state, ("weight", *MOMENTS) if steps else ("weight",))
    failed: list[CheckpointError] = []
    try:
        with agreed(ranks, directory):
            save_state(
                directory, parts, {**numbers, "optimizer_steps": counted}, writes=ranks.rank == 0
            )
    except CheckpointError as error:
        failed.append(error)

    def finish() -> None:
        if failed:
            raise failed[0]

    return PendingSave(finish)


def _parts(
    pieces: Sequence[convert.Piece], state: OptimizerState, parts: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields ("part/name", whole tensor) on rank 0, one tensor at a time.

    The other ranks must iterate as well, and get nothing.
    """
    for part in parts:
        # Several pieces may lie in one parameter, and they come near each other: with the cache
        # each parameter is joined once.
        parameter = functools.lru_cache(maxsize=2)(functools.partial(state.whole, part))
        for piece, whole in convert.gather(pieces, parameter, state.like):
            if whole is not None:
                yield f"{part}/{piece.name}", whole


def load_whole(
    directory: Path, pieces: Sequence[convert.Piece], state: OptimizerState
) -> dict[str, Any]:
    """Loads a state that any trainer has saved; returns its numbers. Every rank reads all tensors.

    Raises DataError when the state is damaged or of another model.
    """
    numbers = load_numbers(directory)
    state.reset(take_steps(numbers, directory))
    places = {piece.name: piece for piece in pieces}
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    for part, name, whole in load_parts(directory, {piece.name: piece.shape for piece in pieces}):
        piece = places[name]
        parameter = piece.parameter_here()
        if parameter is not None:
            values = convert.slice_of(whole, piece, rank, ranks)
            state.set(part, parameter, piece.window, values)
    return numbers
