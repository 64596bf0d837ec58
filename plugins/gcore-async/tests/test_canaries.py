"""A replica that keeps old weights, all or half of them, is found by canaries within one step.

No record of an asynchronous step is fresh, so nothing else would compare log-probs. The generators
here cannot hash what they hold, as some engines cannot.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stale_replicas import CASES, WRONG, finished, named

pytestmark = pytest.mark.rest

QUICK = [("all", 1, "wait"), ("half", 0, "recompute")]
OTHERS = sorted(set(CASES) - set(QUICK))


@pytest.mark.parametrize(
    ("kept", "replica", "midway"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_a_replica_that_keeps_weights_is_named_within_one_step(
    kept: str, replica: int, midway: str, tmp_path: Path
) -> None:
    code, run = finished(tmp_path, kept, replica, midway)
    assert code == 6, run.output
    assert named(run.output, replica), run.output
    # Nothing that was trained on such samples is saved.
    saved = sorted(path.name for path in (run.path / "checkpoints").glob("step-??????"))
    assert saved[-1:] == [f"step-00000{WRONG - 1}"], saved


def test_where_nothing_is_saved_no_step_is_trained_before_it_is_named(tmp_path: Path) -> None:
    """Generators score canaries while the run goes on, until its next update."""
    code, run = finished(tmp_path, "all", 1, "recompute", every=0)
    assert code == 6, run.output
    assert named(run.output, 1), run.output
    assert f"both sides scored canaries under version {WRONG}" in run.output
    assert len(run.metrics()) == WRONG + 1  # before the first step, and after each


@pytest.mark.parametrize("every", [0, 1])
def test_replicas_that_hold_what_was_pushed_give_no_alarm(every: int, tmp_path: Path) -> None:
    code, run = finished(tmp_path, "", 0, "wait", every=every)
    assert code == 0, run.output
    seen = [row.get("sentinel/canary_actions", 0) for row in run.metrics()[1:]]
    # The first step's own records are compared. Where no checkpoint waits for the canaries of a
    # push, the next step tells what they said.
    assert min(seen[1:] if every else seen[2:]) > 0, "a step compared nothing"
    # The gaps are those of the canaries, in steps that had nothing else to compare.
    rows = run.metrics()[1:]
    assert all("logprob_gap_max" in row for row in (rows if every else rows[:1] + rows[2:]))


@pytest.mark.slow
def test_without_canaries_nobody_sees_it(tmp_path: Path) -> None:
    """Guards the tests above: it is the canaries that find it."""
    code, run = finished(tmp_path, "half", 0, "wait", sentinel={"config": {"canaries": 0}})
    assert code == 0, run.output
    # A step that compared nothing does not say that both sides agreed.
    late = run.metrics()[2:]
    assert late and not any("logprob_gap_max" in row for row in late)
