"""The process before the supervisor, and the signals that it passes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


SCRIPT = """
import os, signal, sys, time
from gcore_core.contract.errors import WorkerDied
from gcore_core.run import restart_supervisor

class Saved:
    def __init__(self, directory): pass
    def steps(self): return [1]

restart_supervisor.Checkpoints = Saved
begun = restart_supervisor.Begun("run", 2)
first = restart_supervisor.Start(file=restart_supervisor.Path("job.yaml"))
n_children = 0
SUPERVISE
fork = restart_supervisor._Starter.fork
def counted(self):
    global n_children
    n_children += 1
    return fork(self)
restart_supervisor._Starter.fork = counted
try:
    sys.exit(restart_supervisor.with_restarts(first, supervise))
except WorkerDied as error:
    print(error.what)
    sys.exit(5)
"""


def restarting(supervise: str) -> subprocess.Popen[str]:
    """Starts a process that restarts a function, which Python code defines."""
    script = SCRIPT.replace("SUPERVISE", supervise)
    return subprocess.Popen([sys.executable, "-uc", script], stdout=subprocess.PIPE, text=True)


def test_a_signal_that_comes_before_the_supervisor_handles_any_ends_it_with_its_code() -> None:
    with restarting("def supervise(start, link): print('up'); signal.pause()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(30) == 143


def test_a_killed_supervisor_is_replaced_although_its_child_lives() -> None:
    """The child is forked, so it has the supervisor's file descriptors."""
    text = """
def supervise(start, link):
    if start.resume is not None:
        return 7
    link.tell(begun)
    child = os.fork()
    if child == 0:
        os.close(1)
        signal.pause()
    print(child)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with restarting(text) as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        try:
            assert process.wait(30) == 7
        finally:
            os.kill(left, signal.SIGKILL)


def test_a_supervisor_that_is_killed_before_it_tells_goes_on_with_the_run_of_the_first() -> None:
    text = """
def supervise(start, link):
    if n_children == 3:
        return 7 if (str(start.resume), start.restarts) == ("run", 0) else 1
    if n_children == 1:
        link.tell(begun)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with restarting(text) as process:
        assert process.wait(30) == 7


def test_a_loss_that_the_supervisor_has_told_is_counted_too() -> None:
    text = """
def supervise(start, link):
    link.tell(restart_supervisor.Begun("run", 3 if start.restarts is None else start.restarts))
    link.tell(restart_supervisor.Lost())
    print(start.restarts)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with restarting(text) as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 5
    again = "the supervisor ended with signal SIGKILL; it is started again\n"
    assert output == f"None\n{again}1\nended with signal SIGKILL\n"


def test_a_signal_that_comes_while_there_is_no_supervisor_ends_the_run() -> None:
    text = """
def supervise(start, link):
    link.tell(begun)
    if n_children == 1:
        os.kill(os.getpid(), signal.SIGKILL)

next_start = restart_supervisor._Starter.next_start
def signalled(self, number):
    os.kill(os.getpid(), signal.SIGTERM)
    return next_start(self, number)
restart_supervisor._Starter.next_start = signalled
"""
    with restarting(text) as process:
        assert process.wait(30) == 143


def test_the_end_by_a_signal_without_a_name_is_told_by_its_number() -> None:
    number = signal.SIGRTMIN + 20
    with restarting(f"def supervise(start, link): os.kill(os.getpid(), {number})") as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 5
    assert output == f"ended with signal {number}\n"


@pytest.mark.parametrize("code", [0, 3])
def test_a_supervisor_that_is_ended_before_its_work_is_a_failure_whatever_its_exit_code(
    code: int,
) -> None:
    with restarting(f"def supervise(start, link): link.tell(begun); os._exit({code})") as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 5
    assert output == f"its process was ended with exit code {code} before the run was over\n"


def test_a_child_that_a_function_has_forked_does_not_end_the_supervisors_work() -> None:
    text = """
def supervise(start, link):
    link.tell(begun)
    if os.fork():
        os.wait()
        os._exit(0)
    return 0
"""
    with restarting(text) as process:
        assert process.wait(30) == 5
