"""Computes a gradient a second time from micro-batches that are cut otherwise.

The gradient of an update is that of a sum over actions, divided by one number. So it depends
neither on the order of records nor on which of them share a micro-batch. A loss that divides by
what its micro-batch holds, a record that sees its neighbours, and dropout all show here. See
``LanguageTrainer._check_resplit``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.errors import TrainingError
from gcore_language.flat import GROWING_ROPES
from gcore_language.packing import Batch, counts_of
from gcore_language.ranks import Ranks

#: Columns that packing itself makes.
_PACKED = frozenset({"record", "group", "sample", "mask", "rollout_logp"})
#: Dtype of arithmetic -> how far apart two gradients of one minibatch may be, as the norm of their
#: difference over the norm of the first. Float32 in another order differs by some 1e-6.
TOLERANCES = {"float32": 1e-3, "bfloat16": 1e-1}
#: Norm of a gradient up to which a minibatch without advantages is not looked at. What is left is a
#: penalty: where the policy is still its reference that is rounding alone, which any cut changes.
PENALTY_NORM = 1e-2


@runtime_checkable
class ShowsGradient(Protocol):
    """An engine whose gradient can be looked at between ``accumulate`` and ``update``."""

    def gradient(self) -> dict[str, Tensor]:
        """Returns the accumulated gradient by name of its tensor; of a sharded one, its own part.

        The tensors stay as they are when the gradient is discarded and accumulated anew.
        """

    def set_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        """Puts back what ``gradient`` returned."""


def carry_columns(old: Sequence[Batch | None], new: Sequence[Batch | None]) -> None:
    """Gives new micro-batches of the same records the columns that the old ones got after packing.

    old, new: each record, named by ``Batch.index``, is in one batch of each.
    """
    parts: dict[str, dict[int, Tensor]] = {}
    for batch in filter(None, old):
        lengths = counts_of(batch.columns["record"], len(batch.index)).tolist()
        for name in batch.columns.keys() - _PACKED:
            columns = batch.columns[name].detach().split(lengths)
            parts.setdefault(name, {}).update(zip(batch.index.tolist(), columns, strict=True))
    for batch in filter(None, new):
        for name, column_of in parts.items():
            batch.columns[name] = torch.cat([column_of[place] for place in batch.index.tolist()])


def check_same(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    ranks: Ranks,
    tolerance: float,
    where: str,
    *,
    ignored: float = 0.0,
    config: Mapping[str, Any] | None = None,
) -> float:
    """Returns how far apart two gradients are: the norm of the difference over that of the first.

    Raises TrainingError, which names the tensor that differs most, where it is more than the
    tolerance, or where the second gradient alone is not finite. Where the first is not finite it
    returns NaN and raises nothing: the engine's update refuses such a gradient.

    first, second: this rank's parts, in one order of names on all ranks.
    ignored: nothing is raised where neither the first gradient nor the difference is longer.
    config: of the language model, for the error's advice; None: not known.
    """
    apart, size = _squares(first, second), _squares(first, {})
    sums = np.array(ranks.sum_parts([*apart.values(), *size.values()]), np.float64).reshape(2, -1)
    total_apart, total_size = np.sqrt(sums.sum(1))
    if not math.isfinite(total_size):
        return math.nan
    if not math.isfinite(total_apart):
        broken = list(apart)[int(np.isfinite(sums[0]).argmin())]
        raise TrainingError(
            "the gradient is not finite where its minibatch is cut otherwise",
            where=where,
            why=f"first in {broken}; the same records had a finite gradient in the micro-batches "
            "that are trained on",
            todo="look for a loss that divides by what its micro-batch holds, which may be 0",
            tensor=broken,
        )
    gap = float(total_apart / total_size) if total_size > 0 else float(total_apart > 0)
    if gap <= tolerance or max(total_apart, total_size) <= ignored:
        return gap
    worst = list(apart)[int(sums[0].argmax())]
    raise TrainingError(
        f"the gradient depends on how its minibatch is cut: {gap:.2g} of its norm, at most "
        f"{tolerance:g} is rounding",
        where=where,
        why=f"most in {worst}; the same records were computed twice, in other micro-batches",
        todo=growing_angles(config or {})
        or "look for a loss that divides by what its micro-batch holds, records that see their "
        "neighbours, dropout",
        tensor=worst,
        gap=gap,
    )


def growing_angles(config: Mapping[str, Any]) -> str:
    """Returns what to do where a model's angles depend on the texts beside; "" where they do not.

    transformers takes the angles of all tokens of a micro-batch by its longest record: longrope has
    two sets, for texts up to ``original_max_position_embeddings`` and for longer ones; those of
    dynamic change with each length beyond ``max_position_embeddings``.

    config: of the language model, as config.json has it.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in GROWING_ROPES:
        return ""
    name = "max_position_embeddings"
    if kind == "longrope":
        name = f"original_{name}"
    limit = rope.get(name) or config.get(name) or name
    return (
        f"rope_type is {kind}: transformers takes the angles of a whole micro-batch by its longest "
        f"record. Keep prompt and answer of all records within {limit} tokens ({name})"
        + (", or let every prompt be longer" if kind == "longrope" else "")
    )


def _squares(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the squared norm of first - second, by tensor; what second lacks counts as 0."""
    squares = {}
    for name, tensor in first.items():
        values = _local(tensor)
        if name in second:
            values = values - _local(second[name])
        squares[name] = float(values.double().square().sum())
    return squares


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
