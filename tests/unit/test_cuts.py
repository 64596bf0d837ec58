"""Where pushes cut samples, and by which pieces a replay draws them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from gcore_core.contract.columns import cuts_in
from gcore_core.contract.errors import RecordMismatch
from gcore_core.contract.records import BegunRef, Header, Lease, Ref
from gcore_core.controllers.window.cuts import Cut, Pieces, cuts_of
from gcore_core.controllers.window.journal import (
    MembershipJournal,
    pieces_of,
    read_memberships,
)
from gcore_core.runtime.rpc.service import encode

REF = Ref("node", "slab", 0, 1, 0, bytes(16))
#: Version 4 began the group of ordinal 7. Sample 0 was cut twice, sample 1 began late.
CUTS = [Cut(7, 0, 4, [(120, 5), (340, 6)]), Cut(7, 1, 5, [])]


def pieces() -> Pieces:
    return Pieces({7: 4, 8: 5}, CUTS, "runs/a/001")


def lease(*samples: int, ordinal: int = 7, **begun: int) -> Lease:
    """begun: "s0" and so on -> the last version that has drawn of that sample."""
    refs = tuple((int(name[1:]), BegunRef(REF, 0, (4, last), 0, 0)) for name, last in begun.items())
    return Lease(ordinal, 0, 0, samples, begun=refs)


def plain(leases: list[Lease]) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.ordinal, one.samples) for one in leases]


def test_the_column_of_versions_says_where_a_record_was_cut() -> None:
    versions = np.array([4, 4, 4, 5, 7, 7], np.int32)
    assert cuts_in({"version": versions}) == ((3, 5), (4, 7))
    assert cuts_in({}) == ()


def test_records_of_the_version_that_began_their_group_have_no_entry() -> None:
    group = [
        Header(7, 0, 0, 0, versions=(4, 6), cuts=((120, 5), (340, 6))),
        Header(7, 1, 0, 0, versions=(5, 5)),
        Header(7, 2, 0, 0, versions=(4, 4)),
        Header(7, 3, 0, 0, versions=(-1, -1)),  # nobody sampled it
    ]
    assert cuts_of(group, 4) == CUTS


def test_a_header_with_many_cuts_stays_small() -> None:
    """A record has at most ``age`` of them, and each takes at most seven bytes."""
    none = len(encode(Header(7, 0, 0, 0)))
    many = tuple((30_000 + 100 * place, 20_000 + place) for place in range(16))
    assert len(encode(Header(7, 0, 0, 0, cuts=many))) - none <= 16 * 7 + 2


def test_each_piece_waits_for_its_version() -> None:
    due, waiting = pieces().split([lease(0, 1, 2), lease(0, ordinal=8)], 4)
    assert plain(due) == [(7, (0, 2))]
    assert plain(waiting) == [(7, (1,)), (8, (0,))]
    assert pieces().next_version(waiting) == 5
    due, waiting = pieces().split([*waiting, lease(0, s0=4)], 5)
    assert plain(due) == [(7, (0, 1)), (8, (0,))]
    assert waiting == []


def test_a_piece_is_held_at_the_cut_behind_it() -> None:
    assert pieces().held(lease(0, 1, 2)).holds == ((0, 120),)
    assert pieces().held(lease(0, s0=4)).holds == ((0, 340),)
    assert pieces().held(lease(0, s0=5)).holds == ()


def test_samples_of_a_group_that_come_back_one_after_the_other_get_one_lease() -> None:
    """Else a replica that is lost with two leases of an ordinal would lose the samples of one."""
    cuts = [Cut(7, sample, 4, [(9, 5)]) for sample in range(2)]
    both = Pieces({7: 4}, cuts, "runs/a/001")
    (due,), waiting = both.split([lease(1, s0=3, s1=4), lease(0, s0=4, s1=3)], 5)
    assert due.samples == (0, 1)
    assert [(sample, ref.versions[1]) for sample, ref in due.begun] == [(0, 4), (1, 4)]
    assert waiting == []


def test_a_piece_whose_version_is_gone_ends_the_replay() -> None:
    with pytest.raises(RecordMismatch, match=r"cannot be drawn as in the run") as error:
        pieces().split([lease(2)], 5)
    assert "in runs/a/001 version 4 drew the next piece of it" in error.value.why


@dataclass
class Written:
    directory: Path

    def __post_init__(self) -> None:
        journal = MembershipJournal(self.directory, cuts=True)
        journal.begins(4, [7])
        journal.begins(5, [8])
        journal.begins(5, [9])  # no step takes it
        journal.takes(0, [7], [7], [1], CUTS)
        journal.takes(1, [8], [8], [2])


def test_a_journal_gives_back_the_pieces(tmp_path: Path) -> None:
    Written(tmp_path)
    lines = read_memberships(tmp_path)
    assert [line.cuts for line in lines] == [CUTS, []]
    known = pieces_of(lines, "runs/a/001")
    assert [known.knows(ordinal) for ordinal in (7, 8, 9)] == [True, True, False]
    assert known.held(lease(0, s0=4)).holds == ((0, 340),)
    assert known.next_version([lease(0, ordinal=8)]) == 5
