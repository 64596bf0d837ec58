"""Turns tensors of a model into flat bytes and back, under their Hugging Face names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.records import TensorSpec
from gcore_language.cuts import with_part

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
    """Returns the state dict as a safetensors checkpoint has it: a tied tensor only under its first
    name.
    """
    ids: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in ids:
            ids.add(id(tensor))
            tensors[name] = tensor
    return tensors


def spec_of(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Describes a tensor as it will be exported.

    dtype: that of floating point tensors; others keep theirs. None keeps all.
    """
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return TensorSpec(name, _NAMES[kind], tuple(tensor.shape), tensor.numel() * kind.itemsize)


def full(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor that may be sharded; all ranks must call it when it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(whole: Tensor, sharded: Tensor) -> Tensor:
    """Lays a tensor out as another one is, with its dtype and device.

    whole: the tensor, which every rank has.
    sharded: the tensor to follow, which need not be sharded.
    """
    whole = whole.to(sharded.device, sharded.dtype)
    if not hasattr(sharded, "placements"):
        return whole
    return with_part(whole, sharded)


def flat_bytes(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a whole tensor as flat uint8 on its device; a view of its memory where that is
    possible.

    dtype: what floating point tensors are converted to; None leaves them.
    """
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def to_bytes(tensor: Tensor, dtype: torch.dtype | None = None) -> np.ndarray:
    """Returns a whole tensor as flat uint8 in host memory; see ``flat_bytes``."""
    flat: np.ndarray = flat_bytes(tensor, dtype).cpu().numpy()
    return flat


def from_bytes(spec: TensorSpec, content: np.ndarray | Tensor) -> Tensor:
    """Makes a tensor of flat uint8, which is copied: it may be memory that does not outlive the
    call.
    """
    copied = content.clone() if isinstance(content, Tensor) else torch.from_numpy(content.copy())
    return copied.view(_DTYPES[spec.dtype]).view(spec.shape)


def copy_bytes(target: Tensor, spec: TensorSpec, content: np.ndarray | Tensor) -> None:
    """Writes flat uint8 that ``spec`` describes into a tensor of the same shape, and converts its
    dtype.
    """
    with torch.no_grad():
        if target.dtype != _DTYPES[spec.dtype] or not target.is_contiguous():
            target.copy_(from_bytes(spec, content))
        elif isinstance(content, Tensor):
            flat_bytes(target).copy_(content)
        elif target.device.type == "cpu":
            np.copyto(flat_bytes(target).numpy(), content)
        else:
            target.copy_(from_bytes(spec, content))
