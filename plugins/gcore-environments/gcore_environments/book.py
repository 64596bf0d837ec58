"""Keeps the tokens of one episode, exactly as an engine read and said them.

Ids are only ever appended. What the next prompt rewrites, and a second answer to one prompt, become
another sequence, which shares with an earlier one the ids that both begin with. An example: a tool
answers two calls that were asked from one point.

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
    """Holds what a model read and said in one line of the conversation.

    ids: all of it. The first ``shared`` are those of the sequence ``parent``.
    parent: number of a sequence, -1 where it shares nothing.
    spans: (begin, end, version, player) of each turn in ``ids``: what a policy sampled. The version
        is that of its first action. All other ids were given.
    logp: log-probs of what was sampled, in order.
    versions: of the weights that sampled each of these ids.
    rewards: one number a span.
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

    ``start``, ``go_on`` and ``by_ids`` return the number of the sequence that is asked for next:
    its ids are the prompt, and ``sampled`` brings the answer. Until that has come, nothing is
    appended to it: who asks from the same point meanwhile gets a fork.

    sequences: in the order in which they began.
    nodes: digest of a history of messages -> (sequence, how many of its ids tell that history).
    forks: how many sequences but the first began, by cause: "rewritten" (a prompt is no
        continuation), "parallel" (a second answer from one point), "template" (the chat template
        writes earlier turns anew), "player" (another one reads something else), "boundary" (an end
        token was sampled that is not read on).
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.nodes: dict[bytes, tuple[int, int]] = {}
        self.forks: Counter[str] = Counter()
        self._asked: set[int] = set()
        self._latest = -1

    @property
    def actions(self) -> int:
        """How many ids were sampled in all."""
        return sum(len(one.logp) for one in self.sequences)

    def start(self, ids: SequenceOf[int], cause: Cause = "rewritten") -> int:
        """Begins another sequence, and returns its number.

        It shares the longest beginning that it has with one that is there, but not its last id,
        which predicts what is sampled.

        cause: why it is a fork, unless it is the first sequence.
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
        """Appends ids that no policy said, and returns the number of the sequence that has them.

        It is another sequence, a fork, where more than ``length`` ids stand there already, or where
        an answer to these is still awaited.

        length: ids of the sequence behind which they are written, at least 1.
        cause: why it forks, if it does.
        """
        one = self.sequences[number]
        if not 1 <= length <= len(one.ids):
            raise ContractError(
                f"a turn goes on behind {length} ids of sequence {number}, which has "
                f"{len(one.ids)}: give a length of 1 to {len(one.ids)}."
            )
        if length < len(one.ids) or number in self._asked:
            return self._begin([*one.ids[:length], *given], number, length, cause)
        one.ids += given
        self._asked.add(number)
        return number

    def by_ids(self, ids: SequenceOf[int]) -> int:
        """Takes a whole prompt by ids, and returns the number of the sequence that it is.

        It goes on with the sequence that it begins with, up to the end of a turn. A prompt that
        leaves an earlier one between two turns is a second answer from that point ("parallel");
        one that leaves it within a turn says what was sampled otherwise ("rewritten").
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
        """Appends what a policy said to a prompt; without an id it has said nothing.

        logp, versions: of each id.
        player: who said it.
        """
        if not len(ids) == len(logp) == len(versions):
            raise ContractError(
                f"an answer has {len(ids)} ids, {len(logp)} log-probs and {len(versions)} "
                "versions: an engine must give one of each for every id."
            )
        one = self.sequences[number]
        self._asked.discard(number)
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
        """Adds a reward to the latest turn of a sequence; nothing where nothing was sampled in it.

        number: of the sequence; -1: the one that was sampled last.
        """
        number = self._latest if number < 0 else number
        if number >= 0 and self.sequences[number].rewards:
            self.sequences[number].rewards[-1] += value

    def _begin(self, ids: list[int], parent: int, shared: int, cause: Cause) -> int:
        if self.sequences:
            self.forks[cause] += 1
        self.sequences.append(Sequence(ids, parent if shared else -1, shared))
        self._asked.add(len(self.sequences) - 1)
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
