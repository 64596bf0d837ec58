"""Puts trainers to sleep while generators draw; whatever they are asked next wakes them."""

from __future__ import annotations

import asyncio

from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime.messages import TRAINER_SLEEP, Nothing
from gcore_core.wire.retry import insist


async def sleep_trainers(context: ControllerContext) -> dict[str, float]:
    """Puts every rank of every trainer to sleep, where ``placement.sleep_in_rollout`` says so.

    All shards call it; the lead asks. No push may be under way, since it needs trainers awake.

    Returns in the lead the seconds of the slowest rank: ``trainer_sleep_s`` of this sleep and
    ``trainer_wake_s`` of the wake before it.
    """
    if not context.facts.trainers_sleep or not context.agree.lead:
        return {}
    workers = [peer for role in context.trained for peer in context.workers_of(role)]
    slept = await asyncio.gather(*(insist(peer, TRAINER_SLEEP, Nothing()) for peer in workers))
    return {
        "trainer_sleep_s": max(rank.sleep_s for rank in slept),
        "trainer_wake_s": max(rank.wake_s for rank in slept),
    }
