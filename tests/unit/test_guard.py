"""The process before the supervisor, and the signals that it passes on."""

from __future__ import annotations

import os
import signal

import pytest

from gcore_core.run.signals import PASSED_ON, Signals


@pytest.mark.parametrize("first", ["directly", "passed on"])
def test_a_signal_that_comes_directly_and_passed_on_counts_once(first: str) -> None:
    numbers = [int(signal.SIGTERM), PASSED_ON + signal.SIGTERM]
    if first == "passed on":
        numbers.reverse()
    asked: list[int] = []
    signals = Signals()
    with signals.handled():
        signals._act = asked.append
        for number in numbers:
            os.kill(os.getpid(), number)
    assert asked == [signal.SIGTERM]
    assert signals.code == 143


def test_a_second_signal_that_comes_both_ways_is_the_second() -> None:
    asked: list[int] = []
    signals = Signals()
    with signals.handled():
        signals._act = asked.append
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), PASSED_ON + signal.SIGINT)
    assert asked == [signal.SIGINT, signal.SIGINT]
