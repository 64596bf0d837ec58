"""Says where pushes cut samples, and has a replay cut them there.

A sample that runs through pushes is drawn in *pieces*, one after the other, each by one version of
the weights. An example: version 4 began a sample, pushes cut it behind 120 and behind 340 actions:

    piece      actions        version    of a replay's requests
    first      0 to 119       4          holds behind 120 actions
    second     120 to 339     5          goes on from 120 actions, holds behind 340
    third      340 to the end 6          goes on from 340 actions

Where a run is repeated, a piece is a request of its own. It is made when its version is published,
and each push waits until all pieces of the versions before it are drawn. So no replica holds a
sample, and one that is lost loses no more than a piece.

Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gcore_core.contract.errors import RecordMismatch
from gcore_core.contract.lineage import name_of
from gcore_core.contract.records import Header, Lease


class Cut(msgspec.Struct, array_like=True, frozen=True):
    """Says which versions of the weights drew a record.

    A record has none if one version drew all of it, and the same version began its group.

    ordinal, sample: of the record.
    version: that drew its first action.
    ends: (actions that it had at a push, version that drew on), of each push that cut it.
    """

    ordinal: int
    sample: int
    version: int
    ends: list[tuple[int, int]]


def cuts_of(group: Sequence[Header], began: int) -> list[Cut]:
    """Returns the cuts of those of a group's records that have any.

    began: the version that began the group.
    """
    return [
        Cut(header.ordinal, header.sample, header.versions[0], list(header.cuts))
        for header in group
        if header.versions[0] >= 0 and (header.cuts or header.versions[0] != began)
    ]


class Pieces:
    """Knows by which pieces an earlier run drew each sample.

    began: ordinal -> the version that began the group. Other groups no step of that run took.
    cuts: of all records that have any.
    source: that run, for messages.
    """

    def __init__(self, began: Mapping[int, int], cuts: Iterable[Cut], source: str) -> None:
        self._began = dict(began)
        self._cuts = {(cut.ordinal, cut.sample): cut for cut in cuts}
        self._source = source

    def knows(self, ordinal: int) -> bool:
        """Returns whether a step of the earlier run took this group."""
        return ordinal in self._began

    def next_version(self, leases: Iterable[Lease]) -> int:
        """Returns the oldest version that draws the next piece of one of these samples."""
        return min(self._next(lease, sample)[0] for lease in leases for sample in lease.samples)

    def split(self, leases: Iterable[Lease], version: int) -> tuple[list[Lease], list[Lease]]:
        """Divides samples in those whose next piece this version draws, and those that wait.

        Each part has one lease of an ordinal, whatever it had before.

        Raises RecordMismatch for one whose next piece an older version has to draw.
        """
        due = list[Lease]()
        waiting = list[Lease]()
        for lease in _joined(leases):
            now = list[int]()
            later = list[int]()
            for sample in lease.samples:
                needed = self._next(lease, sample)[0]
                if needed < version:
                    raise self._too_late(lease.ordinal, sample, needed, version)
                (now if needed == version else later).append(sample)
            if now:
                due.append(replace(lease, samples=tuple(now)))
            if later:
                waiting.append(replace(lease, samples=tuple(later)))
        return due, waiting

    def held(self, lease: Lease) -> Lease:
        """Returns a lease that says where its samples are held this time."""
        ends = ((sample, self._next(lease, sample)[1]) for sample in lease.samples)
        return replace(lease, holds=tuple((sample, end) for sample, end in ends if end))

    def _next(self, lease: Lease, sample: int) -> tuple[int, int]:
        """Returns which version draws the next piece of a sample, and behind how many actions of
        the sample that piece ends; 0: at the end of the sample.
        """
        cut = self._cuts.get((lease.ordinal, sample))
        if cut is None:
            return self._began[lease.ordinal], 0
        versions = [cut.version, *(version for _, version in cut.ends)]
        ends = [*(actions for actions, _ in cut.ends), 0]
        begun = dict(lease.begun).get(sample)
        place = 0
        if begun is not None:
            # What is begun was drawn up to a cut: by the piece of the last of its versions.
            drawn = begun.versions[1]
            place = sum(version <= drawn for version in versions[:-1])
        return versions[place], ends[place]

    def _too_late(self, ordinal: int, sample: int, needed: int, version: int) -> RecordMismatch:
        return RecordMismatch(
            f"record {name_of(ordinal, sample)} cannot be drawn as in the run that is replayed.",
            where=f"version {version}",
            why=(
                f"in {self._source} version {needed} drew the next piece of it, and generators "
                f"hold version {version}. Either it was lost with its machine, or this run was "
                "resumed: a checkpoint holds nothing of groups with a failed record or reward"
            ),
            todo="begin the replay anew",
            ordinal=ordinal,
            sample=sample,
        )


def _joined(leases: Iterable[Lease]) -> list[Lease]:
    """Returns one lease of each ordinal, by ordinal: samples come back one after the other.

    Each sample has what its own lease says that it has.
    """
    parts = dict[int, list[Lease]]()
    for lease in leases:
        parts.setdefault(lease.ordinal, []).append(lease)
    joined = []
    for _, of_ordinal in sorted(parts.items()):
        samples = sorted(sample for lease in of_ordinal for sample in lease.samples)
        begun = sorted(
            (one for lease in of_ordinal for one in lease.begun if one[0] in lease.samples),
            key=lambda one: one[0],
        )
        attempt = max(lease.attempt for lease in of_ordinal)
        joined.append(
            replace(of_ordinal[0], samples=tuple(samples), begun=tuple(begun), attempt=attempt)
        )
    return joined
