"""Has SGLang compute the same bits for a sample whatever is sampled beside it, without CUDA.

SGLang's own deterministic mode has kernels for devices only. What it computes for a row of a batch
depends on the other rows in two places here: in products of matrices, whose kernels are chosen by
the number of rows, and in the choice of tokens. So rows are multiplied one by one, and the hash
that makes a sample's random numbers from its seed is written in torch.
"""

from __future__ import annotations

from typing import Any

import torch

_32_BITS = 0xFFFFFFFF


def compute_rows_alone() -> None:
    """Changes SGLang in this process: its deterministic mode multiplies row by row."""
    from sglang.srt import batch_invariant_ops

    name = "sgl_kernel::murmur_hash32_cpu"
    torch.library.define(name, "(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    torch.library.impl(name, "CPU", murmur_hash)
    batch_invariant_ops.enable_batch_invariant_mode = _enable


def allow_torch_attention() -> None:
    """Lets SGLang's deterministic mode take torch's attention, which reads one sample at a time."""
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])


def _enable(*_: Any, **__: Any) -> None:
    """Replaces the products of matrices of torch in this process."""
    torch.library.impl("aten::mm", "CPU", _mm)
    torch.library.impl("aten::addmm", "CPU", _addmm)


def _mm(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns first [N, K] times second [K, M], each row by a product of its own."""
    turned = second.t()
    product = first.new_empty((len(first), second.shape[1]))
    for place, row in enumerate(first):
        # A row of its own memory: kernels may sum in another order where a row begins elsewhere.
        product[place] = torch.mv(turned, row.clone())
    return product


def _addmm(
    bias: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """Returns beta * bias + alpha * first times second; see ``_mm``."""
    return beta * bias + alpha * _mm(first, second)


def murmur_hash(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns int64[N, M] in 0..2**32 - 1: hashes of the seed, position and column of each place.

    It is MurmurHash3 in 32 bits (Appleby, 2011) of four words: the seed's two halves, the position
    and the column, as SGLang's kernel has it.

    seed: uint64[N]. positions: int[N]. columns: int[M].
    """
    seeds = seed.to(torch.int64)[:, None]
    hashed = torch.zeros((len(seed), len(columns)), dtype=torch.int64)
    for word in (
        seeds & _32_BITS,
        (seeds >> 32) & _32_BITS,
        positions.to(torch.int64)[:, None] & _32_BITS,
        columns.to(torch.int64)[None, :] & _32_BITS,
    ):
        hashed = _mixed(hashed, word)
    hashed = hashed ^ 16  # bytes in all
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _32_BITS
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _32_BITS
    return hashed ^ (hashed >> 16)


def _mixed(hashed: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """Returns the hash after one more word of 32 bits; products wrap around."""
    word = (_turned((word * 0xCC9E2D51) & _32_BITS, 15) * 0x1B873593) & _32_BITS
    return (_turned(hashed ^ word, 13) * 5 + 0xE6546B64) & _32_BITS


def _turned(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns a word of 32 bits rotated to the left."""
    return ((word << bits) | (word >> (32 - bits))) & _32_BITS
