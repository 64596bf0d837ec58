"""Has every role that gives columns annotate the records of a step, which it gets by reference."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.launching import Peer
from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime.messages import (
    ANNOTATE,
    RELEASE_STEPS,
    TRAIN,
    AnnotateReply,
    AnnotateRequest,
    Extra,
    ReleaseSteps,
    TrainItem,
)
from gcore_core.runtime.rpc.retry import insist


async def annotated(
    context: ControllerContext, step: int, items: Sequence[TrainItem], purpose: str = TRAIN
) -> list[TrainItem]:
    """Returns the same items with references to the columns that the roles gave.

    All roles work at once. A worker that is lost gets its request again when it has been restarted.
    Raises WeightMismatch when the workers of one role hold different weights.
    """
    if not context.annotators:
        return list(items)
    extras: dict[tuple[int, int], list[Extra]] = defaultdict(list)
    parts = await asyncio.gather(
        *(_of_role(context, step, role, items, purpose) for role in context.annotators)
    )
    for part in parts:
        for key, extra in part.items():
            extras[key].append(extra)
    return [
        msgspec.structs.replace(item, extras=extras[item.ordinal, item.sample]) for item in items
    ]


async def release_annotations(context: ControllerContext, before: int) -> None:
    """Lets the annotators forget the columns of steps before ``before``; only the lead calls it.

    No shard may need these columns any more.
    """
    peers = [peer for workers in context.annotators.values() for peer in workers]
    request = ReleaseSteps(before)
    await asyncio.gather(*(insist(peer, RELEASE_STEPS, request) for peer in peers))


async def _of_role(
    context: ControllerContext,
    step: int,
    role: str,
    items: Sequence[TrainItem],
    purpose: str,
) -> dict[tuple[int, int], Extra]:
    """Has one role annotate the records; returns (ordinal, sample) -> where its columns are."""
    shares = _shares(items, context.annotators[role], context.facts.shard)

    async def ask(worker: Peer, share: Sequence[TrainItem]) -> AnnotateReply:
        request = AnnotateRequest(step, context.facts.shard, list(share), purpose)
        return await insist(worker, ANNOTATE, request)

    replies = await asyncio.gather(*(ask(worker, share) for worker, share in shares))
    versions = sorted({reply.version for reply in replies})
    if len(versions) > 1:
        raise WeightMismatch(
            f"its workers annotated one step with weights of {len(versions)} versions: "
            f"{', '.join(map(str, versions))}",
            where=f"roles.{role}",
        )
    return {
        (item.ordinal, item.sample): Extra(reply.columns, slot)
        for (_, share), reply in zip(shares, replies, strict=True)
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
