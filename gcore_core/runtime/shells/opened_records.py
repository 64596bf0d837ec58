"""Opens, for a backend, the records that a shard names by reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from gcore_core.contract.columns import Columns
from gcore_core.contract.trainer import TrainRecord
from gcore_core.runtime.messages import TrainItem
from gcore_core.runtime.store.client import StoreReader


async def open_records(
    store: StoreReader, items: Sequence[TrainItem], step: int
) -> list[TrainRecord]:
    """Opens records, in the order of the items, with the columns that annotators gave them.

    step: records whose weights have another version are not fresh.
    """
    contents = await store.records(items)
    refs = list(dict.fromkeys(extra.columns for item in items for extra in item.extras))
    chunks = dict(zip(refs, await store.arrays(refs), strict=True)) if refs else {}
    records = []
    for item, (generated, media) in zip(items, contents, strict=True):
        columns: Columns = generated
        if item.extras:
            extra_columns = (chunks[extra.columns][extra.slot].items() for extra in item.extras)
            columns = {**generated, **dict(chain.from_iterable(extra_columns))}
        records.append(
            TrainRecord(
                ordinal=item.ordinal,
                sample=item.sample,
                minibatch=item.minibatch,
                columns=columns,
                media=media,
                fresh=item.version == step,
            )
        )
    return records
