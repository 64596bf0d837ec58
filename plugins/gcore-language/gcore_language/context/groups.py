"""The process groups of a mesh data x ring x ulysses.

Ranks are numbered so that the ranks of a context group follow each other, and in a group those of
one ring member: rank = (data * ring + member) * ulysses + place. All ranks of a context group get
the same records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ContextGroups:
    """One rank's place in the mesh, and the groups that it is in.

    ring, ulysses: their sizes.
    member: this rank's number in the ring.
    place: this rank's number among the ranks of its member.
    ring_ranks: the ranks, counted over the whole mesh, with this rank's place, by member.
    ring_group, ulysses_group, group: of these ranks, of the member's, and of the context group;
        None where it would be this rank alone.
    """

    ring: int
    ulysses: int
    member: int
    place: int
    ring_ranks: tuple[int, ...]
    ring_group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None
    group: dist.ProcessGroup | None

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for its context group."""
        return self.member == 0 and self.place == 0


def make_groups(ring: int, ulysses: int, rank: int, ranks: int) -> ContextGroups:
    """Makes the groups; all ranks of the default process group call it.

    Raises ValueError when the ranks cannot be divided into context groups.
    """
    degree = ring * ulysses
    if ranks % degree:
        raise ValueError(f"{ranks} ranks cannot be divided into context groups of {degree}")
    first = rank - rank % degree
    member, place = divmod(rank - first, ulysses)
    starts = range(0, ranks, degree)
    rings = (
        range(start + turn, start + degree, ulysses) for start in starts for turn in range(ulysses)
    )
    members = (range(start, start + ulysses) for start in range(0, ranks, ulysses))
    return ContextGroups(
        ring=ring,
        ulysses=ulysses,
        member=member,
        place=place,
        ring_ranks=tuple(range(first + place, first + degree, ulysses)),
        ring_group=_joined(rings, rank),
        ulysses_group=_joined(members, rank),
        group=_joined((range(start, start + degree) for start in starts), rank),
    )


def _joined(all_ranks: Iterable[range], rank: int) -> dist.ProcessGroup | None:
    """Makes a group of each of some ranks, and returns the one that this rank is in."""
    own = [group for group in _made(all_ranks, rank) if group is not None]
    return own[0] if own else None


def _made(all_ranks: Iterable[range], rank: int) -> Iterator[dist.ProcessGroup | None]:
    for ranks in all_ranks:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            yield group if rank in ranks else None
