"""The contract of a meter: it names the devices that it was asked for, and seconds only grow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gcore_core.contract.metering import Meter
from gcore_testing.contracts.base import Contract


class MeterContract(Contract):
    """To test a meter, override the fixture ``meter``; its devices 0 and 1 are asked for."""

    @pytest.fixture
    def meter(self) -> Iterator[Any]:
        raise NotImplementedError("give the fixture `meter`")

    def test_it_is_a_meter(self, meter: Any) -> None:
        assert isinstance(meter, Meter)

    def test_it_reads_the_devices_that_it_is_asked_for(self, meter: Any) -> None:
        assert meter.used_s({}) == {}
        assert meter.used_s({1: [os.getpid()]}).keys() <= {1}
        used_s = meter.used_s({0: [os.getpid()], 1: [os.getpid()]})
        assert used_s.keys() == {0, 1}
        assert all(isinstance(seconds, float) and seconds >= 0 for seconds in used_s.values())

    def test_seconds_never_get_fewer(self, meter: Any) -> None:
        """Neither while a worker works nor when it has ended and another took its place."""
        before = meter.used_s({0: [os.getpid()]})[0]
        for pids in ([os.getpid()], [], [_ended_pid()], [os.getpid()]):
            sum(range(100_000))
            after = meter.used_s({0: pids})[0]
            assert after >= before
            before = after

    def test_it_can_be_closed(self, meter: Any) -> None:
        meter.used_s({0: [os.getpid()]})
        meter.close()


def _ended_pid() -> int:
    """Returns the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
