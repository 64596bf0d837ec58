"""Which tokens of a packed row each rank holds."""

from __future__ import annotations

import numpy as np
import pytest
from gcore_language.context.layout import Layout, cut_where_needed, record_costs, shared_by_all

MIXED = [17, 1, 0, 700, 64, 3, 1030]


def of_mixed(ring: int, ulysses: int) -> Layout:
    """Returns a layout of whole and of shared records."""
    members = [tuple(range(ring)) if n % 2 else (n % ring,) for n in range(len(MIXED))]
    return Layout(np.array(MIXED), tuple(members), ring, ulysses)


@pytest.mark.parametrize("ring", [1, 2, 3, 8])
@pytest.mark.parametrize("ulysses", [1, 2, 5])
def test_every_token_of_a_row_is_on_exactly_one_rank(ring: int, ulysses: int) -> None:
    for layout in (of_mixed(ring, ulysses), shared_by_all(MIXED, ring, ulysses)):
        own = [layout.own(member, rank) for member in range(ring) for rank in range(ulysses)]
        assert sorted(np.concatenate(own).tolist()) == list(range(sum(MIXED)))
        for member in range(ring):
            sizes = [len(layout.own(member, rank)) for rank in range(ulysses)]
            assert sizes == layout.sizes(member)
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ring", [1, 2, 3, 8])
def test_every_pair_of_tokens_that_see_each_other_is_computed_exactly_once(ring: int) -> None:
    for layout in (of_mixed(ring, 1), shared_by_all(MIXED, ring, 1)):
        seen = np.zeros((sum(MIXED), sum(MIXED)), np.int8)
        for member in range(ring):
            queries = layout.own(member, 0)
            for other in range(ring):
                keys = layout.own(other, 0)
                for pair in layout.pairs(member, other):
                    part = np.ones((len(queries[pair.query]), len(keys[pair.key])), np.int8)
                    places = np.ix_(queries[pair.query], keys[pair.key])
                    seen[places] += np.tri(*part.shape, dtype=np.int8) if pair.causal else part
        record = np.repeat(np.arange(len(MIXED)), MIXED)
        expected = np.tri(sum(MIXED), dtype=bool) & (record == record[:, None])
        assert (seen == expected).all()


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_members_that_share_a_record_have_equally_many_pairs_of_tokens(ring: int) -> None:
    layout = shared_by_all([4096], ring, 1)
    work = [_pairs_of(layout, member) for member in range(ring)]
    assert sum(work) == 4096 * 4097 // 2
    assert max(work) == min(work)


def test_only_tokens_of_shared_records_travel() -> None:
    layout = of_mixed(2, 1)
    assert [layout.travelling(member) for member in range(2)] == [
        sum(len(_held(layout, member, n)) for n in (1, 3, 5)) for member in range(2)
    ]


def _held(layout: Layout, member: int, record: int) -> np.ndarray:
    ends = np.cumsum(layout.lengths)
    own = layout.own(member, 0)
    return own[(own < ends[record]) & (own >= ends[record] - layout.lengths[record])]


def _pairs_of(layout: Layout, member: int) -> int:
    """Returns how many pairs of tokens a member computes."""
    count = 0
    for other in range(layout.ring):
        for pair in layout.pairs(member, other):
            queries = pair.query.stop - pair.query.start
            keys = pair.key.stop - pair.key.start
            count += queries * (queries + 1) // 2 if pair.causal else queries * keys
    return count


@pytest.mark.parametrize("ring", [2, 4])
def test_short_records_stay_whole_and_long_ones_are_cut_so_that_work_is_even(ring: int) -> None:
    lengths = [20000, *np.random.default_rng(0).integers(17, 300, 200).tolist()]
    layout = cut_where_needed(lengths, ring, 1, 256)
    assert layout.members[0] == tuple(range(ring))
    assert {len(members) for members in layout.members[1:]} == {1}
    loads = np.zeros(ring)
    for cost, members in zip(record_costs(np.array(lengths), 256), layout.members, strict=True):
        loads[list(members)] += cost / len(members)
    assert loads.max() <= 1.05 * loads.mean()


def test_a_row_of_one_record_is_cut_and_equal_records_are_not() -> None:
    assert cut_where_needed([500], 4, 1, 64).members == ((0, 1, 2, 3),)
    assert sorted(cut_where_needed([500] * 4, 4, 1, 64).members) == [(0,), (1,), (2,), (3,)]
