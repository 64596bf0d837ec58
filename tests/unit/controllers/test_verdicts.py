"""What is said when too many groups cannot be used: only what failed, its log, and what to set."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import pytest

from gcore_core.builtin.filters import KeepAll
from gcore_core.contract.errors import DataError, TrainingError
from gcore_core.contract.job_settings import RewardSettings
from gcore_core.contract.records import (
    FAILED,
    FILTERED,
    FINISHED,
    QUARANTINED,
    TRAINED,
    TRUNCATED,
    Header,
    RecordScore,
)
from gcore_core.controllers.algorithm_answers import filter_code
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.generation.ahead import Ahead
from gcore_core.controllers.generation.in_step import InStep
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.generation.producer import Producer
from gcore_core.controllers.generation.schedule import Bounds, GroupReport, Schedule
from gcore_core.controllers.generation.verdicts import (
    Verdict,
    check_any_fits,
    latest_too_long,
    too_many_failures,
    verdict_on,
)


def header(sample: int, reason: str = "", **statuses: str) -> Header:
    status = TRUNCATED if reason == "length" else FINISHED
    return Header(
        ordinal=0,
        sample=sample,
        row=0,
        seed=0,
        status=status,
        reason=reason,
        reward_status=statuses,
    )


def test_the_finish_reason_of_a_record_is_no_reason_of_a_failed_reward() -> None:
    group = [header(0, "length", exact="ok"), header(1, "rewards.exact: KeyError", exact="failed")]
    error = too_many_failures([group], 1, 1, {"exact": "run/logs/scorer.0.log"})
    assert str(error).splitlines() == [
        "rewarding: 1 of 1 groups could not be used",
        "  rewards.exact: KeyError",
        "  fix the reward or the data; controller.config.failure_limit says how many may fail",
        "  tracebacks: run/logs/scorer.0.log",
    ]


def test_a_failed_reward_is_reported_although_the_record_was_truncated() -> None:
    ledger = Ledger(shard=0, shards=1, rows=4, seed=0, samples=1)
    lease = ledger.lease([0])[0]
    drawn = msgspec.structs.replace(header(0, "length"), ordinal=lease.ordinal)
    assert ledger.finished(drawn)
    failed = RecordScore(lease.ordinal, 0, {}, {"exact": "failed"}, "rewards.exact: KeyError")
    late = RecordScore(lease.ordinal, 0, {}, {"style": "timeout"}, "rewards.style: no answer")
    ledger.scored(failed, {"exact", "style"})
    ledger.scored(late, {"exact", "style"})
    assert ledger.whole(lease.ordinal)[0].reason == "rewards.exact: KeyError"


def test_error_for_a_slow_reward_names_the_setting_for_more_time() -> None:
    group = [header(0, f"rewards.slow: no answer {i}", slow="timeout") for i in range(9)]
    lines = str(too_many_failures([group], 1, 1, {"slow": "run/logs/scorer.0.log"})).splitlines()
    assert len(lines) == 6, "an error shows six lines, and what to do is among them"
    assert lines[-2:] == [
        "  or give it more time: rewards.slow.timeout_s",
        "  one record fails all of its call; where it was held: run/logs/scorer.0.log",
    ]


@pytest.mark.parametrize(
    ("truncated", "reasons", "verdict"),
    [
        ("train", ["length", "length"], TRAINED),
        ("mask", ["length", "length"], FILTERED),
        ("mask", ["length", ""], TRAINED),
    ],
)
def test_a_group_of_truncated_records_alone_teaches_nothing_when_they_are_masked(
    truncated: str, reasons: list[str], verdict: str
) -> None:
    group = [header(i, reason, exact="ok") for i, reason in enumerate(reasons)]
    config = SyncConfig(truncated=truncated)
    keep_all = KeepAll()
    settled = verdict_on(
        group, config, {"exact": RewardSettings()}, keep_all, filter_code(keep_all)
    )
    assert settled.verdict == verdict
    assert settled.reason == ("truncated" if verdict == FILTERED else "")


def failed(row: int, reason: str) -> list[Header]:
    return [Header(row, sample, row, 0, status=FAILED, reason=reason) for sample in range(2)]


def settled(group: list[Header], **settings: str) -> Verdict:
    keep_all = KeepAll()
    config = SyncConfig(**settings)
    return verdict_on(group, config, {"exact": RewardSettings()}, keep_all, filter_code(keep_all))


def test_a_prompt_that_is_too_long_is_left_out_and_is_no_failure() -> None:
    one = settled(failed(3, "prompt_too_long: 811 tokens, and the context has 512"))
    assert (one.verdict, one.reason) == (FILTERED, "prompt_too_long")


def test_a_prompt_that_is_too_long_ends_the_run_with_its_tokens_where_that_is_wanted() -> None:
    with pytest.raises(DataError, match=r"row 3 (?s:.*)811 tokens, and"):
        settled(failed(3, "prompt_too_long: 811 tokens, and the context has 512"), too_long="error")


def test_records_that_fail_are_counted_by_the_word_of_their_reason() -> None:
    one = settled(failed(3, "prompt_unreadable: System role not supported"))
    assert (one.verdict, one.reason) == (QUARANTINED, "prompt_unreadable")


def test_too_many_rows_that_cannot_be_read_are_named_with_why() -> None:
    groups = [failed(row, "prompt_unreadable: System role not supported") for row in (3, 5)]
    assert str(too_many_failures(groups, 2, 2, {})).splitlines()[1:3] == [
        "  row 3: prompt_unreadable: System role not supported",
        "  row 5: prompt_unreadable: System role not supported",
    ]


def long_groups(count: int) -> list[Verdict]:
    return [
        settled(failed(row, f"prompt_too_long: {811 + row} tokens, and the context has 512"))
        for row in range(count)
    ]


def test_a_run_whose_prompts_are_all_too_long_ends_and_names_rows() -> None:
    too_long = latest_too_long(long_groups(6))
    check_any_fits(too_long)
    too_long = latest_too_long([*too_long, *long_groups(6)])
    with pytest.raises(DataError) as raised:
        check_any_fits(too_long)
    assert str(raised.value).splitlines()[:2] == [
        "generation: the last 12 prompts are all longer than the context allows",
        "  row 0: prompt_too_long: 811 tokens, and the context has 512",
    ]


def test_a_prompt_that_fits_begins_the_count_again() -> None:
    fits = Verdict(99, [header(0, exact="ok")], TRAINED, "")
    assert latest_too_long([*long_groups(20), fits]) == []
    assert len(latest_too_long([fits, *long_groups(9)])) == 9


@pytest.mark.parametrize("limit", [50.0, -0.1, float("nan")])
def test_a_limit_of_failures_that_is_no_share_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="failure_limit must be from 0 to 1"):
        SyncConfig(failure_limit=limit)


@pytest.mark.parametrize("band", [math.inf, math.nan, 0.0, -1.0])
def test_a_band_that_no_gap_could_leave_is_refused(band: float) -> None:
    with pytest.raises(ValueError, match="logprob_band must be positive and finite"):
        SyncConfig(logprob_band=band)


FAILED_GROUP = Verdict(0, [header(0, "no luck", exact="failed")], QUARANTINED, "reward_failed")


def test_groups_that_fail_before_all_others_are_held_against_the_whole_step() -> None:
    bounds = Bounds(prompts=4, limit=40, exact=False, steps=12)
    schedule = InStep(bounds=bounds, step=0, base=0, carries=False)
    assert len(schedule.issue()) == 4
    with pytest.raises(TrainingError, match="3 of 3 groups could not be used"):
        fail(schedule, 3)


def test_groups_that_fail_first_in_a_running_window_are_held_against_what_is_drawn() -> None:
    bounds = Bounds(prompts=4, ahead=1, age=1, limit=40, exact=False, steps=12)
    schedule = Ahead(bounds=bounds, step=0, base=0)
    schedule.look(0, 0, [])
    assert len(schedule.issue()) == 8
    with pytest.raises(TrainingError, match="5 of 5 groups could not be used"):
        fail(schedule, 5)


def fail(schedule: Schedule, groups: int) -> None:
    """So many groups fail, one after the other; the last one is too much."""
    window = SimpleNamespace(
        _config=SyncConfig(prompts=4),
        _context=SimpleNamespace(facts=SimpleNamespace(output="")),
        _schedule=schedule,
        _latest=[FAILED_GROUP],
    )
    for ordinal in range(groups):
        schedule.look(0, 0, [GroupReport(ordinal, False, True, 0, 0.0, 0.0)])
        if ordinal < groups - 1:
            Producer._raise_if_too_many_failed(window)  # type: ignore[arg-type]
    Producer._raise_if_too_many_failed(window)  # type: ignore[arg-type]
