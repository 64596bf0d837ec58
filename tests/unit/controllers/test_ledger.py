"""The ledger: whatever the number of shards and whatever goes wrong, every ordinal is owned once
and ends once.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gcore_core.contract.errors import ContractError
from gcore_core.contract.order import row_of
from gcore_core.contract.records import (
    FAILED,
    FILTERED,
    QUARANTINED,
    TRAINED,
    Header,
    Lease,
    RecordScore,
)
from gcore_core.controllers.generation.ledger import Ledger

ROWS, SEED = 11, 5


def make(shard: int = 0, shards: int = 1, samples: int = 2) -> Ledger:
    return Ledger(shard=shard, shards=shards, rows=ROWS, seed=SEED, samples=samples)


def popped(ledger: Ledger, end: int) -> dict[int, tuple[str, str]]:
    """The verdicts of a step that ends before the ordinal ``end``."""
    ledger.close(range(end))
    return ledger.pop_verdicts()


def record(ordinal: int, sample: int, **changes: object) -> Header:
    return Header(ordinal=ordinal, sample=sample, row=0, seed=0, **changes)  # type: ignore[arg-type]


def score(ordinal: int, sample: int, *names: str) -> RecordScore:
    return RecordScore(ordinal, sample, dict.fromkeys(names, 1.0), dict.fromkeys(names, "ok"))


@given(
    shards=st.integers(1, 7),
    slices=st.lists(st.integers(0, 9), max_size=5),
    start=st.integers(0, 50),
)
def test_the_leases_of_all_shards_form_the_global_slices(
    shards: int, slices: list[int], start: int
) -> None:
    ledgers = [make(shard, shards) for shard in range(shards)]
    begin = start
    for size in slices:
        slice_ = range(begin, begin + size)
        leases = [lease for ledger in ledgers for lease in ledger.lease(slice_)]
        assert sorted(lease.ordinal for lease in leases) == list(range(begin, begin + size))
        for lease in leases:
            assert (lease.epoch, lease.row) == row_of(lease.ordinal, ROWS, SEED)
            assert (lease.samples, lease.attempt) == ((0, 1), 0)
        begin += size


@given(shards=st.integers(1, 4), size=st.integers(1, 40))
def test_shards_own_equal_parts_of_a_slice(shards: int, size: int) -> None:
    parts = [len(make(shard, shards).lease(range(size))) for shard in range(shards)]
    assert max(parts) - min(parts) <= 1


@given(order=st.permutations([(o, s) for o in range(3) for s in range(2)] * 2))
def test_duplicates_are_refused_and_change_nothing(order: list[tuple[int, int]]) -> None:
    ledger = make()
    ledger.lease(range(3))
    taken = {}
    for turn, (ordinal, sample) in enumerate(order):
        fresh = ledger.finished(record(ordinal, sample, n_actions=turn))
        assert fresh == ((ordinal, sample) not in taken)
        taken.setdefault((ordinal, sample), turn)
        ledger.scored(score(ordinal, sample, "exact"), {"exact"})
    groups = ledger.complete()
    assert {header.key: header.n_actions for group in groups for header in group} == taken
    assert [[header.key for header in group] for group in groups] == [
        [(o, 0), (o, 1)] for o in range(3)
    ]


@pytest.mark.parametrize(
    "stray", [record(3, 0), record(-1, 0), record(0, 2), record(0, -1), record(1, 0)]
)
def test_records_of_no_open_group_are_refused(stray: Header) -> None:
    """Not leased, of an evaluation, beyond the group, or of another shard."""
    ledger = make(shard=0, shards=2)
    ledger.lease(range(2))
    assert not ledger.finished(stray)


def test_a_late_record_of_a_settled_group_is_refused() -> None:
    ledger = make()
    ledger.lease(range(1))
    ledger.settle(0, QUARANTINED, "lost")
    assert not ledger.finished(record(0, 0))
    ledger.scored(score(0, 0, "exact"), {"exact"})  # and its late score is ignored
    assert popped(ledger, 1) == {0: (QUARANTINED, "lost")}


def test_an_ordinal_gets_one_verdict() -> None:
    ledger = make()
    ledger.lease(range(2))
    ledger.settle(0, TRAINED)
    with pytest.raises(ContractError, match="ordinal 0: settled an ordinal that is not open here"):
        ledger.settle(0, FILTERED)
    with pytest.raises(ContractError, match="ordinal 7"):
        ledger.settle(7, TRAINED)
    ledger.settle(1, FILTERED, "equal_rewards")
    assert popped(ledger, 2) == {0: (TRAINED, ""), 1: (FILTERED, "equal_rewards")}
    assert popped(ledger, 2) == {}  # they were handed out


def test_a_step_cannot_end_with_open_groups() -> None:
    ledger = make()
    ledger.lease(range(3))
    ledger.settle(1, TRAINED)
    with pytest.raises(
        ContractError, match=r"ordinals \[0, 2\]: a step cannot end with open groups"
    ):
        popped(ledger, 3)
    with pytest.raises(ContractError, match=r"ordinals \[2\]: a step cannot end with open groups"):
        ledger.give_back([1, 2], [])
    ledger.settle(0, TRAINED)
    ledger.settle(2, TRAINED)
    assert list(popped(ledger, 3)) == [0, 1, 2]


def test_a_step_takes_any_groups_and_leaves_the_others_settled() -> None:
    ledger = make()
    draw(ledger, ledger.lease(range(4)), version=0)
    for ordinal, verdict in enumerate([TRAINED, FILTERED, QUARANTINED, TRAINED]):
        ledger.settle(ordinal, verdict)
    ledger.close([3, 5])
    assert ledger.pop_verdicts() == {3: (TRAINED, "")}
    assert [header.key for header in ledger.held_records()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert popped(ledger, 3).keys() == {0, 1, 2}
    assert ledger.held_records() == []


def test_groups_are_known_in_the_order_in_which_they_became_complete() -> None:
    told = list[int]()
    ledger = Ledger(
        shard=0, shards=1, rows=ROWS, seed=SEED, samples=1, tells=lambda: told.append(0)
    )
    leases = ledger.lease(range(3))
    draw(ledger, [leases[2], leases[0]], version=0)
    assert ledger.ended == [2, 0]
    assert [group[0].ordinal for group in ledger.complete()] == [0, 2]
    assert len(told) == 2
    assert ledger.is_open(1) and not ledger.is_open(0)
    ledger.settle(2, TRAINED)
    assert ledger.ended == [0]


@given(
    finished=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2))),
    lost=st.dictionaries(st.integers(-1, 6), st.sets(st.integers(0, 2), min_size=1)),
    times=st.integers(1, 3),
)
def test_lost_samples_are_leased_again_unchanged(
    finished: set[tuple[int, int]], lost: dict[int, set[int]], times: int
) -> None:
    ledger = make(samples=3)
    first = {lease.ordinal: lease for lease in ledger.lease(range(4))}
    for ordinal, sample in finished:
        ledger.finished(record(ordinal, sample))
    for attempt in range(1, times + 1):
        again = ledger.take_back(
            [Lease(ordinal, 0, 0, tuple(sorted(samples))) for ordinal, samples in lost.items()]
        )
        wanted = []
        for ordinal in sorted(lost.keys() & first.keys()):
            missing = tuple(s for s in sorted(lost[ordinal]) if (ordinal, s) not in finished)
            if missing:  # same row and turn, so the same seeds
                wanted.append(
                    Lease(ordinal, first[ordinal].row, first[ordinal].epoch, missing, attempt)
                )
        assert again == wanted
    untouched = first.keys() - lost.keys()
    again = ledger.take_back([first[ordinal] for ordinal in untouched])
    assert all(lease.attempt == 1 for lease in again)


def test_a_group_is_complete_when_every_record_has_every_reward() -> None:
    ledger, names = make(), {"exact", "style"}
    ledger.lease(range(1))
    for sample in range(2):
        ledger.finished(record(0, sample))
        ledger.scored(score(0, sample, "exact"), names)
    assert ledger.complete() == []
    ledger.scored(score(0, 0, "style"), names)
    assert ledger.complete() == []
    ledger.scored(RecordScore(0, 1, {}, {"style": "timeout"}, "too slow"), names)
    ((first, second),) = ledger.complete()
    assert (first.rewards, second.rewards) == ({"exact": 1.0, "style": 1.0}, {"exact": 1.0})
    assert (second.reward_status, second.reason) == (
        {"exact": "ok", "style": "timeout"},
        "too slow",
    )


def test_drawn_is_true_when_no_sample_is_missing_even_without_scores() -> None:
    ledger = make()
    assert ledger.drawn, "nothing is open"
    ledger.lease(range(1))
    ledger.finished(record(0, 1))
    assert not ledger.drawn
    ledger.finished(record(0, 0))
    assert ledger.drawn and ledger.complete() == []


def test_a_score_for_a_record_that_has_not_come_is_ignored() -> None:
    ledger = make()
    ledger.lease(range(1))
    ledger.scored(score(0, 0, "exact"), {"exact"})
    ledger.finished(record(0, 0))
    ledger.finished(record(0, 1))
    ledger.scored(score(0, 1, "exact"), {"exact"})
    assert ledger.complete() == []


def test_a_failed_record_needs_no_score() -> None:
    ledger = make()
    ledger.lease(range(1))
    for sample in range(2):
        ledger.finished(record(0, sample, status=FAILED, reason="prompt_too_long"))
    assert len(ledger.complete()) == 1


def test_what_a_reward_says_does_not_replace_why_a_record_failed() -> None:
    ledger = make(samples=1)
    ledger.lease(range(1))
    ledger.finished(record(0, 0, status=FAILED, reason="prompt_too_long"))
    ledger.scored(replace(score(0, 0, "judge"), reason="no verdict"), {"judge"})
    ((failed,),) = ledger.complete()
    assert failed.reason == "prompt_too_long"


def test_queries_do_not_change_the_ledger() -> None:
    ledger = make()
    ledger.lease(range(2))
    before = copy.deepcopy(vars(ledger))
    ledger.whole(0)
    ledger.complete()
    ledger.state()
    assert vars(ledger) == before


def draw(ledger: Ledger, leases: list[Lease], version: int) -> None:
    for lease in leases:
        for sample in lease.samples:
            ledger.finished(record(lease.ordinal, sample, versions=(version, version)))
            ledger.scored(score(lease.ordinal, sample, "exact"), {"exact"})


@pytest.mark.parametrize("carry", [True, False])
def test_groups_that_a_step_gives_back_are_leased_by_the_next_one(carry: bool) -> None:
    ledgers = [make(shard, 2) for shard in range(2)]
    for ledger in ledgers:
        draw(ledger, ledger.lease(range(6)), version=0)
        for group in ledger.complete():
            ledger.settle(group[0].ordinal, TRAINED)
        ledger.close(range(3))
        ledger.give_back(range(3, 6), [3, 4] if carry else [])
    assert [ledger.pop_verdicts().keys() for ledger in ledgers] == [{0, 2}, {1}]
    held = {header.ordinal for ledger in ledgers for header in ledger.held_records()}
    assert held == ({3, 4} if carry else set())
    again = [lease.ordinal for ledger in ledgers for lease in ledger.lease(range(3, 7))]
    assert sorted(again) == ([5, 6] if carry else [3, 4, 5, 6])
    complete = [group[0].ordinal for ledger in ledgers for group in ledger.complete()]
    assert sorted(complete) == ([3, 4] if carry else [])
    assert not any(ledger.held_records() for ledger in ledgers)


def test_a_carried_group_keeps_the_version_that_sampled_it() -> None:
    ledger = make()
    draw(ledger, ledger.lease(range(2)), version=4)
    for ordinal in range(2):
        ledger.settle(ordinal, FILTERED)
    ledger.close(range(1))
    ledger.give_back([1], [1])
    draw(ledger, ledger.lease([1, 2]), version=5)
    assert [group[0].versions for group in ledger.complete()] == [(4, 4), (5, 5)]
