"""What a window has of groups that are not whole: it goes into a checkpoint, and a resumed window
of any number of shards goes on with it.
"""

from __future__ import annotations

from msgspec.structs import replace

from gcore_core.contract.records import FAILED, GIVEN_BACK, Header, RecordScore, Ref
from gcore_core.controllers.window.subsets import SubsetLedger

SAMPLES = 3
REWARDS = {"exact", "style"}


def made(shard: int = 0, shards: int = 1) -> SubsetLedger:
    return SubsetLedger(lambda: None, shard=shard, shards=shards, rows=11, seed=5, samples=SAMPLES)


def ref(name: str) -> Ref:
    return Ref("node0", name, 0, 8, 0, b"")


def record(ordinal: int, sample: int, **changes: object) -> Header:
    return Header(ordinal, sample, 0, 0, columns=ref("whole"), **changes)  # type: ignore[arg-type]


def score(ordinal: int, sample: int, *names: str, status: str = "ok") -> RecordScore:
    values = dict.fromkeys(names, 1.0) if status == "ok" else {}
    return RecordScore(ordinal, sample, values, dict.fromkeys(names, status))


def with_unfinished() -> SubsetLedger:
    """A ledger whose group 4 has a scored, an unscored and an unfinished sample; of 5 nothing has
    begun, 6 has an unfinished sample, 7 has failed.
    """
    ledger = made()
    ledger.lease_these([4, 5, 6, 7])
    for header in (record(4, 0, attempt=2), record(4, 1), record(7, 0, status=FAILED)):
        ledger.finished(header)
    ledger.scored(score(4, 0, *REWARDS), REWARDS)
    ledger.scored(score(4, 1, "exact"), REWARDS)
    given_back = [
        Header(4, 2, 0, 0, columns=ref("begun"), slot=1, versions=(2, 3), status=GIVEN_BACK),
        Header(6, 1, 0, 0, columns=ref("begun"), slot=2, versions=(3, 3), status=GIVEN_BACK),
        Header(6, 2, 0, 0, status=GIVEN_BACK),  # it has no action
        Header(7, 1, 0, 0, columns=ref("begun"), slot=3, versions=(3, 3), status=GIVEN_BACK),
    ]
    ledger.give_back(given_back)
    return ledger


def test_all_that_groups_have_is_kept_but_of_those_that_cannot_be_used() -> None:
    headers = with_unfinished().unfinished_records()
    assert [header.key for header in headers] == [(4, 0), (4, 1), (4, 2), (6, 1)]
    assert [h.key for h in headers if h.status == GIVEN_BACK] == [(4, 2), (6, 1)]


def test_a_group_with_a_failed_reward_is_not_kept() -> None:
    ledger = with_unfinished()
    ledger.scored(score(4, 1, "style", status="timeout"), REWARDS)
    assert [header.key for header in ledger.unfinished_records()] == [(6, 1)]


def test_a_finished_record_takes_the_place_of_what_was_begun_of_it() -> None:
    ledger = with_unfinished()
    ledger.finished(record(6, 1))
    (kept,) = [header for header in ledger.unfinished_records() if header.ordinal == 6]
    assert kept.status != GIVEN_BACK


def test_resumed_shards_lease_what_is_missing_once_with_what_it_has() -> None:
    headers = with_unfinished().unfinished_records()
    for shards in (1, 2, 3):
        ledgers = [made(shard, shards) for shard in range(shards)]
        unscored = [
            header.key
            for ledger in ledgers
            for header in ledger.go_on_with(map(replace, headers), REWARDS)
        ]
        assert unscored == [(4, 1)]
        leases = [lease for ledger in ledgers for lease in ledger.lease_these([4, 6])]
        assert sorted((lease.ordinal, lease.samples) for lease in leases) == [
            (4, (2,)),
            (6, (0, 1, 2)),
        ]
        begun = {
            (lease.ordinal, sample): (one.slot, one.versions)
            for lease in leases
            for sample, one in lease.begun
        }
        assert begun == {(4, 2): (1, (2, 3)), (6, 1): (2, (3, 3))}
        assert {lease.ordinal: lease.attempt for lease in leases} == {4: 2, 6: 0}


def test_a_group_that_goes_on_is_complete_when_the_rest_has_come_and_all_is_scored() -> None:
    headers = with_unfinished().unfinished_records()
    ledger = made()
    (unscored,) = ledger.go_on_with(headers, REWARDS)
    assert (unscored.rewards, unscored.reward_status, unscored.receipt) == ({}, {}, 0)
    ledger.lease_these([4, 6])
    ledger.finished(record(4, 2))
    ledger.scored(score(4, 2, *REWARDS), REWARDS)
    assert not ledger.complete()
    ledger.scored(score(4, 1, *REWARDS), REWARDS)
    (group,) = ledger.complete()
    assert [header.key for header in group] == [(4, 0), (4, 1), (4, 2)]


def test_a_group_that_was_whole_and_had_no_verdict_is_complete_at_once() -> None:
    ledger = made()
    ledger.lease_these([4])
    for sample in range(SAMPLES):
        ledger.finished(record(4, sample))
        ledger.scored(score(4, sample, *REWARDS), REWARDS)
    resumed = made()
    assert resumed.go_on_with(ledger.unfinished_records(), REWARDS) == []
    assert resumed.lease_these([4]) == []
    assert len(resumed.complete()) == 1


def test_samples_that_groups_no_longer_have_are_left_out() -> None:
    headers = [record(4, SAMPLES), record(4, 0)]
    ledger = made()
    ledger.go_on_with(headers, set())
    (lease,) = ledger.lease_these([4])
    assert lease.samples == (1, 2)
