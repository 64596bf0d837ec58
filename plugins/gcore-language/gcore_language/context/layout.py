"""Says which tokens of a packed row each rank of a context group holds.

A packed row has whole records one after another; a token sees the tokens of its own record that do
not come after it. A context group is a ring of members, and each member is ``ulysses`` ranks.

A record that d members share is cut into 2 d pieces. The member at place i of those d gets the
piece i from the front and the piece i from the back ("zigzag"): so under causal attention all have
equally many pairs of tokens. Pieces need not be equally long, so that nothing is padded. An example
of 10 tokens, 2 members:

    pieces      0 1 | 2 3 4 | 5 6 | 7 8 9
    member 0    0 1           +     7 8 9
    member 1          2 3 4   +   5 6

A record of one member has both pieces there: it is whole.

Source of the zigzag: Zhu, "ring-flash-attention" (2024), and Megatron-LM's context parallelism;
there all pieces have one length.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gcore_language.packing import ragged

#: How much more than an even share of the work a member may have, as a factor.
_UNEVEN = 1.05


@dataclass(frozen=True)
class Held:
    """What one member holds of one record; it lies together in the member's tokens.

    at: where it begins among the member's tokens.
    low, high: tokens of the piece from the front and of the piece from the back.
    place: of the member among those that share the record.
    """

    at: int
    low: int
    high: int
    place: int

    @property
    def tokens(self) -> int:
        return self.low + self.high


@dataclass(frozen=True)
class Pair:
    """Queries and keys of one record that attend to each other in one call.

    query, key: where they lie, among the tokens of the member that has the queries, and of the one
        that has the keys.
    causal: whether a query sees only keys that do not come after it; else it sees all of them.
    """

    query: slice
    key: slice
    causal: bool


@dataclass(frozen=True)
class Layout:
    """How a packed row is split over a context group.

    lengths: int64[N], tokens of each record, in the order of the row.
    members: of each record those that share it, in the order of their places.
    ring: number of members.
    ulysses: ranks of a member; they share its tokens evenly, in order.
    """

    lengths: np.ndarray
    members: tuple[tuple[int, ...], ...]
    ring: int
    ulysses: int

    def held(self, member: int) -> dict[int, Held]:
        """Returns what a member holds, by record.

        Shared records come first, so that what travels around the ring lies together.
        """
        own = [n for n, sharing in enumerate(self.members) if member in sharing]
        own.sort(key=lambda record: len(self.members[record]) == 1)  # stable
        parts = {}
        at = 0
        for record in own:
            place = self.members[record].index(member)
            cuts = self._cuts(record)
            part = Held(
                at=at,
                low=int(cuts[place + 1] - cuts[place]),
                high=int(cuts[-1 - place] - cuts[-2 - place]),
                place=place,
            )
            parts[record] = part
            at += part.tokens
        return parts

    def tokens(self, member: int) -> int:
        """Returns how many tokens a member holds."""
        return sum(part.tokens for part in self.held(member).values())

    def travelling(self, member: int) -> int:
        """Returns how many of a member's tokens, its first, other members need too."""
        parts = self.held(member).items()
        return sum(part.tokens for record, part in parts if len(self.members[record]) > 1)

    def sizes(self, member: int) -> list[int]:
        """Returns how many of a member's tokens each of its ranks has."""
        cuts = self._rank_cuts(member)
        return [end - start for start, end in zip(cuts, cuts[1:], strict=False)]

    def own(self, member: int, rank: int) -> np.ndarray:
        """Returns int64: the tokens of one rank of a member, as places in the packed row."""
        ends = np.cumsum(self.lengths)
        starts = []
        sizes = []
        for record, part in self.held(member).items():
            begin = ends[record] - self.lengths[record]
            cuts = self._cuts(record)
            starts += [begin + cuts[part.place], begin + cuts[-2 - part.place]]
            sizes += [part.low, part.high]
        whole = ragged(np.array(starts, np.int64), np.array(sizes, np.int64))
        cuts_of_ranks = self._rank_cuts(member)
        return whole[cuts_of_ranks[rank] : cuts_of_ranks[rank + 1]]

    def pairs(self, member: int, other: int) -> list[Pair]:
        """Returns what of a member's queries sees what of another's keys.

        Pieces are numbered from the front, so of two different members one has both its pieces
        between the other's: what is seen lies together on either side.
        """
        own = self.held(member)
        others = self.held(other) if other != member else own
        pairs = []
        for record, query in own.items():
            if record not in others:
                continue
            key = others[record]
            if key.place == query.place:
                pair = Pair(_span(query), _span(key), True)
            elif key.place < query.place:
                pair = Pair(_span(query), slice(key.at, key.at + key.low), False)
            else:
                high = slice(query.at + query.low, query.at + query.tokens)
                pair = Pair(high, _span(key), False)
            if pair.query.stop > pair.query.start and pair.key.stop > pair.key.start:
                pairs.append(pair)
        return pairs

    def _cuts(self, record: int) -> np.ndarray:
        """Returns int64[2 d + 1]: where the pieces of a record begin and end, in the record."""
        pieces = 2 * len(self.members[record])
        return np.arange(pieces + 1) * int(self.lengths[record]) // pieces

    def _rank_cuts(self, member: int) -> list[int]:
        tokens = self.tokens(member)
        return [rank * tokens // self.ulysses for rank in range(self.ulysses + 1)]


def _span(part: Held) -> slice:
    return slice(part.at, part.at + part.tokens)


def shared_by_all(lengths: Sequence[int] | np.ndarray, ring: int, ulysses: int) -> Layout:
    """Returns the layout in which every record is split over all members."""
    counts = np.asarray(lengths, np.int64)
    return Layout(counts, (tuple(range(ring)),) * len(counts), ring, ulysses)


def cut_where_needed(
    lengths: Sequence[int] | np.ndarray, ring: int, ulysses: int, hidden_size: int
) -> Layout:
    """Returns a layout in which records stay whole unless that would make work uneven.

    The costliest records are cut, as few as it takes until no member has more than ``_UNEVEN`` of
    an even share; the others go, the costliest first, to the member that has least. A whole record
    is one call of attention, and its keys and values stay where they are.

    hidden_size: of the model, for what a token costs beside a pair of tokens.
    """
    counts = np.asarray(lengths, np.int64)
    costs = record_costs(counts, hidden_size)
    order = np.argsort(-costs, kind="stable")
    allowed = _UNEVEN * costs.sum() / ring
    cut = 0
    homes, most = _dealt(costs, ring)
    while cut < len(order) and most + costs[order[:cut]].sum() / ring > allowed:
        cut = min(len(order), max(cut + 1, cut * 5 // 4))
        homes, most = _dealt(costs[order[cut:]], ring)
    members: list[tuple[int, ...]] = [tuple(range(ring))] * len(counts)
    for record, home in zip(order[cut:].tolist(), homes, strict=True):
        members[record] = (home,)
    return Layout(counts, tuple(members), ring, ulysses)


def record_costs(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """Returns float64[N]: what records cost, in tokens' worth without attention.

    A token costs 12 D multiplications of a layer, and a pair of tokens that see each other 2 of
    them; see ``gcore_language.packing.cheapest_layout``.
    """
    tokens = lengths.astype(np.float64)
    return np.asarray(tokens + tokens**2 / (12 * hidden_size))


def _dealt(costs: np.ndarray, ring: int) -> tuple[list[int], float]:
    """Returns the member of each record, from the costliest down, and the most that one gets."""
    loads = [(0.0, member) for member in range(ring)]
    homes = []
    for cost in costs.tolist():
        load, member = heapq.heappop(loads)
        homes.append(member)
        heapq.heappush(loads, (load + cost, member))
    return homes, max(loads)[0]
