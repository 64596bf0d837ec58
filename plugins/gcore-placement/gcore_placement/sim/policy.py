"""Stands for a model: a table of letters that can be pushed and learned.

Every letter of an answer is drawn from the same distribution, whatever came before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gcore_core.contract.records import TensorSpec

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz.", np.uint8)
END = len(LETTERS) - 1  # the last one ends an answer
_CODE_BITS = 12


@dataclass(frozen=True)
class Table:
    """The emulated weights, with what follows from them.

    logits: float32[27], one for each letter and the end.
    logp: float32[27], their log-softmax.
    letter_of: uint8[4096], code -> letter. A letter has as many codes as fits its chance, so a
        uniformly drawn code gives a letter by its chance.
    """

    logits: np.ndarray
    logp: np.ndarray
    letter_of: np.ndarray


@lru_cache(maxsize=16)
def table_of(content: bytes) -> Table:
    """Returns the table whose logits have these bytes; the workers of one process share it."""
    logits = np.frombuffer(content, np.float32)
    logp = np.asarray(logits - logits.max(), np.float64)
    logp -= np.log(np.exp(logp).sum())
    chances = np.exp(logp[:END]).cumsum()
    codes = (np.arange(1 << _CODE_BITS) + 0.5) / (1 << _CODE_BITS)
    letter_of = np.searchsorted(chances / chances[-1], codes).astype(np.uint8)
    return Table(logits, logp.astype(np.float32), letter_of)


def initial_table() -> Table:
    """Returns the table before any training: logits that fall evenly from 0.5 to -0.5."""
    return table_of(np.linspace(0.5, -0.5, len(LETTERS), dtype=np.float32).tobytes())


def codes_of(seed: int, count: int) -> np.ndarray:
    """Returns the codes that a sample's seed draws: uint16[count], each below 4096."""
    draw = np.random.Generator(np.random.Philox(key=seed))
    return draw.integers(0, 1 << _CODE_BITS, count, np.uint16)


def weight_specs() -> list[TensorSpec]:
    """Returns the specs of two tensors, so that a push can have more than one bucket."""
    return [TensorSpec("letters", "F32", (END,), 4 * END), TensorSpec("end", "F32", (1,), 4)]


def tensors_of(table: Table) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Yields the logits as the flat uint8 tensors of a push."""
    for spec, logits in zip(weight_specs(), (table.logits[:END], table.logits[END:]), strict=True):
        yield spec, logits.view(np.uint8)
