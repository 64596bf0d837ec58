"""Saves and restores the records that a step kept for the next one, as a part of a checkpoint.

A directory holds three files: the headers, the columns as one chunk, and the media (images and the
like) as another chunk. A header's references are replaced by positions in these files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from gcore_core.contract.records import Header, Ref
from gcore_core.store.client import StoreReader, StoreWriter
from gcore_core.store.columns import Chunk, pack
from gcore_core.wire.service import decoded, encode

HEADERS = "headers.msgpack"
COLUMNS = "columns"
MEDIA = "media"


async def save(headers: Sequence[Header], store: StoreReader, directory: Path) -> None:
    """Writes the records into a new directory.

    Raises OSError when it cannot, DataError for what the store lacks.
    """
    records = await store.records(headers)
    columns = [own_columns for own_columns, _ in records]
    media = {}  # each array once, also where several records refer to it
    for header, (_, own_media) in zip(headers, records, strict=True):
        for name, ref in header.media.items():
            media[ref] = own_media[name]
    position_of = {ref: position for position, ref in enumerate(media)}
    saved_headers = [
        msgspec.structs.replace(
            header,
            columns=None,
            slot=slot,
            media={name: _position(position_of[ref]) for name, ref in header.media.items()},
        )
        for slot, header in enumerate(headers)
    ]

    def write() -> None:
        directory.mkdir()
        (directory / HEADERS).write_bytes(encode(saved_headers))
        _write_chunk(directory / COLUMNS, columns)
        _write_chunk(directory / MEDIA, [{array.dtype.str: array} for array in media.values()])

    await asyncio.to_thread(write)


async def restore(
    directory: Path, store: StoreWriter, step: int, shards: frozenset[int]
) -> list[Header]:
    """Puts the saved records into this store, for ``step`` of these shards; returns their headers.

    Raises ContractError or DataError for a file that cannot be read.
    """
    raw = (directory / HEADERS).read_bytes()
    headers = decoded(msgspec.msgpack.Decoder(list[Header]), raw, "headers", str(directory))
    columns = Chunk(memoryview((directory / COLUMNS).read_bytes()))
    media = Chunk(memoryview((directory / MEDIA).read_bytes()))
    chunk = await store.put(step, shards, [columns[header.slot] for header in headers])
    blobs = [array for position in range(len(media)) for array in media[position].values()]
    refs = await store.put_blobs(step, shards, blobs)
    for slot, header in enumerate(headers):
        header.columns = chunk
        header.slot = slot
        header.media = {name: refs[ref.offset] for name, ref in header.media.items()}
    return headers


def _position(position: int) -> Ref:
    """Makes a reference into the file of media, of which only the offset counts."""
    return Ref("", "", position, 0, 0, b"")


def _write_chunk(path: Path, rows: Sequence[Mapping[str, np.ndarray]]) -> None:
    with path.open("wb") as file:
        file.writelines(pack(rows))
