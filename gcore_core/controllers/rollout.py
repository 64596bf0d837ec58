"""Generation and rewarding, streamed: a record goes to rewarding the moment it is finished."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.training import group_scalars
from gcore_core.errors import DataError, DeadlineExceeded, TrainingError, WorkerDied
from gcore_core.ledger import FILTERED, QUARANTINED, TRAINED, Ledger
from gcore_core.processes.insist import TRIES, backoff_s, insist
from gcore_core.processes.messages import TRAIN, GenerateRequest, ScoreRequest
from gcore_core.processes.service import Peer
from gcore_core.records import FAILED, OK, Header, Lease, RecordScore

GENERATE_DEADLINE_S = 600.0
SCORE_DEADLINE_S = 600.0
LANES = 2  # parts of a round that a replica works on at a time: it has the next one before this one ends


@dataclass(frozen=True)
class _Settled:
    """What became of a round's groups of one shard; ``kept`` teach, ``failures`` could not be used."""

    kept: list[list[Header]]
    failures: list[list[Header]]
    complete: int


class Rollout:
    """One shard's part of the rollout phase."""

    def __init__(self, context: ControllerContext, config: SyncConfig) -> None:
        self._context, self._config = context, config
        self._names = {name for _, rewards in context.scorers for name in rewards}

    async def groups(self, ledger: Ledger, step: int) -> tuple[list[list[Header]], Counter[str]]:
        """Draws until the shards together hold enough groups that teach, or ``max_rounds`` are over.

        A round leases exactly as many ordinals as are missing and waits for all of them, so a step takes the lowest
        ordinals that pass, never the first to finish. Returns this shard's groups by ordinal, and counts.
        """
        kept: list[list[Header]] = []
        counts: Counter[str] = Counter()
        missing, unusable, seen = self._config.prompts, 0, 0
        for turn in range(self._config.max_rounds):
            leases = ledger.lease(missing)
            counts["issued"] += len(leases)
            await self.draw(ledger, step, turn, TRAIN, leases)
            settled = self._settle(ledger, counts)
            self._context.trace.flush()
            kept += settled.kept
            told = [len(settled.kept), len(settled.failures), settled.complete]
            totals = await self._context.agree.sum("settled", np.array(told))
            new, failed, complete = (round(float(total)) for total in totals)
            missing, unusable, seen = missing - new, unusable + failed, seen + complete
            if settled.failures and unusable > self._config.failure_limit * seen:
                raise _too_many_failures(settled.failures, unusable, seen)
            if missing == 0:
                break
        counts["kept"] = len(kept)
        return kept, counts

    async def draw(self, ledger: Ledger, step: int, turn: int, purpose: str, leases: list[Lease]) -> None:
        """Has the leases drawn and scored; returns when every record is finished and scored.

        Replicas take groups as they work them off, from whichever shard has some left, so that long answers hold up
        only themselves. In a deterministic run an ordinal has its replica, so that batches repeat.
        """
        facts, replicas = self._context.facts, self._context.replicas

        async def serve(replica: Peer, waiting: deque[list[Lease]]) -> None:
            begun = False
            while waiting or not begun:  # at least once: a replica waits for a word from every shard
                part, begun = waiting.popleft() if waiting else [], True
                await self._replica(ledger, replica, GenerateRequest(step, turn, facts.shard, purpose, part, step))

        if facts.deterministic or len(replicas) == 1:
            own = [[x for x in leases if x.ordinal % len(replicas) == i] for i in range(len(replicas))]
            await _all(serve(replica, deque([part])) for replica, part in zip(replicas, own, strict=True))
        else:
            lanes = [replica for _ in range(LANES) for replica in replicas]
            shared = shares(leases, len(lanes))
            first = facts.shard * len(lanes) // facts.shards  # so that shards of few groups do not meet at one replica
            await _all(serve(replica, shared) for replica in lanes[first:] + lanes[:first])

    async def _replica(self, ledger: Ledger, replica: Peer, request: GenerateRequest) -> None:
        ordinals = {lease.ordinal for lease in request.leases}
        scoring: list[asyncio.Task[None]] = []
        try:
            for attempt in range(TRIES):
                try:
                    sent_s = asyncio.get_running_loop().time()
                    stream = replica.stream("generate", request, list[Header], deadline_s=GENERATE_DEADLINE_S)
                    async with contextlib.aclosing(stream):
                        async for headers in stream:
                            fresh = [header for header in headers if ledger.finished(header)]
                            self._context.trace.finished(request.step, replica.name, sent_s, fresh)
                            if ready := [header for header in fresh if header.status != FAILED]:
                                scoring.append(asyncio.ensure_future(self._score(ledger, request.purpose, ready)))
                    break
                except (WorkerDied, DeadlineExceeded):
                    if attempt == TRIES - 1:
                        raise
                    await asyncio.sleep(backoff_s(attempt))
                    request = msgspec.structs.replace(request, leases=ledger.lost(ordinals))
            await asyncio.gather(*scoring)
        finally:
            for task in scoring:
                task.cancel()

    async def _score(self, ledger: Ledger, purpose: str, headers: list[Header]) -> None:
        async def ask(peer: Peer) -> None:
            request = ScoreRequest(purpose, headers)
            for score in await insist(peer, "score", request, list[RecordScore], SCORE_DEADLINE_S):
                ledger.scored(score, self._names)

        await _all(ask(peer) for peer, _ in self._context.scorers)
        self._context.trace.scored(headers)

    def _settle(self, ledger: Ledger, counts: Counter[str]) -> _Settled:
        """Gives every complete group its verdict."""
        kept: list[list[Header]] = []
        failures: list[list[Header]] = []
        complete = ledger.complete()
        for group in complete:
            if reason := self._unusable(group):
                verdict = QUARANTINED
                failures.append(group)
            else:
                keep, reason = self._context.filter.keep(group_scalars(group, self._context.facts.weights))
                verdict = TRAINED if keep else FILTERED
                kept += [group] if keep else []
            if verdict != TRAINED:
                counts[f"dropped/{reason}"] += 1
            ledger.settle(group[0].ordinal, verdict, reason)
            self._context.trace.settled(group, verdict, reason)
        return _Settled(kept, failures, len(complete))

    def _unusable(self, group: list[Header]) -> str:
        for header in group:
            if header.status == FAILED:
                if header.reason == "prompt_too_long" and self._config.too_long == "error":
                    raise DataError(
                        "the prompt is longer than the context allows",
                        where=f"row {header.row} of the dataset",
                        todo="shorten it, raise the context length, or set controller.config.too_long: drop",
                    )
                return header.reason or "failed"
            if any(status != OK for status in header.reward_status.values()):
                return "reward_failed"
        return ""


def _too_many_failures(failures: list[list[Header]], unusable: int, seen: int) -> TrainingError:
    reasons = [header.reason for group in failures for header in group if header.reason]
    return TrainingError(
        f"{unusable} of {seen} groups could not be used",
        where="rewarding",
        why="\n".join(dict.fromkeys(reasons[:64])) or "no reason was given",
        todo="mend the reward or the data; controller.config.failure_limit says how many may fail",
    )


def shares(leases: list[Lease], lanes: int) -> deque[list[Lease]]:
    """The leases in parts to be taken one after the other: three quarters of what is left in equal parts for the lanes,
    and so on (factoring: Hummel, Schonberg and Flynn 1992). So replicas are full at first and end together."""
    found: deque[list[Lease]] = deque()
    left = list(leases)
    while left:
        size = max(1, 3 * len(left) // (4 * lanes))
        for _ in range(lanes):
            if left:
                found.append(left[:size])
                del left[:size]
    return found


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Waits for all; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
