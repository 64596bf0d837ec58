"""Generation and rewarding, streamed: a record goes to rewarding the moment it is finished."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from dataclasses import dataclass

from msgspec.structs import replace

from gcore_core.contract.errors import DataError, DeadlineExceeded, TrainingError, WorkerDied
from gcore_core.contract.records import FAILED, OK, REWARD_SKIPPED, Header, Lease
from gcore_core.contract.run_files import Record
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.dynamic_sampling import Quota
from gcore_core.controllers.ledger import FILTERED, QUARANTINED, TRAINED, Ledger
from gcore_core.controllers.placement.shard import Placing
from gcore_core.controllers.reward_weights import rewards_of
from gcore_core.controllers.scoring import Scoring
from gcore_core.controllers.training import group_scalars
from gcore_core.runtime.messages import GENERATE, TRAIN, GenerateRequest
from gcore_core.runtime.rpc.retry import TRIES, backoff_s
from gcore_core.runtime.rpc.service import Peer

TICK_S = 1.0  # how often shards look together whether more groups must be issued, at most,
TICK_SHARE = (
    0.05  # and in a long rollout once in this share of its time: a look costs as much as 30 records
)
# parts of a round that a replica works on at a time, over all shards: so many that its batch stays
# full
LANES = 16


@dataclass(frozen=True)
class _Verdict:
    """What became of a complete group."""

    ordinal: int
    group: list[Header]
    verdict: str
    reason: str


class Rollout:
    """One shard's part of the rollout phase."""

    def __init__(self, context: ControllerContext, config: SyncConfig, placing: Placing) -> None:
        self._context, self._config, self._placing = context, config, placing
        self.quota = Quota.of(config, context.facts.run.deterministic, context.facts.takes_stale)

    def oldest(self, version: int) -> int:
        """The first step of which records are still needed when ``version`` is pushed."""
        return version - 1 if self.quota.holds else version

    async def groups(self, ledger: Ledger, step: int) -> tuple[list[list[Header]], Counter[str]]:
        """Draws until the shards together hold enough groups that teach, or as many are issued as
        may be.

        Returns this shard's groups by ordinal, and counts.
        """
        found, draws, counts = list[_Verdict](), set[asyncio.Task[None]](), Counter[str]()
        began_s = asyncio.get_running_loop().time()
        self._placing.begin()
        self.quota.begin()
        try:
            while not self.quota.over:
                turn, count = self.quota.rounds, self.quota.issue()
                if count:
                    leases = ledger.lease(count)
                    draws.add(asyncio.ensure_future(self.draw(ledger, step, turn, TRAIN, leases)))
                await self._tick(draws, began_s)
                settled = self._settle(ledger)
                found += settled
                await self._agree_on(ledger, settled)
        finally:
            for task in draws:
                task.cancel()
        teach = [verdict.ordinal for verdict in found if verdict.verdict == TRAINED]
        end = await self.quota.close(self._context.agree, ledger, teach, counts)
        return self._taken(found, end, counts), counts

    async def _tick(self, draws: set[asyncio.Task[None]], began_s: float) -> None:
        """Until everything that was issued is there, or it is time to look whether more must be."""
        if draws:
            tick_s = max(TICK_S, TICK_SHARE * (asyncio.get_running_loop().time() - began_s))
            idle = self.quota.exact or self._placing.in_turns
            done, _ = await asyncio.wait(
                draws, timeout=None if idle else tick_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
                draws.discard(task)

    async def _agree_on(self, ledger: Ledger, settled: list[_Verdict]) -> None:
        unusable = [verdict.group for verdict in settled if verdict.verdict == QUARANTINED]
        kept = sum(verdict.verdict == TRAINED for verdict in settled)
        judging = await self.quota.settled(
            self._context.agree, kept, len(unusable), len(settled), ledger.drawn
        )
        totals = self.quota.totals
        if unusable and totals.unusable > self._config.failure_limit * totals.complete:
            raise _too_many_failures(unusable, totals.unusable, totals.complete)
        if judging and await self._placing.rescue():
            await Scoring(self._context, ledger, TRAIN, self._placing).route()

    def _taken(self, found: list[_Verdict], end: int, counts: Counter[str]) -> list[list[Header]]:
        """The groups that the step trains on; what became of each is counted and written down."""
        kept, records = [], list[Record]()
        for verdict in sorted(found, key=lambda one: one.ordinal):
            taken = verdict.ordinal < end
            if taken and verdict.verdict == TRAINED:
                kept.append(verdict.group)
            elif taken:
                counts[f"dropped/{verdict.reason}"] += 1
            told = verdict.verdict if taken else "surplus"
            records += self._context.trace.settled(verdict.group, told, verdict.reason)
        self._placing.end(records)
        self._context.trace.flush()
        counts["issued"], counts["kept"] = len(found), len(kept)
        counts["rounds"] = self.quota.rounds if self._context.agree.lead else 0
        return kept

    async def draw(
        self, ledger: Ledger, step: int, turn: int, purpose: str, leases: list[Lease]
    ) -> None:
        """Has the leases drawn and scored; returns when every record is finished and scored.

        Replicas take groups as they work them off, from whichever shard has some left, so that long
        answers hold up only themselves. A shard speaks to no more replicas than it has parts. In a
        deterministic run an ordinal has its replica, which waits for a word from every shard, so
        that batches repeat.
        """
        facts, replicas = self._context.facts, await self._placing.sampling()
        scoring = Scoring(self._context, ledger, purpose, self._placing)

        async def work_off(replica: Peer, waiting: deque[list[Lease]]) -> None:
            lost = 0
            while waiting:
                request = GenerateRequest(
                    step, turn, facts.shard, purpose, waiting.popleft(), least=step
                )
                try:
                    await self._replica(ledger, replica, request, scoring)
                except (WorkerDied, DeadlineExceeded):
                    if left := ledger.lost(request.leases):
                        waiting.append(left)
                    lost += 1
                    if lost == TRIES:
                        raise
                    await asyncio.sleep(backoff_s(lost))  # others may take it meanwhile

        if facts.run.deterministic or len(replicas) == 1:
            own = [
                [x for x in leases if x.ordinal % len(replicas) == i] for i in range(len(replicas))
            ]
            work = [
                work_off(replica, deque([part]))
                for replica, part in zip(replicas, own, strict=True)
            ]
        else:
            lanes = replicas * lanes_of(facts.shards)
            shared = shares(leases, len(replicas), facts.shards)
            first = (
                facts.shard * len(shared) % len(replicas)
            )  # each shard goes on where the one before it ends
            work = [
                work_off(replica, shared)
                for replica in (lanes[first:] + lanes[:first])[: len(shared)]
            ]
        tasks = list(map(asyncio.ensure_future, work))
        try:
            await asyncio.gather(*tasks)  # the first failure ends all
            await self._placing.judging()
            await scoring.finish()
        finally:
            scoring.cancel()
            for task in tasks:
                task.cancel()

    async def _replica(
        self, ledger: Ledger, replica: Peer, request: GenerateRequest, scoring: Scoring
    ) -> None:
        """Draws one part. Raises WorkerDied or DeadlineExceeded when the replica is lost on the
        way.
        """
        sent_s = asyncio.get_running_loop().time()
        stream = replica.stream(GENERATE, request, deadline_s=self._context.facts.run.patience_s)
        async with contextlib.aclosing(stream):
            async for headers in stream:
                fresh = [header for header in headers if ledger.finished(header)]
                self._context.trace.finished(request.step, replica.name, sent_s, fresh)
                scoring.add(fresh)

    def _settle(self, ledger: Ledger) -> list[_Verdict]:
        """Gives every group that became complete its verdict."""
        found = []
        for group in ledger.complete():
            if reason := self._unusable(group):
                verdict = QUARANTINED
            else:
                rewards = rewards_of(group, self._context.facts.rewards)
                keep, reason = self._context.filter.keep(group_scalars(group, rewards))
                verdict = TRAINED if keep else FILTERED
            ledger.settle(group[0].ordinal, verdict, reason)
            found.append(_Verdict(group[0].ordinal, group, verdict, reason))
        return found

    def _unusable(self, group: list[Header]) -> str:
        for header in group:
            if header.status == FAILED:
                if header.reason == "prompt_too_long" and self._config.too_long == "error":
                    raise DataError(
                        "the prompt is longer than the context allows",
                        where=f"row {header.row} of the dataset",
                        todo=(
                            "shorten it, raise the context length, or set "
                            "controller.config.too_long: drop"
                        ),
                    )
                return header.reason or "failed"
            if any(status not in (OK, REWARD_SKIPPED) for status in header.reward_status.values()):
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


def lanes_of(shards: int) -> int:
    """Of one shard, at a replica."""
    return max(1, LANES // shards)


def shares(leases: list[Lease], replicas: int, shards: int) -> deque[list[Lease]]:
    """The leases in parts to be taken one after the other: three quarters of what is left in equal
    parts for the lanes, and so on (factoring: Hummel, Schonberg and Flynn 1992). So replicas are
    full at first and end together.

    Records are dealt in turn, beginning at the next part each time: answers to one prompt are
    alike, so who has several long ones ends last. There are no more parts, each of which is a
    request, than groups, unless replicas would have nothing to do; and if there can be as many for
    every replica, from all shards together, there are.
    """
    found: deque[list[Lease]] = deque()
    left = [(lease, sample) for lease in leases for sample in lease.samples]
    lanes, even = replicas * lanes_of(shards), replicas // math.gcd(replicas, shards)
    least = max(
        1,
        min(
            max((len(lease.samples) for lease in leases), default=1), shards * len(left) // replicas
        ),
    )
    while left:
        size = max(least, 3 * len(left) // (4 * lanes))
        count = min(lanes, -(-len(left) // size))
        if count < lanes:
            count = count // even * even or count
            size = -(-len(left) // count)
        parts: list[dict[Lease, tuple[int, ...]]] = [{} for _ in range(count)]
        for at, (lease, sample) in enumerate(left[: count * size]):
            part = parts[(at + at // count) % count]
            part[lease] = (*part.get(lease, ()), sample)
        found += [
            [replace(lease, samples=samples) for lease, samples in part.items()] for part in parts
        ]
        del left[: count * size]
    return found
