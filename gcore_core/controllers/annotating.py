"""Asks the roles that give columns to annotate a step's records, by reference.

Annotators are asked by worker, each shard by itself. A role that is trained gives columns on all of
its ranks at once, since these may need each other.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.launching import Peer
from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime.messages import (
    ANNOTATE,
    ANNOTATE_RANKS,
    RELEASE_STEPS,
    TRAIN,
    AnnotateReply,
    AnnotateRequest,
    Extra,
    ReleaseSteps,
    TrainItem,
)
from gcore_core.runtime.relay import ask_ranks
from gcore_core.wire.retry import insist

Key = tuple[int, int]  # (ordinal, sample) of a record
#: Where the columns lie that the roles gave of each record.
Extras = Mapping[Key, Sequence[Extra]]


async def annotate(
    context: ControllerContext,
    step: int,
    items: Sequence[TrainItem],
    by_trained: Mapping[str, Sequence[Sequence[TrainItem]]],
    purpose: str = TRAIN,
) -> Extras:
    """Returns where the columns lie that all roles gave of the records.

    All roles work at once. A worker that is lost gets its request again when it has been restarted.
    Raises WeightMismatch when the workers of one role hold different weights.

    items: this shard's records.
    by_trained: role that is trained -> the same records, by the rank that trains on them.
    purpose: TRAIN, or what else the records are for.
    """
    extras: dict[Key, list[Extra]] = defaultdict(list)
    givers = [role for role in by_trained if context.facts.trained[role].gives]
    parts = await asyncio.gather(
        *(_of_role(context, step, role, items, purpose) for role in context.annotators),
        *(_of_trained(context, step, role, by_trained[role]) for role in givers),
    )
    for part in parts:
        for key, extra in part.items():
            extras[key].append(extra)
    return extras


def annotated(items: Sequence[TrainItem], extras: Extras) -> list[TrainItem]:
    """Returns the items with references to the columns that roles gave."""
    return [
        msgspec.structs.replace(item, extras=list(extras.get((item.ordinal, item.sample), ())))
        for item in items
    ]


async def release_annotations(context: ControllerContext, before: int) -> None:
    """Lets the annotators forget the columns of steps before ``before``; only the lead calls it.

    No shard may need these columns any more.
    """
    peers = [peer for workers in context.annotators.values() for peer in workers]
    for role, trained in context.facts.trained.items():
        peers += context.workers_of(role) if trained.gives else []
    request = ReleaseSteps(before)
    await asyncio.gather(*(insist(peer, RELEASE_STEPS, request) for peer in peers))


async def _of_role(
    context: ControllerContext,
    step: int,
    role: str,
    items: Sequence[TrainItem],
    purpose: str,
) -> dict[Key, Extra]:
    """Asks one role for its columns; returns (ordinal, sample) -> where its columns are."""
    shares = _shares(items, context.annotators[role], context.facts.shard)

    async def ask(worker: Peer, share: Sequence[TrainItem]) -> AnnotateReply:
        request = AnnotateRequest(step, context.facts.shard, list(share), purpose)
        return await insist(worker, ANNOTATE, request)

    replies = await asyncio.gather(*(ask(worker, share) for worker, share in shares))
    return _extras(role, [share for _, share in shares], replies)


async def _of_trained(
    context: ControllerContext, step: int, role: str, by_rank: Sequence[Sequence[TrainItem]]
) -> dict[Key, Extra]:
    """Asks all ranks of a trained role for columns of the records that each will train on."""
    shard = context.facts.shard
    requests = [AnnotateRequest(step, shard, list(items)) for items in by_rank]
    ranks = context.trained[role]
    replies = await ask_ranks(shard, ranks, ANNOTATE_RANKS, step, requests)
    return _extras(role, by_rank, replies)


def _extras(
    role: str, shares: Sequence[Sequence[TrainItem]], replies: Sequence[AnnotateReply]
) -> dict[Key, Extra]:
    """Returns (ordinal, sample) -> where its columns are, of shares of records and their replies.

    Raises WeightMismatch when the replies are of different weights.
    """
    versions = sorted({reply.version for reply in replies})
    if len(versions) > 1:
        raise WeightMismatch(
            f"its workers annotated one step with weights of {len(versions)} versions: "
            f"{', '.join(map(str, versions))}",
            where=f"roles.{role}",
        )
    return {
        (item.ordinal, item.sample): Extra(reply.columns, slot)
        for share, reply in zip(shares, replies, strict=True)
        for slot, item in enumerate(share)
    }


def _shares(
    items: Sequence[TrainItem], workers: Sequence[Peer], shard: int
) -> list[tuple[Peer, Sequence[TrainItem]]]:
    """Cuts the items into equal shares of neighbours, one for each worker that gets any.

    Neighbours stay together, since they have one prompt. Each shard begins at another worker, so
    that the first workers do not get all the work when every shard has few records.
    """
    size = -(-len(items) // len(workers)) or 1
    return [
        (workers[(shard + at // size) % len(workers)], items[at : at + size])
        for at in range(0, len(items), size)
    ]
