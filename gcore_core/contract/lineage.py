"""Binds a record's content and its rewards to its name, from where it is sampled to its gradient.

Numbers of 64 bits, each an xxh3; a record's cost is a few microseconds a kilobyte:

seal     made by the generator of (ordinal, sample, digest of the prompt, all its columns). A scorer
         and a rank of the trainer make it again of what they have opened.
receipt  made by a scorer of (seal, reward, value). A controller makes it again of the rewards that
         a record has when its advantage is computed.
stamp    made of the digests of a push's tensors, by the trainer and by each generator. A record has
         the stamp of the weights that its generator held when the record ended.
terms    made by a rank of what its loss is computed of: tokens, mask, log-probs and advantage of
         each record. Made again of what was sealed and sent, as a multiset.

They find what was joined to the wrong record by accident. They prove nothing against somebody who
means to deceive.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from gcore_core.contract.errors import RecordMismatch

#: Seal and receipt of a record for which none was made.
UNSEALED = 0
_MODULUS = 1 << 64
_SEAL_AND_VALUE = struct.Struct("<Qd")


def seal_of(
    ordinal: int, sample: int, prompt_digest: int, columns: Mapping[str, np.ndarray]
) -> int:
    """Returns the seal of a record: never ``UNSEALED``.

    columns: all that the generator gave, in any order; names, dtypes, shapes and bytes count.
    """
    digest = xxhash.xxh3_64(struct.pack("<qqQ", ordinal, sample, prompt_digest))
    add_arrays(digest, columns)
    return digest.intdigest() or 1


def add_arrays(digest: xxhash.xxh3_64, arrays: Mapping[str, np.ndarray]) -> None:
    """Adds names, dtypes, shapes and bytes of arrays to a digest, by name; in any memory order.

    A number without axes has the shape ``(1,)``.
    """
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(_heading(name, array.dtype, array.shape or (1,)))
        digest.update((array if array.flags.c_contiguous else np.ascontiguousarray(array)).data)


@lru_cache(maxsize=4096)
def _heading(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Returns what a digest holds before an array's bytes.

    Kept, since to write it takes as long as all else of a short record's seal, and records share
    names and lengths.
    """
    return f"{name} {dtype.str} {shape}\n".encode()


def receipt_of(seal: int, values: Mapping[str, float]) -> int:
    """Returns the receipt of a record's rewards, summed over scorers.

    Receipts are summed modulo 2**64, so that neither the order of rewards nor their spread over
    scorers matters. A record without a seal has the receipt ``UNSEALED``.

    values: reward -> value, of rewards with status "ok".
    """
    if seal == UNSEALED:
        return UNSEALED
    total = 0
    for name, value in values.items():
        total += xxhash.xxh3_64_intdigest(_SEAL_AND_VALUE.pack(seal, value) + name.encode())
    return total % _MODULUS


def add_receipts(*receipts: int) -> int:
    """Returns the receipt of the rewards of several receipts together."""
    return sum(receipts) % _MODULUS


def stamp_of(digests: Mapping[str, int]) -> int:
    """Returns the stamp of weights: one number for the digests of all tensors; never 0.

    A version is a counter, and a counter can be wrong. A stamp is made of what was pushed, so a
    record that carries it says by which weights it was sampled.

    digests: name of a tensor -> its digest, in any order.
    """
    parts = (
        xxhash.xxh3_64_intdigest(struct.pack("<Q", digest % _MODULUS) + name.encode())
        for name, digest in digests.items()  # some transports sign theirs
    )
    return sum(parts) % _MODULUS or 1


def check_seal(
    seal: int,
    ordinal: int,
    sample: int,
    prompt_digest: int,
    columns: Mapping[str, np.ndarray],
    where: str,
) -> None:
    """Raises RecordMismatch when a record's content is not what its generator sealed.

    seal: as it came with the record; ``UNSEALED`` passes.
    where: who has opened the record, and in which step.
    """
    if seal == UNSEALED or seal_of(ordinal, sample, prompt_digest, columns) == seal:
        return
    raise RecordMismatch(
        f"record {name_of(ordinal, sample)} is not what its generator sealed",
        where=where,
        why="its columns are another record's, or were changed after they were sampled",
        todo="look at what opens, sorts or changes records between generator and trainer",
        ordinal=ordinal,
        sample=sample,
    )


def check_receipt(
    receipt: int,
    seal: int,
    ordinal: int,
    sample: int,
    values: Mapping[str, float],
    where: str,
) -> None:
    """Raises RecordMismatch when a record's rewards are not those that its scorers gave it.

    receipt: of all its rewards; ``UNSEALED`` with a seal says that it has none.
    values: reward -> value, as the record has them now.
    """
    if seal == UNSEALED or receipt_of(seal, values) == receipt:
        return
    raise RecordMismatch(
        f"record {name_of(ordinal, sample)} has rewards that no scorer gave it",
        where=where,
        why="they belong to another record, or were changed after they were scored: "
        + ", ".join(f"{name} {value:g}" for name, value in values.items()),
        todo="look at what joins scores to records, sorts or filters them",
        ordinal=ordinal,
        sample=sample,
    )


def name_of(ordinal: int, sample: int) -> str:
    """Returns how errors name a record: ``12/3`` for sample 3 of ordinal 12."""
    return f"{ordinal}/{sample}"
