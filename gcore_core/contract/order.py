"""Computes the seeded order in which a run visits its rows, and the seed of every sample."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from gcore_core.contract.errors import DataError

#: Ordinals from here on are of questions to a role; no record comes this far.
FIRST_QUESTION = 1 << 48
#: Ordinals from here on are of the turns that an environment asks its generator for.
FIRST_TURN = 1 << 52

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def row_of(ordinal: int, rows: int, seed: int) -> tuple[int, int]:
    """Returns (epoch, row) of the ``ordinal``-th prompt of a run over a dataset of ``rows`` rows.

    Each pass visits every row once, in an order of its own. The permutation is evaluated for this
    one index by a Feistel network that walks until it is back inside the dataset (Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002): constant memory, under two walks on
    average.
    """
    return _row_of(ordinal, rows, seed)


@lru_cache(maxsize=64)  # the records of a prompt ask for it one after the other
def _row_of(ordinal: int, rows: int, seed: int) -> tuple[int, int]:
    if rows < 1:
        raise DataError("a dataset without rows has no order")
    epoch, index = divmod(ordinal, rows)
    # The network permutes 0 .. 2**bits - 1, the smallest such range that has all rows. It takes an
    # index in two halves. Each round changes one half by a hash of the other, which could be undone
    # from the other half: so no two indexes become the same.
    bits = (rows - 1).bit_length()
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    keys = _round_keys(seed, epoch)
    while True:
        high, low = index >> low_bits, index & low_mask
        for round_ in range(0, _ROUNDS, 2):
            low ^= _mixed(high + keys[round_]) & low_mask
            high ^= _mixed(low + keys[round_ + 1]) & high_mask
        index = high << low_bits | low
        if index < rows:  # else it is permuted again: the walk comes back into the dataset
            return epoch, index


def sample_seed(run_seed: int, ordinal: int, epoch: int, sample: int) -> int:
    """Returns the seed of one sample: 63 bits of blake2b of (run seed, ordinal, epoch, sample)."""
    return int.from_bytes(_digest("sample", run_seed, ordinal, epoch, sample, size=8), "big") >> 1


def step_seed(run_seed: int, step: int) -> int:
    """Returns the seed, 63 bits, of what a step draws once for all shards: its minibatches."""
    return int.from_bytes(_digest("step", run_seed, step, size=8), "big") >> 1


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    raw = _digest("order", seed, epoch, size=8 * _ROUNDS)
    return tuple(int.from_bytes(raw[start : start + 8], "big") for start in range(0, len(raw), 8))


def _digest(purpose: str, *numbers: int, size: int) -> bytes:
    return hashlib.blake2b(
        ":".join([purpose, *map(str, numbers)]).encode(), digest_size=size
    ).digest()


def _mixed(value: int) -> int:
    """Mixes 32 bits well.

    It is the upper half of the finaliser of splitmix64 (Steele, Lea and Flood, 2014).
    """
    value &= _MASK64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK64
    return value >> 32
