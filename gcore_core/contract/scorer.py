"""What the core calls on rewards: scorers, and what they see and answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from gcore_core.contract.columns import Columns
from gcore_core.contract.records import REWARD_FAILED, Prompt, Ref

#: A reason that quotes others (a model, a user's function) is cut to so many characters.
REASON_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class ScoredRecord:
    """What a scorer sees of a record. text: the completion. media: of ``Finished``; refs: theirs,
    for ``Question``.
    """

    ordinal: int
    sample: int
    prompt: Prompt
    text: str
    status: str
    columns: Columns
    media: Columns = field(default_factory=dict)
    refs: Mapping[str, Ref] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A finite ``value`` with status "ok", or no value and why. A failed reward is a status, never
    a number.
    """

    value: float | None
    status: str = "ok"
    reason: str = ""


@runtime_checkable
class Scorer(Protocol):
    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """One score per record, in order. Calls come one at a time from one thread.
        Of a provider of level "group" the records are those of whole groups, neighbours by ordinal.
        """


@runtime_checkable
class AsyncScorer(Protocol):
    """A scorer that waits for others, such as a judge or a service: calls overlap, on the worker's
    event loop.
    """

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """One score per record, in order."""


def failure(reason: str) -> Score:
    """What a scorer answers for a record that it cannot score."""
    return Score(value=None, status=REWARD_FAILED, reason=reason)
