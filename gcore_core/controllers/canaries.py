"""Has both sides score the same records under the same weights: canaries.

A record says what its generator computed when it was sampled. Where generation runs ahead of
training, the trainer has other weights by then, and no record can be compared. So right after a
push, when both sides hold the same version, some records of the last step are scored by both. They
are given tokens: it does not matter which weights have sampled them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gcore_core.contract.errors import GcoreError
from gcore_core.contract.sentinel import Compared
from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime.messages import (
    CANARIES,
    SCORE_CANARIES,
    CanaryRequest,
    ScoreCanaries,
    ShownRecord,
)
from gcore_core.runtime.rpc.retry import insist
from gcore_core.runtime.shells.compared_records import opened_record

log = logging.getLogger(__name__)


async def scored_by_trainers(
    context: ControllerContext, version: int, count: int
) -> list[ShownRecord]:
    """Returns records with the log-probs that the trainer gives them.

    Every worker is asked, since a backend may need all of them; the first of each rank answers for
    it.

    version: of the weights that the trainer holds.
    count: how many records, over all ranks.
    """
    request = CanaryRequest(version, count, len(context.ranks))
    answers = await asyncio.gather(
        *(insist(worker, CANARIES, request) for rank in context.ranks for worker in rank)
    )
    # There is an answer from each worker. These are the places of the ranks' first workers.
    firsts = np.cumsum([0, *(len(rank) for rank in context.ranks[:-1])])
    return [record for first in firsts.tolist() for record in answers[first]]


async def scored_by_generators(
    context: ControllerContext, version: int, shown: Sequence[ShownRecord]
) -> list[Compared]:
    """Returns each record beside the log-probs of every generator that can give them.

    One that sleeps, is lost, fails, or holds another version gives none.

    shown: what the trainer scored.
    """
    if not shown:
        return []
    request = ScoreCanaries(version, list(shown))

    async def ask(replica: int) -> list[Compared]:
        peer = context.replicas[replica]
        try:
            scored = await insist(peer, SCORE_CANARIES, request)
        except GcoreError as error:
            log.warning("%s scored no canaries: %s", peer.name, error)
            return []
        records = [replace(opened_record(one), replica=replica) for one in shown]
        return [
            replace(record, rollout_logp=np.array(logp, np.float32))
            for record, logp in zip(records, scored, strict=False)  # none, from another version
        ]

    answers = await asyncio.gather(*(ask(replica) for replica in range(len(context.replicas))))
    return [record for answer in answers for record in answer]
