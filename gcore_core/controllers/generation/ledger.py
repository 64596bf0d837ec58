"""Records which shard owns which prompts, what is in flight, and what has a verdict.

It keeps groups. It has no clock and does no I/O: what it says follows from what it was told.

Which ordinals are begun and which a step takes is decided by a ``Schedule``, on all shards alike.
Each shard has a ledger, and ordinals belong to the shards in turn. So the union that a step
consumes is the same for any number of shards, and no message is needed to agree on who owns what.
Work may be done twice, but a record is taken once and an ordinal gets one verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from gcore_core.contract.errors import ContractError
from gcore_core.contract.lineage import add_receipts
from gcore_core.contract.order import row_of
from gcore_core.contract.records import (
    FAILED,
    OK,
    QUARANTINED,
    REWARD_SKIPPED,
    Header,
    Lease,
    RecordScore,
)


@dataclass
class _Group:
    """Collects one prompt's records as they come.

    row: row of the dataset.
    epoch: which pass over the dataset.
    attempt: how often a replica has not finished what was asked of it: it was lost, or first
        needed weights.
    records: sample -> its finished record.
    scored: the samples that need no further score.
    verdict: and the reason; empty as long as it has none.
    """

    row: int
    epoch: int
    attempt: int = 0
    records: dict[int, Header] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)
    verdict: tuple[str, str] = ("", "")


def has_failed_reward(header: Header) -> bool:
    """Returns whether a reward that the record was asked for has no value."""
    return any(status not in (OK, REWARD_SKIPPED) for status in header.reward_status.values())


class Ledger:
    """Keeps one shard's groups from their lease to the end of their step.

    shard: the number of this shard, of ``shards``.
    rows: size of the dataset.
    seed: of the run; it gives the order of the rows.
    samples: records that a group has.
    tells: is called when all records of a group have come and are scored.

    A group is *open* from its lease to its verdict, then *settled* until a step takes it or gives
    it back. One that was given back may be *carried*: it keeps its records, and a later step that
    leases it draws nothing. The next step may lease before the verdicts of this one are
    popped.
    """

    def __init__(
        self,
        *,
        shard: int,
        shards: int,
        rows: int,
        seed: int,
        samples: int,
        tells: Callable[[], None] = lambda: None,
    ) -> None:
        self.shard = shard
        self.shards = shards
        self._rows = rows
        self._seed = seed
        self._samples = samples
        self._tells = tells
        self._open: dict[int, _Group] = {}
        # The complete ones of them, in the order in which they became it.
        self._ended: dict[int, None] = {}
        self._settled: dict[int, _Group] = {}
        self._carried: dict[int, _Group] = {}
        # The verdicts of steps that are closed and not popped, the oldest step first.
        self._closed: deque[dict[int, tuple[str, str]]] = deque()

    def lease(self, ordinals: Iterable[int]) -> list[Lease]:
        """Opens this shard's of the ordinals; returns leases for those that are not carried."""
        own = [ordinal for ordinal in ordinals if ordinal % self.shards == self.shard]
        leases = []
        for ordinal in sorted(own):
            group = self._carried.pop(ordinal, None)
            if group is None:
                group = self._fresh(ordinal)
                samples = tuple(range(self._samples))
                leases.append(Lease(ordinal, group.row, group.epoch, samples))
            else:
                self._ended[ordinal] = None
            self._open[ordinal] = group
        return leases

    def _fresh(self, ordinal: int) -> _Group:
        epoch, row = row_of(ordinal, self._rows, self._seed)
        return _Group(row, epoch)

    def adopt(self, leases: list[Lease]) -> None:
        """Opens ordinals that are not of the run's order: an evaluation's, below zero."""
        self._open |= {lease.ordinal: _Group(lease.row, lease.epoch) for lease in leases}

    @property
    def drawn(self) -> bool:
        """Whether every record of every open group is there."""
        return all(len(group.records) == self._samples for group in self._open.values())

    def take_back(self, leases: list[Lease]) -> list[Lease]:
        """Returns what a replica has not finished of ``leases``, to be asked again.

        It was lost, or had not the weights to draw with. What is asked again is the same record
        with the same seed; the attempt of each of these groups goes up by one.
        """
        again = []
        for lease in sorted(leases, key=lambda lease: lease.ordinal):
            group = self._open.get(lease.ordinal)
            if group is None:
                continue
            group.attempt += 1
            missing = tuple(s for s in lease.samples if s not in group.records)
            if missing:
                again.append(Lease(lease.ordinal, group.row, group.epoch, missing, group.attempt))
        return again

    def finished(self, header: Header) -> bool:
        """Takes a finished record; returns whether it was awaited.

        One that is not is a duplicate, or comes late for a group that is settled; it is ignored.
        """
        group = self._open.get(header.ordinal)
        if (
            group is None
            or not 0 <= header.sample < self._samples
            or header.sample in group.records
        ):
            return False
        group.records[header.sample] = header
        if header.status == FAILED:
            self._has_score(header.ordinal, group, header.sample)  # nothing to score
        return True

    def scored(self, score: RecordScore, names: set[str]) -> None:
        """Takes some rewards of a record, which is scored when each of ``names`` has a status."""
        group = self._open.get(score.ordinal)
        if group is None or score.sample not in group.records:
            return
        header = group.records[score.sample]
        # Why a reward failed says more than why a record ended, but no more than why it failed.
        if score.reason and header.status != FAILED and not has_failed_reward(header):
            header.reason = score.reason
        header.receipt = add_receipts(header.receipt, score.receipt)
        header.rewards = {**header.rewards, **score.values}
        header.reward_status = {**header.reward_status, **score.statuses}
        if names <= header.reward_status.keys():
            self._has_score(score.ordinal, group, score.sample)

    def _has_score(self, ordinal: int, group: _Group, sample: int) -> None:
        """Notes that a sample needs no further score; with the last one its group is complete."""
        if sample not in group.scored:
            group.scored.add(sample)
            if len(group.scored) == self._samples:
                self._ended[ordinal] = None
                self._tells()

    def whole(self, ordinal: int) -> list[Header]:
        """Returns an open group's records by sample; an empty list while one is missing."""
        group = self._open.get(ordinal)
        if group is None or len(group.records) < self._samples:
            return []
        return [group.records[sample] for sample in range(self._samples)]

    def complete(self) -> list[list[Header]]:
        """Returns the open groups whose records are all finished and scored, ready for a verdict.

        Groups come by ordinal, their records by sample.
        """
        return [self.whole(ordinal) for ordinal in sorted(self._ended)]

    @property
    def ended(self) -> list[int]:
        """The ordinals of ``complete``, in the order in which their groups became complete."""
        return list(self._ended)

    def is_open(self, ordinal: int) -> bool:
        """Returns whether a record of the group is still to be drawn or scored."""
        return ordinal in self._open and ordinal not in self._ended

    def settle(self, ordinal: int, verdict: str, reason: str = "") -> None:
        """Gives an open ordinal its verdict. Raises ContractError for one that is not open here."""
        if ordinal not in self._open:
            raise ContractError(
                "settled an ordinal that is not open here", where=f"ordinal {ordinal}"
            )
        group = self._open.pop(ordinal)
        self._ended.pop(ordinal, None)
        group.verdict = verdict, reason
        self._settled[ordinal] = group

    def close(self, ordinals: Collection[int]) -> None:
        """Ends a step that takes these ordinals: their verdicts wait for ``pop_verdicts``.

        Ordinals of other shards are ignored. Raises ContractError while one has no verdict.
        """
        self._check_settled(ordinals)
        verdicts = {}
        for ordinal in ordinals:
            group = self._settled.pop(ordinal, None)
            if group is not None:
                verdicts[ordinal] = group.verdict
        self._closed.append(verdicts)

    def give_back(self, ordinals: Collection[int], carried: Collection[int]) -> None:
        """Gives up settled groups that a later step leases again.

        Ordinals of other shards are ignored. Raises ContractError while one has no verdict.

        carried: the ones that keep their records. The others are redrawn: by newer weights, with
            the same seeds.
        """
        self._check_settled(ordinals)
        kept = set(carried)
        for ordinal in ordinals:
            group = self._settled.pop(ordinal, None)
            if group is not None and ordinal in kept:
                self._carried[ordinal] = group

    def _check_settled(self, ordinals: Collection[int]) -> None:
        if still_open := sorted(self._open.keys() & ordinals):
            raise ContractError(
                "a step cannot end with open groups", where=f"ordinals {still_open[:8]}"
            )

    def held_records(self) -> list[Header]:
        """Returns the records of this shard's groups that later steps go on with, by ordinal and
        sample: of groups that are carried, or are settled and can be used.
        """
        settled = self._settled.items()
        usable = {ordinal: one for ordinal, one in settled if one.verdict[0] != QUARANTINED}
        held = self._carried | usable
        return [held[ordinal].records[s] for ordinal in sorted(held) for s in range(self._samples)]

    def carry(self, headers: Iterable[Header]) -> None:
        """Carries records that a checkpoint holds; takes only this shard's ordinals."""
        for header in headers:
            if header.ordinal % self.shards == self.shard:
                group = self._carried.setdefault(header.ordinal, self._fresh(header.ordinal))
                group.records[header.sample] = header
                group.scored.add(header.sample)

    def pop_verdicts(self) -> dict[int, tuple[str, str]]:
        """Takes out the verdicts of the oldest closed step, since it has been trained on.

        Returns ordinal -> (verdict, reason).
        """
        return self._closed.popleft()

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain values."""
        return {"rows": self._rows, "seed": self._seed, "samples": self._samples}
