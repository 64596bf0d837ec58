"""The main thread runs what users wrote, one call at a time, and survives what that raises."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.run.signals import Signals
from gcore_core.runtime.compute import DirectCompute, ThreadCompute
from gcore_core.runtime.main_thread import (
    MainThread,
    ThreadedLimits,
    carried,
    in_main_thread,
)

MAIN = threading.main_thread()


def raises(error: BaseException) -> Callable[[], NoReturn]:
    def work() -> NoReturn:
        raise error

    return work


# -- the thread of users ---------------------------------------------------------------------------


def test_a_loop_beside_the_main_thread_has_its_calls_made_there_in_order() -> None:
    main = MainThread()
    called: list[tuple[int, threading.Thread]] = []

    def work(number: int) -> int:
        called.append((number, threading.current_thread()))
        return number

    async def go() -> list[int]:
        assert threading.current_thread() is not MAIN
        compute = ThreadCompute(main)
        return await asyncio.gather(*(compute(work, number) for number in range(20)))

    assert main.run(go) == list(range(20))
    assert called == [(number, MAIN) for number in range(20)]


def test_a_loop_waits_for_a_direct_call_and_goes_on_after_it() -> None:
    """So no time limit of the loop passes while somebody looks at the call in a debugger."""
    seen: list[str] = []

    async def other() -> None:
        seen.append("other")

    async def go() -> threading.Thread:
        compute = DirectCompute()
        await asyncio.sleep(0)
        task = asyncio.ensure_future(other())

        def work() -> threading.Thread:
            before = list(seen)
            assert asyncio.run(nothing()) is None
            assert seen == before
            return threading.current_thread()

        thread = await compute(work)
        await task
        return thread

    async def nothing() -> None:
        pass

    assert MainThread().run(go) is MAIN


async def test_without_a_main_thread_around_it_a_call_is_made_where_it_is_asked_for() -> None:
    loop = asyncio.get_running_loop()
    assert await DirectCompute()(asyncio.get_running_loop) is loop
    assert in_main_thread(threading.current_thread) is threading.current_thread()


def test_what_the_coroutine_raises_is_raised_in_the_main_thread() -> None:
    async def go() -> None:
        in_main_thread(raises(KeyError("here")))

    with pytest.raises(KeyError, match="here"):
        MainThread().run(go)


def test_a_ctrl_c_cancels_the_coroutine_and_waits_for_its_end() -> None:
    ended = []

    async def go() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            in_main_thread(ended.append, threading.current_thread())

    with pytest.raises(asyncio.CancelledError):
        MainThread().run(go)
    assert ended


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (StopIteration("no more"), "StopIteration: no more"),
        (asyncio.CancelledError(), "CancelledError"),
        (concurrent.futures.CancelledError(), "CancelledError"),
        (GeneratorExit(), "GeneratorExit"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_would_end_a_loop_in_silence_reaches_the_caller(
    error: BaseException, text: str
) -> None:
    main = MainThread()

    async def go() -> list[Any]:
        computes = [ThreadCompute(main), DirectCompute()]
        calls = (compute(raises(error)) for compute in computes)
        failed = await asyncio.gather(*calls, return_exceptions=True)
        return [*failed, *await asyncio.gather(*(compute(int, "7") for compute in computes))]

    *failed, seven, again = main.run(go)
    assert [(type(one), str(one)) for one in failed] == [(RuntimeError, text)] * 2
    assert all(one.__cause__ is error for one in failed)
    assert (seven, again) == (7, 7)


def test_the_place_of_such_an_error_stays_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        carried(raises(SystemExit(3)))
    assert caught.traceback[-1].name == "work"


def test_a_handler_that_a_function_left_behind_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It raises when the function has returned, as an alarm does that nobody took back."""
    main = MainThread()
    rung = threading.Event()

    def ring(number: int, frame: Any) -> None:
        rung.set()
        raise TimeoutError("too late")

    before = signal.signal(signal.SIGALRM, ring)

    async def go() -> int:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while not rung.is_set():
            await asyncio.sleep(0.001)
        return await ThreadCompute(main)(int, "7")

    try:
        assert main.run(go) == 7
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "a handler that a function has set raised when that had returned" in caplog.text
    assert "too late" in caplog.text


def test_an_interrupt_that_comes_too_late_for_its_function_loses_no_call() -> None:
    """A timer that nobody took back raises KeyboardInterrupt in the main thread so."""
    main = MainThread()
    interrupts = []

    def work() -> None:
        main.submit(int).result()  # from here on the main thread serves
        for number in range(50):
            _thread.interrupt_main()  # nothing runs; it shows when the next call wakes the thread
            answers.append(main.submit(int, number).result())
        main.end()

    answers: list[int] = []
    thread = threading.Thread(target=work)
    thread.start()
    main.serve(lambda: interrupts.append(1))
    thread.join()
    assert answers == list(range(50))


def test_a_call_that_is_cancelled_before_it_begins_is_not_made() -> None:
    main = MainThread()
    made = []

    async def go() -> None:
        compute = ThreadCompute(main)
        begun, over = threading.Event(), threading.Event()

        def first() -> None:
            begun.set()
            over.wait()

        running = asyncio.ensure_future(compute(first))
        waiting = asyncio.ensure_future(compute(made.append, 1))
        while not begun.is_set():
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        over.set()
        await running

    main.run(go)
    assert made == []


# -- what only the main thread may do --------------------------------------------------------------


@pytest.fixture
def limits() -> Iterator[ThreadedLimits]:
    limits = ThreadedLimits()
    original = signal.signal
    with limits.noticed():
        yield limits
    assert signal.signal is original


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="a pool")
    thread.start()
    thread.join()


def hidden(number: signal.Signals) -> Callable[[], None]:
    """Sets a handler, and hides it where that fails."""

    def work() -> None:
        with contextlib.suppress(ValueError):
            signal.signal(number, signal.SIG_DFL)

    return work


def test_a_time_limit_in_a_thread_is_told_once_with_its_place(limits: ThreadedLimits) -> None:
    in_thread(hidden(signal.SIGALRM))
    with pytest.raises(ContractError) as caught:
        limits.check("rewards.right")
    line = hidden(signal.SIGALRM).__code__.co_firstlineno + 2
    text = str(caught.value)
    assert text.startswith("rewards.right: a time limit by SIGALRM was set in the thread 'a pool'.")
    assert f"at {__file__}:{line}\n" in text
    limits.check("rewards.right")


def test_handlers_in_the_main_thread_and_of_no_timer_are_nobodys_business(
    limits: ThreadedLimits,
) -> None:
    before = signal.getsignal(signal.SIGALRM)
    hidden(signal.SIGALRM)()
    assert signal.signal(signal.SIGALRM, before) == signal.SIG_DFL
    in_thread(hidden(signal.SIGTERM))  # as servers do, which live without it
    limits.check("rewards.right")


def test_a_run_in_another_thread_says_that_it_needs_the_main_one() -> None:
    told: list[ConfigError] = []

    def work() -> None:
        try:
            with Signals().handled():
                pass
        except ConfigError as error:
            told.append(error)

    in_thread(work)
    assert "in the main thread of its process alone" in str(told[0])


def test_a_process_that_a_function_has_forked_ends_by_its_own_signals() -> None:
    """As a pool's does, which is told to end by SIGTERM; the run is not told of it."""
    signals = Signals()
    with signals.handled():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert signals.code == 0
