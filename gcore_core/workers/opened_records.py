"""Opens, for a backend, the records that a shard names by reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.errors import RecordMismatch
from gcore_core.contract.lineage import check_seal, name_of
from gcore_core.contract.trainer import TrainRecord
from gcore_core.runtime.messages import TrainItem
from gcore_core.store.client import StoreReader

MASK = "action_mask"


async def open_records(
    store: StoreReader, items: Sequence[TrainItem], step: int
) -> list[TrainRecord]:
    """Opens records, in the order of the items, with the columns that annotators gave them.

    The mask of a record that is not trained on is 0 everywhere. Raises RecordMismatch for one that
    is not what its generator sealed.

    step: records whose weights have another version are not fresh.
    """
    contents = await store.records(items)
    refs = list(dict.fromkeys(extra.columns for item in items for extra in item.extras))
    chunks = dict(zip(refs, await store.arrays(refs), strict=True)) if refs else {}
    records = []
    for item, (generated, media) in zip(items, contents, strict=True):
        place = f"opening for step {step}"
        check_seal(item.seal, item.ordinal, item.sample, item.prompt_digest, generated, place)
        columns: Columns = generated
        if item.extras:
            extra_columns = (chunks[extra.columns][extra.slot].items() for extra in item.extras)
            columns = {**generated, **dict(chain.from_iterable(extra_columns))}
        if item.masked:
            columns = {**columns, MASK: np.zeros_like(columns[MASK])}
        records.append(
            TrainRecord(
                ordinal=item.ordinal,
                sample=item.sample,
                minibatch=item.minibatch,
                columns=columns,
                media=media,
                fresh=item.version == step,
                tile=item.tile,
                replica=item.replica,
                version=item.version,
                truncated=item.truncated,
            )
        )
    drafts = [item.draft for item in items]
    check_prompts(records, f"opening for step {step}", drafts)
    return records


def check_prompts(records: Sequence[TrainRecord], where: str, drafts: Sequence[int] = ()) -> None:
    """Raises RecordMismatch when records of one ordinal and draft have different prompts.

    Such a record was sampled for another row, so its reward and its group are not its own.

    drafts: of each record, the one that it was made from; none where no record was.
    """
    first: dict[tuple[int, int], TrainRecord] = {}
    for record, draft in zip(records, drafts or [-1] * len(records), strict=True):
        other = first.setdefault((record.ordinal, draft), record)
        prompt = record.columns.get("prompt_ids")
        if prompt is None or np.array_equal(prompt, other.columns.get("prompt_ids", prompt)):
            continue
        raise RecordMismatch(
            f"record {name_of(record.ordinal, record.sample)} has another prompt than "
            f"{name_of(other.ordinal, other.sample)}",
            where=where,
            why="records of one ordinal answer one row, so one of them answers another",
            todo="look at how the generator pairs answers with the requests that it got",
            ordinal=record.ordinal,
            sample=record.sample,
        )
