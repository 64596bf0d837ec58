"""Records that a step kept for the next one, in a checkpoint: their headers, their columns as a
chunk, their media.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gcore_core.contract.records import Header, Ref
from gcore_core.runtime.rpc.service import decoded, encode
from gcore_core.runtime.store.client import StoreReader, StoreWriter
from gcore_core.runtime.store.columns import Chunk, pack

HEADERS, COLUMNS, MEDIA = "headers.msgpack", "columns", "media"


async def save(headers: Sequence[Header], store: StoreReader, directory: Path) -> None:
    """Writes the records into a new directory. Raises OSError when it cannot, DataError for what
    the store lacks.
    """
    records = await store.records(headers)
    media = {
        ref: held[name]
        for h, (_, held) in zip(headers, records, strict=True)
        for name, ref in h.media.items()
    }
    place = {ref: i for i, ref in enumerate(media)}
    bare = [
        msgspec.structs.replace(
            h,
            columns=None,
            slot=i,
            media={name: Ref("", "", place[ref], 0, 0, b"") for name, ref in h.media.items()},
        )
        for i, h in enumerate(headers)
    ]

    def write() -> None:
        directory.mkdir()
        (directory / HEADERS).write_bytes(encode(bare))
        for name, rows in (
            (COLUMNS, [columns for columns, _ in records]),
            (MEDIA, [{array.dtype.str: array} for array in media.values()]),
        ):
            with (directory / name).open("wb") as file:
                file.writelines(pack(rows))

    await asyncio.to_thread(write)


async def restore(
    directory: Path, store: StoreWriter, step: int, shards: frozenset[int]
) -> list[Header]:
    """The saved records, in this store, for ``step`` of these shards. Raises ContractError or
    DataError for a file that cannot be read.
    """
    raw = (directory / HEADERS).read_bytes()
    headers = decoded(msgspec.msgpack.Decoder(list[Header]), raw, "headers", str(directory))
    columns, media = (
        Chunk(memoryview((directory / name).read_bytes())) for name in (COLUMNS, MEDIA)
    )
    chunk = await store.put(step, shards, [columns[h.slot] for h in headers])
    blobs = [array for slot in range(len(media)) for array in media[slot].values()]
    refs = await store.put_blobs(step, shards, blobs)
    for slot, h in enumerate(headers):
        h.columns, h.slot, h.media = (
            chunk,
            slot,
            {name: refs[ref.offset] for name, ref in h.media.items()},
        )
    return headers
