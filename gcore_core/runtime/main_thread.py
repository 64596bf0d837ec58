"""Leaves the main thread of a process to what users wrote; its event loop runs in another one.

Python runs handlers of signals in the main thread alone, and libraries bound their own time by
them. ``asyncio.run`` works only in a thread where no event loop runs. So whatever calls a function
of a user, or a provider, has that done in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Executor, Future
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from gcore_core.contract.errors import ContractError

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
#: Signals of timers. Nothing but a time limit has a handler of its own for them.
_TIMERS = {signal.SIGALRM: "SIGALRM", signal.SIGVTALRM: "SIGVTALRM", signal.SIGPROF: "SIGPROF"}
_STARTS_S = 1.0  # a thread begins to run within that
_LIBRARY = Path(os.__file__).parent
_CORE = Path(__file__).parents[1]


class MainThread(Executor):
    """Runs calls in the main thread, one at a time, in the order in which they are submitted."""

    def __init__(self) -> None:
        # None ends the serving. A call stays here until it is answered: a KeyboardInterrupt may
        # come behind any step of ``serve``, and must not lose one.
        self._calls = deque[tuple[Future[Any], Callable[[], Any]] | None]()
        self._more = queue.SimpleQueue[None]()  # has an item for each, to wait for

    def submit(
        self,
        fn: Callable[P, T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]:
        """Calls a function in the main thread. Any thread may ask for that."""
        future: Future[T] = Future()
        self._add((future, partial(fn, *args, **kwargs)))
        return future

    def _add(self, call: tuple[Future[Any], Callable[[], Any]] | None) -> None:
        self._calls.append(call)
        self._more.put(None)

    def serve(self, interrupted: Callable[[], None]) -> None:
        """Runs what is submitted until ``end``. The main thread calls it.

        interrupted: called after a KeyboardInterrupt that came while no call ran.
        """
        while True:
            try:
                while not self._calls:
                    self._more.get()
                if self._calls[0] is None:
                    return
                _answer(*self._calls[0])
                self._calls.popleft()
            except KeyboardInterrupt:
                interrupted()
            except BaseException:  # isolation point: the next call has nothing to do with it
                log.exception("a handler that a function has set raised when that had returned")

    def end(self) -> None:
        """Lets ``serve`` return when it has done what was submitted before."""
        self._add(None)

    def run(self, made: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine to its end in another thread, and serves meanwhile.

        Within the coroutine ``in_main_thread`` leads here. A KeyboardInterrupt cancels it.
        """
        loop = asyncio.new_event_loop()
        outcome: Future[T] = Future()
        token = _present.set(self)
        task = loop.create_task(made())

        async def ended() -> T:
            return await task

        def work() -> None:
            begun.set()
            try:
                with asyncio.Runner(loop_factory=lambda: loop) as runner:
                    result = runner.run(ended())
            except BaseException as error:  # it is raised again in the main thread
                outcome.set_exception(error)
            else:
                outcome.set_result(result)
            finally:
                self.end()

        thread = threading.Thread(target=work, name="event loop")
        begun = threading.Event()
        try:
            try:
                thread.start()
            except KeyboardInterrupt:
                _cancel(loop, task)
                if not begun.wait(_STARTS_S):  # it came before the thread did
                    raise
            self.serve(lambda: _cancel(loop, task))
            thread.join()
            return outcome.result()
        finally:
            _present.reset(token)


def _answer(future: Future[Any], work: Callable[[], Any]) -> None:
    """Makes a call, unless it was made or cancelled before. Raises what comes when it is over."""
    if future.running():
        future.set_exception(RuntimeError("it was interrupted as it ended"))
    if future.done() or not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        if future.done():
            raise
        future.set_exception(error)
        del future, work  # the error knows this frame: together they would be a cycle


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: it is over
        loop.call_soon_threadsafe(task.cancel)


#: The main thread as an event loop in another thread reaches it; None: that loop runs in it.
_present: ContextVar[MainThread | None] = ContextVar("main_thread", default=None)


def in_main_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function of a user in the main thread, and waits for it; see ``carried``.

    It sees a copy of the caller's context variables. Without a ``MainThread`` around it the call is
    made here.
    """
    main = _present.get()
    if main is None or threading.current_thread() is threading.main_thread():
        return carried(function, *args, **kwargs)
    call = partial(carried, function, *args, **kwargs)
    return main.submit(copy_context().run, call).result()


def carried(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function, and raises RuntimeError for an error that would not reach who waits for it.

    Of these, SystemExit and KeyboardInterrupt would end an event loop, a CancelledError would look
    like a cancellation of the waiter, and a future takes no StopIteration.
    """
    try:
        return function(*args, **kwargs)
    except (StopIteration, CancelledError) as error:
        raise _named(error) from error
    except Exception:
        raise
    except BaseException as error:
        raise _named(error) from error


@contextlib.contextmanager
def exits_told() -> Iterator[None]:
    """Raises ContractError for a SystemExit inside the block.

    Else a call of ``sys.exit`` in what a plugin or a user wrote would end the command, and with the
    exit code 0, as if all were well.
    """
    try:
        yield
    except SystemExit as error:
        stack = traceback.extract_tb(error.__traceback__)
        places = [f"{frame.filename}:{frame.lineno}" for frame in stack if _is_known(frame)]
        raise ContractError(
            f"code of the job or of a plugin asked this process to end, by SystemExit({error}).",
            where=places[-1] if places else "",
            why="the command was not over",
            todo="raise an error in its place",
        ) from error


def _named(error: BaseException) -> RuntimeError:
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return RuntimeError(text).with_traceback(error.__traceback__)


class ThreadedLimits:
    """Notices time limits that are set in other threads than the main one.

    There Python refuses the handler of a signal by a ValueError. A function that counts errors as
    wrong answers hides that, and would give every answer the reward 0.
    """

    def __init__(self) -> None:
        self._noticed: ContractError | None = None

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Notices them inside the block, in the whole process."""
        original = signal.signal

        def noticing(signalnum: Any, handler: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            if not is_main and signalnum in _TIMERS:
                self._noticed = _refusal(_TIMERS[signalnum])
            return original(signalnum, handler)

        signal.signal = noticing
        try:
            yield
        finally:
            signal.signal = original

    def check(self, where: str) -> None:
        """Raises ContractError, once, where one was set since the last check.

        where: what the error names; "" leaves that to the catcher.
        """
        noticed, self._noticed = self._noticed, None
        if noticed is not None:
            noticed.where = where
            raise noticed


def _refusal(name: str) -> ContractError:
    """Makes the error for a handler that is set two calls further out."""
    stack = traceback.extract_stack(sys._getframe(2))
    places = [f"{frame.filename}:{frame.lineno}" for frame in reversed(stack) if _is_known(frame)]
    ends = list(dict.fromkeys([*places[:1], *places[-1:]]))
    return ContractError(
        f"a time limit by {name} was set in the thread {threading.current_thread().name!r}.",
        why=f"at {', called from '.join(ends) or 'an unknown line'}\n"
        "Python allows that in the main thread alone, and code that counts its error as a wrong "
        "answer goes on with wrong values",
        todo="set it in the thread in which the function is called, or switch it off where a "
        "library sets it, and bound the whole call",
    )


def _is_known(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is neither Python's own nor the core's."""
    path = Path(frame.filename)
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    is_own = path.is_relative_to(_CORE)
    return path.is_file() and not is_own and (is_installed or not path.is_relative_to(_LIBRARY))
