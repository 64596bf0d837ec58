"""Tensors of a model under their Hugging Face names, to and from flat bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.records import TensorSpec

#: torch dtype -> name in safetensors
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def named_tensors(model: Any) -> dict[str, Tensor]:
    """The state dict without the second and later names of tied tensors, as a safetensors
    checkpoint would have it.
    """
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def spec_of(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Describes the tensor as it will be exported: floating point as ``dtype``, anything else as it
    is.
    """
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return TensorSpec(name, _NAMES[kind], tuple(tensor.shape), tensor.numel() * kind.itemsize)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; a collective when it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(whole: Tensor, sharded: Tensor) -> Tensor:
    """``whole``, which every rank has, laid out as ``sharded`` is."""
    whole = whole.to(sharded.device, sharded.dtype)
    if not hasattr(sharded, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)


def flat_bytes(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Flat uint8 of a whole tensor, where it is; a view of its memory when that is possible."""
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def to_bytes(tensor: Tensor, dtype: torch.dtype | None = None) -> np.ndarray:
    """The same on the host."""
    flat: np.ndarray = flat_bytes(tensor, dtype).cpu().numpy()
    return flat


def from_bytes(spec: TensorSpec, content: np.ndarray | Tensor) -> Tensor:
    """A tensor of its own from flat uint8 of ``spec``, which may be memory that does not outlive
    the call.
    """
    copied = content.clone() if isinstance(content, Tensor) else torch.from_numpy(content.copy())
    return copied.view(_DTYPES[spec.dtype]).view(spec.shape)


def copy_bytes(target: Tensor, spec: TensorSpec, content: np.ndarray | Tensor) -> None:
    """Writes flat uint8 of ``spec`` into a tensor of the same shape, converting its dtype."""
    with torch.no_grad():
        if target.dtype != _DTYPES[spec.dtype] or not target.is_contiguous():
            target.copy_(from_bytes(spec, content))
        elif isinstance(content, Tensor):
            flat_bytes(target).copy_(content)
        elif target.device.type == "cpu":
            np.copyto(flat_bytes(target).numpy(), content)
        else:
            target.copy_(from_bytes(spec, content))
