"""Says how long one process waits for another, in one table derived from ``run.patience_s``.

A deadline counts from the last sign of progress, not from the start of a call: work that says that
it goes on may take any time. Every endpoint says what its caller waits for (``Endpoint.wait``).
Behind a deadline that expires stands a process that is stopped, hangs, or is gone with its machine:
docs/explanation/faults.md tells what follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Wait(Enum):
    """Says what a caller waits for, which decides for how long."""

    ANSWER = "an answer that needs no work to speak of: a slab's name, a bucket, a report"
    WORK = "work on records: generation, scoring, preparation, training"
    SOON = "work of seconds: a push that is pulled, a node agent's answer"
    PUSH = "a trainer that gathers or writes its weights"
    MOVE = "a generator that falls asleep, wakes, or answers questions"
    SHARDS = "a rank that all shards must speak to before it works"
    MEETING = "all shards, or a state that is saved"
    EVER = "what may never come: a worker's end, the beginning of a run"


@dataclass(frozen=True)
class Deadlines:
    """Derives the deadline of every call from one setting.

    patience_s: ``run.patience_s``, seconds for which one process waits for another that shows no
        progress. It alone bounds work, and what should take seconds; nothing else gets shorter
        than the seconds that stand here, so that a short patience does not end what is only slow.
    """

    patience_s: float = 600.0

    def seconds(self, wait: Wait, given_s: float | None = None) -> float:
        """Returns the deadline of a call in seconds; infinite for ``Wait.EVER``.

        given_s: the deadline that the caller sets itself; None: the table's.
        """
        return self._table[wait] if given_s is None else given_s

    @cached_property
    def _table(self) -> dict[Wait, float]:
        patience_s = self.patience_s
        return {
            Wait.ANSWER: max(60.0, patience_s / 10),
            Wait.WORK: patience_s,
            Wait.SOON: min(patience_s, max(60.0, patience_s / 10)),
            Wait.PUSH: max(300.0, patience_s / 2),
            Wait.MOVE: max(600.0, patience_s),
            Wait.SHARDS: max(1800.0, 3 * patience_s),
            Wait.MEETING: max(3600.0, 6 * patience_s),
            Wait.EVER: math.inf,
        }
