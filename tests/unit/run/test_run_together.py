"""Programs that wait for each other, as ranks of a trainer do: whoever failed is named."""

from __future__ import annotations

import pytest
from gcore_testing.runs import run_together

WAITS = ["-c", "print('waiting', flush=True); import time; time.sleep(600)"]
FAILS = ["-c", "raise SystemExit('this rank has no weights')"]
PRINTS_MUCH = ["-c", "print('x' * 1_000_000)"]


def test_a_program_that_fails_is_named_though_the_others_wait_for_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        run_together([WAITS, FAILS], timeout_s=3)
    said = str(caught.value)
    assert "rank 1 ended with 1:\nthis rank has no weights" in said
    assert "rank 0 ended with -9:\nwaiting" in said


def test_what_one_prints_does_not_hold_up_the_others() -> None:
    run_together([PRINTS_MUCH, PRINTS_MUCH], timeout_s=60)
