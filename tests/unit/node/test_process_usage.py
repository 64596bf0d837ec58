"""What a node agent tells of its processes: CPU seconds so far, and the peak of their memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import pytest

from gcore_core.node.agent import process_usage


def test_usage_is_cpu_seconds_with_ended_children_and_peak_memory() -> None:
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    memory = bytearray(b"x" * (64 << 20))
    del memory  # the peak stays
    cpu_s, peak_mib = process_usage(os.getpid())
    told = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    assert cpu_s == pytest.approx(sum(item.ru_utime + item.ru_stime for item in told), abs=0.5)
    assert told[1].ru_utime > 0.01
    assert peak_mib == pytest.approx(told[0].ru_maxrss / 1024, rel=0.05)


def test_usage_counts_what_takes_less_than_a_hundredth_of_a_second() -> None:
    before_first_s = time.process_time()
    first_s, _ = process_usage(os.getpid())
    after_first_s = time.process_time()
    while time.process_time() < after_first_s + 0.002:
        pass
    before_second_s = time.process_time()
    second_s, _ = process_usage(os.getpid())
    after_second_s = time.process_time()
    least_s = before_second_s - after_first_s
    most_s = after_second_s - before_first_s
    assert least_s <= second_s - first_s + 1e-6
    assert second_s - first_s <= most_s + 1e-6


def test_an_ended_process_is_reported_as_ended_even_before_it_is_reaped() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()  # ended, and not waited for
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError, match="has ended"):
        process_usage(process.pid)
    process.wait()
    with pytest.raises(ProcessLookupError, match="has ended"):
        process_usage(process.pid)
