"""Lets every process see the same row.

A scorer opens the rows that the generators did, and code of users gets a copy of its own.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import xxhash

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Header, Prompt

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def prompt_digest(prompt: Prompt) -> int:
    """Returns the xxh3-64 of a row, the same in every process that opens the same row.

    Keys are sorted, since a mapping has no order. Of images only the number counts: their paths may
    differ from node to node. It is 0 for a row with values that msgpack does not have, which the
    contract of datasets refuses.
    """
    images = [""] * len(prompt.images)
    row = [prompt.row, prompt.text, prompt.messages, images, prompt.fields]
    try:
        return xxhash.xxh3_64_intdigest(_encoded(row))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return 0


def _encoded(row: list[Any]) -> bytes:
    try:
        return _ENCODER.encode(row)
    except OverflowError:  # an integer beyond 64 bits, which JSON has
        return json.dumps(row, sort_keys=True).encode()


def open_row(header: Header, dataset: Dataset, provider: str, where: str) -> Prompt:
    """Opens the row of a record.

    Raises DataError when the row is not the one that the record was drawn for, by its digest. It is
    not compared where either digest is not known.

    provider: the dataset's, as in ``use``; empty where only the class is known.
    where: the key of the job that chose it.
    """
    prompt = dataset[header.row]
    digest = prompt_digest(prompt)
    if digest != header.prompt_digest and digest and header.prompt_digest:
        provider = provider or type(dataset).__qualname__
        raise DataError(
            f"dataset {provider}: row {header.row} is another one in the scorer than in the "
            "generator.",
            where=where,
            why=(
                f"Digest of the prompt: {digest:016x}, of the record's: "
                f"{header.prompt_digest:016x}. An answer would get the reward of another row."
            ),
            todo=(
                "Make rows the same in every process that opens them: seed a shuffle, sort files "
                "and sets. gcore_testing.DatasetContract opens a dataset twice."
            ),
            row=header.row,
            provider=provider,
        )
    return prompt


def own_row(prompt: Prompt) -> Prompt:
    """Returns a copy of a row, for code that may change the lists and dicts which it is given.

    Others get the same row: other records of the group, other rewards, and what else asks a
    dataset that holds its rows.
    """
    return msgspec.structs.replace(
        prompt,
        messages=copy.deepcopy(prompt.messages),
        images=list(prompt.images),
        fields=copy.deepcopy(prompt.fields),
    )
