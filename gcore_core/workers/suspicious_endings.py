"""Looks for answers that were cut off and are told as finished.

An answer that is cut off ends with any token; one that ends by itself ends with one of few. So
where the longest answers of a generator all have one length, end with many different tokens, and
no shorter answer ends with any of these, they ran into a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gcore_core.contract.errors import RecordMismatch
from gcore_core.contract.generator import Finished
from gcore_core.contract.lineage import name_of
from gcore_core.contract.records import FINISHED, TRUNCATED

#: At least so many answers of the largest length, and half of all of that length, must end with
#: tokens that end no shorter one; and these tokens must be so many.
_CUT = 16
_TOKENS = 4
#: Each token that ends shorter answers must have ended so many of them on average.
_EACH = 4


class EndReasons:
    """Counts with which tokens the answers of one generator end.

    It looks at answers that are "finished" without a reason. One with a reason, such as the text
    that ended it, may end with any token. It stops looking when the generator reports an answer as
    truncated: such a generator says when it cuts one off.
    """

    def __init__(self) -> None:
        self._longest = 0
        self._at_longest: Counter[int] = Counter()  # last token -> answers of the largest length
        self._shorter: Counter[int] = Counter()  # last token -> shorter answers
        self._tells = False

    def add(self, finished: Iterable[Finished]) -> None:
        """Counts answers. Raises RecordMismatch when those of the largest length were cut off."""
        for record in finished:
            if self._tells:
                return
            actions = record.columns.get("action_ids")
            if actions is None or not len(actions):
                continue
            self._tells = record.status == TRUNCATED
            if record.status == FINISHED and not record.reason:
                self._count(len(actions), int(actions[-1]))
                self._check(record)

    def _count(self, length: int, last: int) -> None:
        if length > self._longest:
            self._longest = length
            self._shorter += self._at_longest
            self._at_longest = Counter()
        (self._at_longest if length == self._longest else self._shorter)[last] += 1

    def _check(self, record: Finished) -> None:
        """Raises RecordMismatch, naming ``record``, when what was counted shows cut answers."""
        shorter = self._shorter.total()
        if shorter < _EACH * max(len(self._shorter), 1):
            return
        cut = [token for token in self._at_longest if token not in self._shorter]
        count = sum(self._at_longest[token] for token in cut)
        total = self._at_longest.total()
        if count < _CUT or len(cut) < _TOKENS or count < total / 2:
            return
        request = record.request
        raise RecordMismatch(
            f"{count} answers of {self._longest} actions, the most of all, are told as finished "
            "and were cut off",
            where="generate",
            why=f"they end with {len(cut)} different tokens; {shorter} shorter ones end with "
            f"{len(self._shorter)}. One of them is record "
            f"{name_of(request.ordinal, request.sample)}",
            todo='see how the generator tells why an answer ended: status "truncated" where it '
            "ran into a limit",
            ordinal=request.ordinal,
            sample=request.sample,
        )
