"""Dynamic sampling: how many groups a step issues, and which of them it takes.

Every shard computes the same from the same sums, so that none has to ask another. A step takes the
lowest ordinals that
teach, up to the number it needs, and everything before the last of them: never the first to finish,
and whatever was issued beyond is as if it had not been. So what is consumed does not depend on
timing, shards, or how much was issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.keep_rate import KeepRate, by_quarter
from gcore_core.controllers.ledger import TRAINED, Ledger
from gcore_core.runtime.agreements import Agreements


@dataclass
class Totals:
    """Over all shards, of the step so far."""

    issued: int = 0
    kept: int = 0
    unusable: int = 0
    complete: int = 0

    @property
    def in_flight(self) -> int:
        return self.issued - self.complete


@dataclass(frozen=True)
class Left:
    """What a step issued and did not take: groups in all, those that are carried, those of these
    that teach.
    """

    surplus: int = 0
    carried: int = 0
    teach: int = 0


@dataclass
class Quota:
    """One shard's view. exact: nothing is issued that may not be needed, as in a run that is to
    repeat. carries: what is left over is kept for the next step.
    """

    needed: int
    limit: int
    exact: bool
    carries: bool
    belief: KeepRate = field(default_factory=KeepRate)
    totals: Totals = field(default_factory=Totals)
    rounds: int = 0
    _drops: bool = False  # a group was dropped, ever
    _left: Left = field(default_factory=lambda: Left())

    @classmethod
    def of(cls, config: SyncConfig, exact: bool, stale: bool) -> Quota:
        carries = config.surplus == "keep" or (config.surplus == "auto" and stale)
        return cls(config.prompts, config.max_rounds * config.prompts, exact, carries and not exact)

    def begin(self) -> None:
        self.totals, self.rounds = Totals(), 0

    def issue(self) -> int:
        """How many groups to issue now. Until one was ever dropped, as many as are missing."""
        done, left = self.totals, Left() if self.rounds else self._left
        due = self.needed - left.teach
        lacking = due - done.kept
        if lacking <= 0 or (self.exact and done.in_flight):
            missing = 0
        elif self.exact or not self._drops:
            missing = lacking - done.in_flight
        else:
            likely = self.belief.missing(
                needed=due, kept=done.kept, finished=done.complete, in_flight=done.in_flight
            )
            missing = max(likely, 0 if done.in_flight else lacking)
        again = left.surplus - left.carried  # drawn anew, before any that never was
        count = min(left.surplus + max(missing - again, 0), self.limit - done.issued)
        self.totals.issued += count
        self.rounds += bool(count)
        return count

    async def settled(
        self, agree: Agreements, kept: int, unusable: int, complete: int, drawn: bool
    ) -> bool:
        """Adds what became of this shard's groups since the last time to what became of the
        others'. Whether all shards have ``drawn`` all, and some is not judged.
        """
        new = [
            round(float(n))
            for n in await agree.sum("settled", np.array([kept, unusable, complete, drawn]))
        ]
        self.totals.kept += new[0]
        self.totals.unusable += new[1]
        self.totals.complete += new[2]
        self._drops |= self.totals.kept < self.totals.complete
        return new[3] == agree.shards and self.totals.in_flight > 0

    @property
    def over(self) -> bool:
        """Everything issued is there, and it is enough or there may be no more."""
        done = self.totals
        return not done.in_flight and (done.kept >= self.needed or done.issued >= self.limit)

    async def close(
        self, agree: Agreements, ledger: Ledger, kept: list[int], counts: Counter[str]
    ) -> int:
        """Ends the step at the ordinal behind the last one it takes; returns that ordinal."""
        await self._learn(agree, ledger)
        start = ledger.next_ordinal - self.totals.issued

        async def lead(lists: list[bytes]) -> list[bytes]:
            teach = sorted(
                ordinal
                for part in lists
                for ordinal in msgspec.msgpack.decode(part, type=list[int])
            )
            end = teach[self.needed - 1] + 1 if len(teach) >= self.needed else ledger.next_ordinal
            return [msgspec.msgpack.encode(end)] * agree.shards

        end = msgspec.msgpack.decode(
            await agree.ask("kept", msgspec.msgpack.encode(kept), lead), type=int
        )
        counts["surplus"] += len(ledger.close(end, self.carries))
        carried = ledger.carried()
        counts["surplus_carried"] += len(carried)
        self._left, surplus = Left(), self.totals.issued - (end - start)
        if self.carries and surplus:
            told = await agree.sum(
                "carried", np.array([len(carried), len(set(carried) & set(kept))])
            )
            self._left = Left(surplus, *(round(float(value)) for value in told))
        return end

    async def _learn(self, agree: Agreements, ledger: Ledger) -> None:
        if self._drops and not self.exact:
            ended = np.array([verdict == TRAINED for verdict in ledger.verdicts()], np.int64)
            told = await agree.sum(
                "quarters", np.array([by_quarter(ended), by_quarter(np.ones(len(ended)))])
            )
            kept, finished = np.rint(told).astype(int).reshape(2, -1).tolist()
            self.belief = self.belief.after(kept, finished)

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with; plain values."""
        belief = {"rates": list(self.belief.rates), "change2": float(self.belief.change2)}
        return {"drops": self._drops, **belief, "left": list(astuple(self._left))}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self._drops = state["drops"]
            self.belief = replace(
                self.belief, rates=tuple(state["rates"]), change2=state["change2"]
            )
            self._left = Left(*state.get("left", ())) if self.carries else Left()

    @property
    def holds(self) -> bool:
        """Records of the step before are still needed in the next one."""
        return self._left.carried > 0
