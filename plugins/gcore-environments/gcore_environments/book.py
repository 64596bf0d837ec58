"""Keeps the tokens of one episode, exactly as an engine read and sampled them.

Ids are only ever appended. Where a prompt changes what was said before, or asks a second time from
the same point, another sequence begins. It shares with an earlier one the ids that both begin with.
An example: the policy is asked twice from one point, and a tool answers each of the two calls.

    0   system user | call A | answer A | words
    1   system user | call B | answer B | words       parent 0, shared: system user
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

from gcore_core.contract.errors import ContractError

Cause = Literal["rewritten", "parallel", "template", "player", "boundary"]


@dataclass
class Sequence:
    """Holds the ids that a model read and sampled in one line of the conversation.

    ids: all of them, in order. The first ``shared`` are those of the sequence ``parent``.
    parent: number of an earlier sequence; -1 where it shares nothing.
    shared: how many ids it has in common with its parent.
    spans: (begin, end, version, player) of each turn that a policy sampled here: its places in
        ``ids``, the version of its first action, and the player's number. All other ids were given.
    logp: of each sampled id, in order: its log-prob.
    versions: of each sampled id, in order: the version of the weights.
    rewards: of each span, in order: its reward.
    """

    ids: list[int]
    parent: int = -1
    shared: int = 0
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class Book:
    """Holds the sequences of one episode.

    ``start``, ``go_on`` and ``by_ids`` write a prompt and return the number of the sequence that
    has it: all its ids are that prompt. ``sampled`` appends the answer. Until it has come, nothing
    else is appended there: another request from the same point becomes a fork.

    sequences: in the order in which they began.
    nodes: digest of a history of messages -> (sequence, how many of its ids tell that history).
    forks: how many sequences began behind the first one, by cause: "rewritten" (a prompt changes
        what was said), "parallel" (a second answer from one point), "template" (the chat template
        writes earlier turns differently), "player" (another player's conversation), "boundary" (the
        template goes on from another end token than the sampled one).
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.nodes: dict[bytes, tuple[int, int]] = {}
        self.forks: Counter[str] = Counter()
        self._unanswered: set[int] = set()
        self._latest = -1

    @property
    def actions(self) -> int:
        """How many ids were sampled in all."""
        return sum(len(one.logp) for one in self.sequences)

    def start(self, ids: SequenceOf[int], cause: Cause = "rewritten") -> int:
        """Begins another sequence with a prompt, and returns its number.

        It shares the longest beginning that it has in common with an earlier sequence. Its last id,
        which predicts the first sampled one, is always its own.

        cause: why it is a fork, unless it is the first sequence.

        Raises ContractError for a prompt without an id.
        """
        ids = list(ids)
        if not ids:
            raise ContractError(
                "a sequence was begun without an id. The first action follows from an id before "
                "it: give the prompt at least one."
            )
        shared, parent = max(
            ((_common(one.ids, ids), -number) for number, one in enumerate(self.sequences)),
            default=(0, 0),
        )
        return self._begin(ids, -parent, min(shared, len(ids) - 1), cause)

    def go_on(
        self, number: int, length: int, given: SequenceOf[int], cause: Cause = "parallel"
    ) -> int:
        """Appends given ids, and returns the number of the sequence that has them.

        It is another sequence, a fork, where the sequence has more than ``length`` ids already, or
        where an answer to its ids is still awaited.

        number: of the sequence that is continued.
        length: behind how many of its ids the given ones are written, at least 1.
        cause: why it forks, if it does.

        Raises ContractError for a length that the sequence does not have.
        """
        one = self.sequences[number]
        if not 1 <= length <= len(one.ids):
            raise ContractError(
                f"a turn goes on behind {length} ids of sequence {number}, which has "
                f"{len(one.ids)}: give a length of 1 to {len(one.ids)}."
            )
        if length < len(one.ids) or number in self._unanswered:
            return self._begin([*one.ids[:length], *given], number, length, cause)
        one.ids += given
        self._unanswered.add(number)
        return number

    def by_ids(self, ids: SequenceOf[int]) -> int:
        """Takes a whole prompt by ids, and returns the number of the sequence that has it.

        It continues the sequence with which it has most ids in common. A prompt that differs from
        it in given ids asks a second time from that point ("parallel"); one that differs from it
        within a turn changes what was sampled ("rewritten").
        """
        ids = list(ids)
        best, number = 0, -1
        for candidate, one in enumerate(self.sequences):
            if (same := _common(one.ids, ids)) > best:
                best, number = same, candidate
        if number < 0:
            return self.start(ids)
        one = self.sequences[number]
        if best in (len(one.ids), len(ids)):
            return self.go_on(number, best, ids[best:])
        within = any(begin < best < end for begin, end, _, _ in one.spans)
        return self.start(ids, "rewritten" if within else "parallel")

    def sampled(
        self,
        number: int,
        ids: SequenceOf[int],
        logp: SequenceOf[float],
        versions: SequenceOf[int],
        player: int = 0,
    ) -> None:
        """Appends the answer to a prompt. Without ids the policy has said nothing.

        number: of the sequence that has the prompt.
        logp, versions: one of each for every id.
        player: number of the player that said it.

        Raises ContractError where their lengths differ.
        """
        if not len(ids) == len(logp) == len(versions):
            raise ContractError(
                f"an answer has {len(ids)} ids, {len(logp)} log-probs and {len(versions)} "
                "versions: an engine must give one of each for every id."
            )
        one = self.sequences[number]
        self._unanswered.discard(number)
        if not len(ids):
            return
        begin = len(one.ids)
        one.ids += [int(token) for token in ids]
        one.logp += [float(value) for value in logp]
        one.versions += [int(version) for version in versions]
        one.spans.append((begin, len(one.ids), one.versions[-len(ids)], player))
        one.rewards.append(0.0)
        self._latest = number

    def reward(self, value: float, number: int = -1) -> None:
        """Adds a reward to the latest turn of a sequence. One without a turn is left as it is.

        number: of the sequence; -1: the one that was sampled last.
        """
        number = self._latest if number < 0 else number
        if number >= 0 and self.sequences[number].rewards:
            self.sequences[number].rewards[-1] += value

    def _begin(self, ids: list[int], parent: int, shared: int, cause: Cause) -> int:
        if self.sequences:
            self.forks[cause] += 1
        self.sequences.append(Sequence(ids, parent if shared else -1, shared))
        self._unanswered.add(len(self.sequences) - 1)
        return len(self.sequences) - 1


def _common(one: list[int], other: list[int]) -> int:
    """Returns how many ids two lists begin with alike."""
    same, end = 0, min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    while end - same > 1:  # the first ``same`` are equal, the first ``end`` are not
        middle = (same + end) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle
    return same
