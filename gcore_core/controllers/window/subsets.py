"""A ledger whose steps take any of its groups, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gcore_core.contract.order import row_of
from gcore_core.contract.records import QUARANTINED, Header, Lease
from gcore_core.controllers.window.ledger import Ledger, _Group


class SubsetLedger(Ledger):
    """Leases and closes ordinals one by one, where a ``Ledger`` does it from one end to the other.

    Which ordinals are leased and which a step takes is decided elsewhere (``Deadlines``); this
    ledger is told, and holds what is this shard's of it.

    told: is called when all records of a group have come and are scored.
    facts: as of ``Ledger``.
    """

    def __init__(self, told: Callable[[], None], **facts: Any) -> None:
        super().__init__(**facts)
        self._told = told

    def lease_these(self, ordinals: Iterable[int]) -> list[Lease]:
        """Opens this shard's of the ordinals; returns its leases to draw.

        Of a carried group nothing is drawn.
        """
        own = [ordinal for ordinal in ordinals if ordinal % self.shards == self.shard]
        for ordinal in own:
            turn, row = row_of(ordinal, self._rows, self._seed)
            self._open[ordinal] = self._carried.pop(ordinal, _Group(row, turn, self.waves[0]))
        return self.unfinished(set(own))

    def close_these(self, ordinals: Iterable[int]) -> None:
        """Ends a step that takes these ordinals: their verdicts wait for ``commit``.

        Those of other shards are ignored. The steps are committed in the order of their ends.
        """
        verdicts = {}
        for ordinal in ordinals:
            if self._settled.pop(ordinal, None) is not None:
                verdicts[ordinal] = self._verdicts.pop(ordinal)
        self._ended = [ordinal for ordinal in self._ended if ordinal in self._verdicts]
        self._closed.append(verdicts)

    def held_records(self) -> list[Header]:
        """Returns the records of this shard's groups that have a verdict and that no step has
        taken, by ordinal and sample; those of groups that cannot be used are left out.
        """
        return [
            self._settled[ordinal].records[sample]
            for ordinal in sorted(self._settled)
            if self._verdicts[ordinal][0] != QUARANTINED
            for sample in range(self._samples)
        ]

    def has_ended(self, ordinal: int) -> bool:
        """Returns whether all records of a group of this shard are there and scored."""
        group = self._open.get(ordinal)
        return group is None or len(group.scored) == self._samples

    def _has_score(self, ordinal: int, group: _Group, sample: int) -> None:
        super()._has_score(ordinal, group, sample)
        if len(group.scored) == self._samples:
            self._told()
