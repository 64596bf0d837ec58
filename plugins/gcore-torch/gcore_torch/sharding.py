"""Shards a model over ranks by FSDP2, and fills one that was opened without its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gcore_language.own_rows import OwnRows, empty_tensors, tensors_in_files
from gcore_language.policy import Policy
from torch import Tensor

from gcore_torch.expert_parallel import experts_of


def shard(
    policy: Policy,
    mesh: Any,
    blocks: Collection[str],
    rest: Any = None,
    offload: Any = None,
    experts: Any = None,
    *,
    exactly: bool = False,
) -> None:
    """Shards a policy over a mesh.

    mesh: see ``Mesh.of_layers``.
    blocks: names of classes. Each module of these classes is gathered by itself, the other
        parameters with the root.
    rest: see ``Mesh.of_rest``; None: as ``mesh``.
    offload: FSDP2's policy for parameters that lie elsewhere than on the device; None: none do.
    experts: see ``Mesh.of_same_experts``; None: they are shared out with their layer.
    exactly: whether gradients are added up exactly. Then both embeddings are gathered with the
        root.
    """
    from torch.distributed.fsdp import (
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    kept = OffloadPolicy() if offload is None else offload
    around = mesh if rest is None else rest
    if experts is not None:
        for module in experts_of(policy):
            fully_shard(module, mesh=experts, offload_policy=kept)
    for module in [m for m in policy.modules() if type(m).__name__ in blocks]:
        fully_shard(module, mesh=mesh, offload_policy=kept)
    embedding = None if exactly else _own_embedding(policy)
    if embedding is not None:
        fully_shard(embedding, mesh=around, offload_policy=kept)
        # the gradient of rows that were looked up needs none of them
        embedding.set_unshard_in_backward(False)
    fully_shard(policy, mesh=around, offload_policy=kept)
    register_fsdp_forward_method(policy, "trial")  # it need not go through the root's forward


def _own_embedding(policy: Policy) -> Any:
    """Returns the embedding of a model's input where that of its output is another; else None.

    A group of its own is gathered once in a pass, and its gradient is not whole at the same time as
    that of the output embedding. The latter stays with the root: ranks apply it to their actions
    chunk by chunk, and need not have equally many chunks.
    """
    embedding = policy.model.get_input_embeddings()
    head = policy.model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is head.weight:
        return None
    return embedding


def materialise(policy: Policy, rows: OwnRows, device: torch.device, rounding: torch.dtype) -> None:
    """Gives a sharded policy without weights its memory, and reads this rank's rows of them.

    Parameters that have numbers already keep them.

    device: where the rows lie.
    rounding: see ``OwnRows.fill``.
    """
    empty = empty_tensors(policy.model).keys()

    def allocated(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    policy._apply(allocated)
    tensors = tensors_in_files(policy.model)
    rows.fill({name: tensors[name] for name in empty}, rounding)


@contextmanager
def gathered_for_now(policy: Policy) -> Iterator[None]:
    """Lets a policy be tried within a ``with`` block, and frees afterwards what was gathered."""
    try:
        yield
    finally:
        free_gathered(policy)


def free_gathered(policy: Policy) -> None:
    """Frees what FSDP2 has gathered of a policy; each rank keeps its own rows.

    FSDP2 keeps the root's parameters whole after a forward pass, and a block's after one that
    failed.
    """
    for module in policy.modules():
        if hasattr(module, "reshard"):
            module.reshard()
