"""Begins and takes groups as an earlier run did, in place of deciding anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from gcore_core.contract.errors import RecordMismatch
from gcore_core.controllers.window.deadlines import Deadlines, Membership
from gcore_core.controllers.window.journal import Begun, StepMembership


@dataclass
class ReplayedDeadlines(Deadlines):
    """Follows a journal: the same groups are begun under the same versions and taken by the same
    steps.

    The earlier run kept every bound, so this one does. What it began while a push waited, this one
    begins so, too (``push_waits`` changes nothing).

    lines: of the journal, see ``read_memberships``.
    source: the earlier run, for messages.
    """

    lines: Sequence[StepMembership] = ()
    source: str = ""
    # What is still to be repeated, in order: the rounds before a step, then the step itself.
    _ahead: deque[Begun | StepMembership] = field(default_factory=deque)

    def __post_init__(self) -> None:
        for line in self.lines:
            if line.step >= self.step:
                self._ahead += [*line.begun, line]

    @property
    def end(self) -> int:
        """The step behind the last that the journal has."""
        return len(self.lines)

    def issue(self) -> list[int]:
        """Returns what the earlier run began next, once this one has come to that version."""
        if self._again:
            # After a resume: what was not finished is begun again, before all others.
            return self._begin(self._next(len(self._again)))
        if not self._ahead:
            return []
        begun = self._ahead[0]
        if isinstance(begun, StepMembership) or begun.version > self.version:
            return []
        self._ahead.popleft()
        return self._begin(begun.ordinals)

    def issues(self) -> Iterator[list[int]]:
        """Yields each round that the earlier run began before its next step took its groups."""
        while ordinals := self.issue():
            yield ordinals

    def _begin(self, ordinals: list[int]) -> list[int]:
        """Counts these ordinals as begun now, and returns them."""
        self.front = max(self.front, *(ordinal + 1 for ordinal in ordinals))
        self._begun |= dict.fromkeys(ordinals, self.version)
        self.issued += len(ordinals)
        self.rounds += 1
        return ordinals

    def take(self) -> Membership | None:
        """Takes what the step of the earlier run took, once all of it is there.

        Raises RecordMismatch when a group is another one than it was.
        """
        if self.wanted < self.step or not self._ahead:
            return None
        line = self._ahead[0]
        if isinstance(line, Begun) or any(o not in self._told for o in line.consumed):
            return None
        self._ahead.popleft()
        for ordinal, digest in zip(line.consumed, line.digests, strict=True):
            self._compare(line, ordinal, digest)
        trained = [self._told[ordinal] for ordinal in line.trained]
        return self._end_step(trained, list(line.consumed))

    def _compare(self, line: StepMembership, ordinal: int, digest: str) -> None:
        """Raises RecordMismatch for other records, or where a trained group now teaches nothing.

        digest: of the group in the earlier run, 16 hexadecimal digits.
        """
        told = self._told[ordinal]
        teaches = ordinal in line.trained
        if f"{told.digest:016x}" == digest and told.teaches >= teaches:
            return
        raise RecordMismatch(
            f"the group of ordinal {ordinal} is not that of the run that is replayed.",
            where=f"step {line.step}",
            why=(
                f"its records have the digest {told.digest:016x}, in {self.source} they had "
                f"{digest}: another prompt, other actions, log-probs, versions or rewards"
            ),
            todo="the run repeats only with the same weights, engines, data and rewards",
            ordinal=ordinal,
        )

    def restore(
        self, state: Mapping[str, Any], carried: Set[int], unfinished: Set[int] = frozenset()
    ) -> list[int]:
        """Goes on with a ``state``, as ``Deadlines`` do."""
        taken_over = super().restore(state, carried, unfinished)
        known = {*self._begun, *self._again}
        ahead = list(self._ahead)
        self._ahead.clear()
        for one in ahead:
            if isinstance(one, StepMembership):
                self._ahead.append(one)
            elif new := [ordinal for ordinal in one.ordinals if ordinal not in known]:
                self._ahead.append(Begun(one.version, new))
        return taken_over
