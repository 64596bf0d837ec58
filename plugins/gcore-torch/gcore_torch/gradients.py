"""Adds up the gradients of an update's micro-batches so that their order leaves no trace.

PlainGradients   as torch adds them: each backward pass adds to ``grad``
SplitGradients   the same over ranks of which some split the layers
SpreadGradients  the same over ranks that the experts of a layer are spread over
ExactGradients   exact sums on one rank
ShardedExactGradients   exact sums over the ranks that share a model by FSDP2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from gcore_language.cuts import copies_of
from gcore_language.exact_sums import ExactSum, exact_norm
from gcore_language.ranks import Ranks
from gcore_language.weights import full
from torch import Tensor, nn

from gcore_core.contract.errors import ConfigError


class Gradients(Protocol):
    """The gradient of an update, summed over its micro-batches and ranks."""

    def passed(self, *, last: bool) -> None:
        """Takes the gradient of a micro-batch, right after its backward pass.

        last: whether it is this update's last one; then ``grad`` of each parameter becomes its part
            of the sum.
        """

    def expect(self, *, last: bool) -> None:
        """Is called before each backward pass; see ``passed``."""

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """Returns the norm of the sum. gradients: ``grad`` of all parameters that have one."""

    @property
    def scale(self) -> float:
        """Number by which ``grad`` must be multiplied to be the sum."""

    def discard(self) -> None:
        """Forgets what was added since the last update."""


class PlainGradients:
    """Adds gradients as torch and FSDP2 do."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @property
    def scale(self) -> float:
        # FSDP2 has averaged gradients over the ranks, but an engine has to sum them
        return float(self._ranks.count)

    def expect(self, *, last: bool) -> None:
        pass

    def passed(self, *, last: bool) -> None:
        pass

    def norm(self, gradients: Sequence[Tensor]) -> float:
        return self.scale * float(full(torch.nn.utils.get_total_norm(gradients)))

    def discard(self) -> None:
        pass


class SplitGradients(PlainGradients):
    """Adds gradients as torch does, where ranks of a tensor group split the layers.

    FSDP2 averages over the ranks that have other records. What a tensor group holds whole has the
    same gradient on each of its ranks.

    records: see ``Mesh.records``.
    """

    def __init__(self, ranks: Ranks, records: int) -> None:
        super().__init__(ranks)
        self._records = records

    @property
    def scale(self) -> float:
        return float(self._records)

    def norm(self, gradients: Sequence[Tensor]) -> float:
        squares = 0.0
        for gradient in gradients:
            local = gradient.to_local()
            squares += float(local.double().square().sum()) / copies_of(gradient, self._ranks.count)
        return self.scale * math.sqrt(self._ranks.sum_parts([squares])[0])


class SpreadGradients(SplitGradients):
    """Adds gradients as torch does, where experts are spread over groups of ranks.

    An expert's gradient is the sum over the tokens of its whole group, and FSDP2 averages it over
    the groups; everything else's is averaged over all ranks. So an expert's is divided by the size
    of a group, once for each update.

    experts: the weights of the experts that this rank holds.
    size: number of ranks of a group.
    """

    def __init__(self, ranks: Ranks, experts: Sequence[Tensor], size: int) -> None:
        super().__init__(ranks, ranks.count)
        self._experts = experts
        self._size = size

    def passed(self, *, last: bool) -> None:
        gradients = [expert.grad for expert in self._experts if expert.grad is not None]
        if last and gradients:
            torch._foreach_mul_(gradients, 1 / self._size)


def by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors in groups that lie on one mesh each.

    An operator of torch that takes many tensors takes those of one mesh.
    """
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


class ExactGradients:
    """Adds the gradients of micro-batches exactly; for a single rank.

    Each backward pass finds no gradient and leaves its own, which is taken away and added.
    """

    scale = 1.0

    def __init__(self, parameters: Sequence[Tensor], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._sum: ExactSum | None = None
        self._used = [False] * len(parameters)  # parameters that got a gradient in this update

    def expect(self, *, last: bool) -> None:
        pass

    def passed(self, *, last: bool) -> None:
        """Adds the gradients of all parameters, as one vector, and sets each ``grad`` to None.

        After the last pass each ``grad`` is its part of the sum; it stays None where no pass of the
        update used the parameter.
        """
        parameters = self._parameters
        gradients = [p.grad for p in parameters]
        self._used = [u or g is not None for u, g in zip(self._used, gradients, strict=True)]
        parts = [
            (torch.zeros_like(p) if g is None else g).flatten()
            for p, g in zip(parameters, gradients, strict=True)
        ]
        vector = torch.cat(parts)
        if self._sum is None:
            self._sum = ExactSum(len(vector), vector.device)
        self._sum.add(vector)
        totals: list[Tensor | None] = [None] * len(parameters)
        if last:
            sizes = [p.numel() for p in parameters]
            totals = [
                part.view_as(p) if used else None
                for part, p, used in zip(
                    self._sum.take().split(sizes), parameters, self._used, strict=True
                )
            ]
            self._used = [False] * len(parameters)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total

    def norm(self, gradients: Sequence[Tensor]) -> float:
        return exact_norm(gradients, self._ranks)

    def discard(self) -> None:
        if self._sum is not None:
            self._sum.clear()


class ShardedExactGradients:
    """Adds the gradients of micro-batches and ranks exactly, each rank its own rows.

    It takes the place of FSDP2's reduce-scatter: ranks swap the parts of their gradients, and each
    adds what it gets, unrounded by any addition before, to its own exact sum. The bytes that are
    sent are those of a reduce-scatter.
    """

    scale = 1.0

    def __init__(self, policy: nn.Module, ranks: Ranks, role: str) -> None:
        self._ranks = ranks
        self._swaps: list[_SwapAndAdd] = []
        for module in policy.modules():
            if not hasattr(module, "set_requires_gradient_sync"):
                continue
            if not hasattr(module, "set_custom_reduce_scatter"):
                raise ConfigError(
                    "a deterministic run on several slots needs a newer torch.",
                    where=f"roles.{role}.slots",
                    why=f"torch {torch.__version__} lets nobody replace the sums of FSDP2.",
                    todo="Install torch 2.9 or newer, or set slots: 1.",
                )
            swap = _SwapAndAdd()
            module.set_custom_reduce_scatter(swap)
            self._swaps.append(swap)

    def expect(self, *, last: bool) -> None:
        for swap in self._swaps:
            swap.last = last

    def passed(self, *, last: bool) -> None:
        pass

    def norm(self, gradients: Sequence[Tensor]) -> float:
        return exact_norm([gradient.to_local() for gradient in gradients], self._ranks)

    def discard(self) -> None:
        for swap in self._swaps:
            swap.discard()


class _SwapAndAdd:
    """A reduce-scatter for FSDP2 that adds exactly, over all backward passes of an update.

    It gives zeros, which FSDP2 adds to ``grad``, until the last pass; then it gives the sum.

    last: whether the next pass is the update's last one.
    """

    def __init__(self) -> None:
        self.last = False
        self._sum: ExactSum | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Swaps and adds.

        input_tensor: float32[ranks * n], this rank's gradient, first the rows of rank 0.
        output_tensor: float32[n], this rank's rows of the result.
        """
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        if self._sum is None:
            self._sum = ExactSum(len(output_tensor), output_tensor.device)
        for part in received.view(-1, len(output_tensor)):
            self._sum.add(part)
        if self.last:
            output_tensor.copy_(self._sum.take())
        else:
            output_tensor.zero_()

    def discard(self) -> None:
        if self._sum is not None:
            self._sum.clear()
