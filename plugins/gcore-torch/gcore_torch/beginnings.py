"""What a decoder has read and keeps, so that prompts which begin alike do not read it again.

A decoder *parks* a row that has ended: the next turn of an episode begins with what that row has
read. What prompts have in common, such as a system message, is kept in the same way.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Beginning(Generic[T]):
    """Some tokens, and what a decoder has computed of them.

    ids: int[S].
    held: keys and values of these tokens.
    nbytes: that they take.
    """

    ids: np.ndarray
    held: T
    nbytes: int


class Beginnings(Generic[T]):
    """Holds beginnings. Those that were not used for the longest time go first.

    None of them begins another one: whoever could take the shorter one takes the longer. So of all
    that are sorted by their ids, what begins like a prompt stands beside the place of the prompt.

    most: how many there are at a time.
    nbytes: that they take together.
    """

    def __init__(self, most: int) -> None:
        self.nbytes = 0
        self._most = most
        self._kept: dict[bytes, Beginning[T]] = {}  # by key; the latest used is the last
        self._sorted: list[bytes] = []  # the keys

    def longest(self, ids: np.ndarray) -> tuple[Beginning[T] | None, int]:
        """Returns the beginning with which ids have the most tokens in common, and how many.

        The last token of ids is not counted, because its logits are needed.
        """
        best, most = None, 0
        for one in self._beside(ids[:-1]):
            same = common_length(one.ids, ids[:-1])
            if same > most:
                best, most = one, same
        return best, most

    def _beside(self, ids: np.ndarray) -> list[Beginning[T]]:
        """Returns the beginnings before and behind the place of ids."""
        place = bisect_left(self._sorted, _key(ids))
        return [self._kept[key] for key in self._sorted[max(0, place - 1) : place + 1]]

    def use(self, one: Beginning[T]) -> None:
        """Notes that a prompt has gone on from this beginning."""
        key = _key(one.ids)
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)

    def add(self, one: Beginning[T], nbytes: int) -> None:
        """Keeps a beginning in place of the one that it begins with.

        nbytes: that all may take together.
        """
        for other in self._beside(one.ids):
            same = common_length(other.ids, one.ids)
            if same == len(one.ids):
                self.use(other)
                return
            if same == len(other.ids):
                self._forget(_key(other.ids))
        if one.nbytes > nbytes:
            return
        self.shrink(nbytes - one.nbytes, self._most - 1)
        key = _key(one.ids)
        self._kept[key] = one
        insort(self._sorted, key)
        self.nbytes += one.nbytes

    def shrink(self, nbytes: int, most: int = sys.maxsize) -> None:
        """Drops beginnings until at most so many bytes and beginnings are left."""
        while self._kept and (self.nbytes > nbytes or len(self._kept) > most):
            self._forget(next(iter(self._kept)))

    def _forget(self, key: bytes) -> None:
        self.nbytes -= self._kept.pop(key).nbytes
        del self._sorted[bisect_left(self._sorted, key)]

    def clear(self) -> None:
        """Drops all: other weights would read them differently."""
        self._kept = {}
        self._sorted = []
        self.nbytes = 0


def _key(ids: np.ndarray) -> bytes:
    """Returns ids as bytes, which are sorted as the ids are."""
    return ids.astype(">u4").tobytes()


def common_length(first: np.ndarray, *others: np.ndarray) -> int:
    """Returns how many ids all sequences begin with."""
    length = min(map(len, (first, *others)))
    for other in others:
        differing = (first[:length] != other[:length]).nonzero()[0]
        length = int(differing[0]) if len(differing) else length
    return length
