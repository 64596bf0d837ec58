"""Asks trainers and generators what a step check wants to know of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from gcore_core.contract.errors import GcoreError
from gcore_core.contract.launching import Endpoint, Peer
from gcore_core.contract.sentinel import Compared, Finding
from gcore_core.contract.step_check import Held
from gcore_core.runtime.messages import (
    DIAGNOSE,
    EXPLAIN,
    PUSH_HELD,
    SCORE_AGAIN,
    SCORE_LAST,
    SHOW_COMPARED,
    DiagnoseRequest,
    ExplainRequest,
    Nothing,
    ScoreAgain,
    ScoreLast,
    ShownRecord,
)
from gcore_core.runtime.shown_records import opened_record, show_record
from gcore_core.wire.retry import insist

T = TypeVar("T")
log = logging.getLogger(__name__)


class AskedWorkers:
    """Asks the workers of a run, as ``CheckedWorkers`` says."""

    def __init__(
        self, replicas: Sequence[Peer], ranks: Sequence[Sequence[Peer]], *, both_score: bool
    ) -> None:
        self._replicas = replicas
        self._ranks = ranks
        self.generators: Sequence[str] = [peer.name for peer in replicas]
        self.both_score = both_score

    async def scored_by_trainer(self, version: int, count: int) -> list[Compared]:
        """Asks every worker, since a backend may need all; the first of each rank answers for it.

        Raises what a trainer's call raises.
        """
        request = ScoreLast(version, count, len(self._ranks))
        answers = await asyncio.gather(
            *(insist(worker, SCORE_LAST, request) for rank in self._ranks for worker in rank)
        )
        # Each worker has answered. These are the places of the ranks' first workers.
        firsts = np.cumsum([0, *(len(rank) for rank in self._ranks[:-1])])
        return _opened([answers[first] for first in firsts.tolist()])

    async def scored_by_generators(
        self, version: int, records: Sequence[Compared]
    ) -> list[Compared]:
        if not records:
            return []
        request = ScoreAgain(version, [show_record(record) for record in records])
        answers = await asyncio.gather(
            *(self._ask_to_score(peer, request) for peer in self._replicas)
        )
        return [
            replace(record, replica=replica, rollout_logp=np.array(logp, np.float32))
            for replica, scored in enumerate(answers)
            for record, logp in zip(records, scored, strict=False)  # none, from another version
        ]

    async def _ask_to_score(self, peer: Peer, request: ScoreAgain) -> list[list[float]]:
        try:
            return await insist(peer, SCORE_AGAIN, request)
        except GcoreError as error:
            log.warning("%s scored no records: %s", peer.name, error)
            return []

    async def found_by_ranks(self, step: int, replicas: Sequence[int]) -> list[Finding]:
        answers = await self._ask_ranks(DIAGNOSE, step, replicas)
        return [finding for answer in answers for finding in answer]

    async def shown_by_ranks(self, step: int, replicas: Sequence[int]) -> list[Compared]:
        answers = await self._ask_ranks(SHOW_COMPARED, step, replicas)
        return _opened(answers)

    async def _ask_ranks(
        self, endpoint: Endpoint[DiagnoseRequest, T], step: int, replicas: Sequence[int]
    ) -> list[T]:
        request = DiagnoseRequest(step, list(replicas))
        return await asyncio.gather(*(insist(rank[0], endpoint, request) for rank in self._ranks))

    async def found_by_generator(
        self, replica: int, records: Sequence[Compared]
    ) -> list[Finding] | None:
        request = ExplainRequest([show_record(record) for record in records])
        try:
            return await insist(self._replicas[replica], EXPLAIN, request)
        except GcoreError:  # asleep or lost: it cannot be asked, and the alarm stays
            return None

    async def held_by_generator(self, replica: int) -> Held | None:
        try:
            return await insist(self._replicas[replica], PUSH_HELD, Nothing())
        except GcoreError:  # asleep or lost: it cannot be asked, and the alarm stays
            return None


def _opened(answers: Sequence[Sequence[ShownRecord]]) -> list[Compared]:
    return [opened_record(record) for answer in answers for record in answer]
