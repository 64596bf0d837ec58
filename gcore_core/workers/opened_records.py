"""Opens, for a backend, the records that a shard names by reference, and looks for duplicates.

Samples of one prompt that are equal although that is all but impossible are an error. Engines that
share a seed, and chunks whose samples are numbered alike, draw one answer several times. Nothing
else shows it: log-probs are right, and every record is what its generator sealed.

A second sample equals the first with the probability of the answer itself, which its log-probs say.
These are over all tokens. A generator that samples from the likeliest ones alone (top_p, top_k)
gives its answers a higher probability. So the log-prob of each action is raised by an allowance,
and one group is never enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from gcore_core.contract.columns import SEQUENCES, Columns
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
    check_prompts(records, f"opening for step {step}")
    return records


def check_prompts(records: Sequence[TrainRecord], where: str) -> None:
    """Raises RecordMismatch when records of one ordinal have different prompts.

    Such a record was sampled for another row, so its reward and its group are not its own. Episodes
    of one ordinal may begin differently: an environment shows each what its own seed gives.
    """
    first: dict[int, TrainRecord] = {}
    for record in records:
        if SEQUENCES in record.columns:
            continue
        other = first.setdefault(record.ordinal, record)
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


#: The allowance: nats by which sampling from the likeliest tokens may raise an action's log-prob.
#: It is so much where half of the probability is left out.
_ALLOWED = 0.7
#: Equal answers of a larger log-prob are passed; e ** -14 is one in a million.
_RARE = -14.0
#: Equal samples must be in so many groups, and in half of those that have several records.
_GROUPS = 4


def check_duplicates(records: Iterable[TrainRecord], where: str) -> None:
    """Raises RecordMismatch where samples of many prompts are equal beyond chance.

    Records without ``action_ids`` are passed: their actions are not tokens.
    """
    groups: dict[int, list[TrainRecord]] = {}
    for record in records:
        columns = record.columns
        if "action_ids" in columns and "logp" in columns and len(columns["action_ids"]):
            groups.setdefault(record.ordinal, []).append(record)
    several = [group for group in groups.values() if len(group) > 1]
    pairs = [pair for group in several if (pair := _duplicates(group))]
    if len(pairs) < max(_GROUPS, len(several) / 2):
        return
    first, second = pairs[0]
    chance = np.exp(max(_log_chance(first.columns), -700.0))
    raise RecordMismatch(
        f"records {name_of(first.ordinal, first.sample)} and "
        f"{name_of(second.ordinal, second.sample)} are equal, by chance one in {1 / chance:.1g}",
        where=where,
        why=f"in {len(pairs)} of {len(several)} groups two samples are equal: they were drawn with "
        "the same random numbers, or the likeliest token was always taken",
        todo="look at the seeds of samples: each of a prompt has its own (SampleRequest.seed)",
        ordinal=first.ordinal,
        sample=second.sample,
    )


def _duplicates(group: list[TrainRecord]) -> tuple[TrainRecord, TrainRecord] | None:
    """Returns the first two records with one answer that is too unlikely to come twice."""
    first: dict[bytes, TrainRecord] = {}
    for record in group:
        other = first.setdefault(record.columns["action_ids"].tobytes(), record)
        if other is not record and _log_chance(record.columns) < _RARE:
            return other, record
    return None


def _log_chance(columns: Mapping[str, np.ndarray]) -> float:
    """Returns the most that the logarithm of an answer's probability can be."""
    logp = np.asarray(columns["logp"], np.float64)
    if "action_mask" in columns:
        logp = logp[np.asarray(columns["action_mask"]) != 0]  # the others were not sampled
    return float(np.minimum(logp + _ALLOWED, 0.0).sum())
