"""Tells the observers of a job what happens, each in a process of its own.

- The run never waits for an observer before its end: what it is told waits in a queue.
- One that raises, or whose process ends, is told to the user once; the run goes on without it.
- One that needs longer than ``observers.<name>.timeout_s`` for one report, or is ``MOST_WAITING``
  reports behind, is ended and told likewise.
- At its end, once its other processes have ended, a run waits ``timeout_s`` for each observer to
  take what is left, and then ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from gcore_core.config.plan import Plan
from gcore_core.config.plugins import Observers
from gcore_core.contract import run_files
from gcore_core.contract.errors import GcoreError, WorkerDied
from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure
from gcore_core.node.observing import (
    CheckpointSaved,
    Event,
    Failed,
    ObserverAnswer,
    ObserverSpec,
    RunEnded,
    RunStarted,
    StepEnded,
    WeightsPublished,
    WorkerFailed,
    next_message,
)
from gcore_core.runtime.main_thread import in_main_thread
from gcore_core.wire.framing import framed

log = logging.getLogger(__name__)
#: So many reports may wait for an observer: a report of a large job has some ten KiB.
MOST_WAITING = 10_000
_PAUSE_S = 0.02
_KILLED_WITHIN_S = 5.0
_GOES_ON = "the run goes on without it"


class ObserverProcess:
    """Is one observer, as the supervisor sees it.

    Two threads write to and read from its process, so that nobody else ever waits for that. A
    method is called from one thread alone.
    """

    def __init__(self, spec: ObserverSpec, log_file: Path) -> None:
        self.name = spec.name
        self._timeout_s = spec.timeout_s
        self._log_file = log_file
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0  # messages that are not answered
        self._since_s = time.monotonic()  # when the oldest of them began to be handled
        self._answer: Failed | None = None
        # When the process must have ended, by the monotonic clock.
        self._end_by_s = float("inf")
        self._is_ended = False  # nothing more is sent to it
        self._is_told = False  # its failure was returned to the caller
        self._link, other = socket.socketpair()
        with other, open(log_file, "ab") as output:
            command = [sys.executable, "-u", "-m", "gcore_core.node.observing"]
            self._process = subprocess.Popen(
                [*command, "--fd", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[other.fileno()],
                start_new_session=True,  # a Ctrl-C is for the supervisor alone
            )
        self._threads = [
            threading.Thread(target=work, name=f"observer.{self.name}", daemon=True)
            for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()
        self._send(spec)

    def tell(self, event: Event) -> None:
        """Sends the observer an event later; returns at once."""
        if self._is_ended:
            return
        self._send(event)
        if isinstance(event, RunEnded):
            self._is_ended = True
            self._queue.put(None)

    def _send(self, message: ObserverSpec | Event) -> None:
        with self._lock:
            if not self._waiting:
                self._since_s = time.monotonic()
            self._waiting += 1
        self._queue.put(framed(msgspec.msgpack.encode(message)))

    def _write(self) -> None:
        """Is the thread that writes what waits; it ends with the link."""
        with contextlib.suppress(OSError):
            while (message := self._queue.get()) is not None:
                self._link.sendall(message)

    def _read(self) -> None:
        """Is the thread that reads answers; it ends with the process."""
        decode = msgspec.msgpack.Decoder(ObserverAnswer).decode
        while content := next_message(self._link):
            answer = decode(content)
            with self._lock:
                self._waiting -= 1
                self._since_s = time.monotonic()
                if isinstance(answer, Failed):
                    self._answer = answer

    @property
    def is_over(self) -> bool:
        """Whether its process has ended and all that it said has been read."""
        return self._process.poll() is not None and not self._threads[1].is_alive()

    def failure(self) -> GcoreError | None:
        """Returns what a user is to be told, once: that it failed, ended or hung. Ends it then."""
        if self._is_told:
            return None
        # This comes first: the process may answer and end while this method runs.
        is_over = self.is_over
        with self._lock:
            waiting = self._waiting
            late_s = time.monotonic() - self._since_s if waiting else 0.0
            answer = self._answer
        if answer is not None:
            what = answer.error
            why = f"in {answer.method}" + (f", at {answer.at}" if answer.at else "")
        elif is_over and (waiting or not self._is_ended):
            what = f"its process has ended with exit code {self._process.returncode}."
            why = f"{waiting} reports were not taken"
        elif waiting > MOST_WAITING:
            what = f"it is {waiting} reports behind."
            why = "they would fill the memory of this process"
        elif late_s > self._timeout_s:
            what = f"it has not taken a report for {self._timeout_s:g} s; it is ended."
            why = f"{waiting} reports were not taken (observers.{self.name}.timeout_s)"
        elif time.monotonic() > self._end_by_s:
            what = f"it has not ended within {self._timeout_s:g} s of the run; it is ended."
            why = f"{waiting} reports were not taken (observers.{self.name}.timeout_s)"
        else:
            return None
        self._is_told = True
        self.kill()
        return WorkerDied(
            what,
            where=f"observers.{self.name}",
            why=f"{why}\n{_GOES_ON}",
            todo=f"its log: {self._log_file}",
        )

    def kill(self) -> None:
        """Ends the process and what it has started; nothing more is told to it."""
        self._is_ended = True
        self._queue.put(None)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_WITHIN_S)
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Begins the time in which it has to take what is left.

        One that was not told of the end of the run sees by its link that nothing more comes.
        """
        self._end_by_s = time.monotonic() + self._timeout_s
        if not self._is_ended:
            self._is_ended = True
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_WR)


class ChosenObservers:
    """Holds the observers that a job names, over all attempts of a run.

    Their processes start with the run's first ``run_start``.

    note: called with what a user should know.
    """

    def __init__(self, plan: Plan, directory: Path, note: Callable[[str], None]) -> None:
        self._plan = plan
        self._directory = directory
        self._note = note
        self._processes: list[ObserverProcess] | None = None

    def tell(self, event: Event) -> None:
        """Sends every observer an event, and says which of them have failed meanwhile."""
        if self._processes is None:
            if not isinstance(event, RunStarted):
                return  # the run has failed before there was anything to observe
            self._processes = self._started()
        for process in self._processes:
            process.tell(event)
        self._say_failures()

    def _started(self) -> list[ObserverProcess]:
        processes = []
        for name, node in self._plan.settings.observers.items():
            spec = ObserverSpec(
                name=name,
                directory=str(self._directory),
                factory=self._plan.factory(f"observers.{name}"),
                timeout_s=node.timeout_s,
            )
            log_file = run_files.log_path(self._directory, f"observer.{name}")
            try:
                processes.append(ObserverProcess(spec, log_file))
            except OSError as error:
                self._note(f"observers.{name}: it cannot be started: {error}\n  {_GOES_ON}")
        return processes

    def _say_failures(self) -> None:
        for process in self._processes or ():
            failure = process.failure()
            if failure is not None:
                log.error("%s", failure)
                self._note(str(failure))

    async def finish(self) -> None:
        """Waits until every observer has taken what is left; ends those that hang."""
        processes = self._processes or []
        for process in processes:
            process.end()
        try:
            while not all(process.is_over for process in processes):
                self._say_failures()
                await asyncio.sleep(_PAUSE_S)
            self._say_failures()
        except BaseException:
            for process in processes:
                process.kill()
            raise


@contextlib.asynccontextmanager
async def chosen_observers(
    plan: Plan, directory: Path, note: Callable[[str], None]
) -> AsyncIterator[ChosenObservers]:
    """Yields the observers of a job; waits for them when the block is left."""
    observers = ChosenObservers(plan, directory, note)
    try:
        yield observers
    finally:
        await observers.finish()


class EveryObserver:
    """Tells all that observe a run: the hooks of plugins, and then the observers of the job.

    Hooks are called in the main thread, and the run waits for them.
    """

    def __init__(self, hooks: Observers, chosen: ChosenObservers | None) -> None:
        self._hooks = hooks
        self._chosen = chosen

    def _tell(self, event: Event) -> None:
        if self._chosen is not None:
            self._chosen.tell(event)

    def run_start(self, run: RunFacts) -> None:
        in_main_thread(self._hooks.run_start, run)
        self._tell(RunStarted(run))

    def step_end(self, run: RunFacts, report: StepReport) -> None:
        in_main_thread(self._hooks.step_end, run, report)
        self._tell(StepEnded(msgspec.structs.replace(report, samples=[])))

    def weights_published(self, run: RunFacts, version: int) -> None:
        in_main_thread(self._hooks.weights_published, run, version)
        self._tell(WeightsPublished(version))

    def checkpoint_saved(self, run: RunFacts, step: int, path: str) -> None:
        in_main_thread(self._hooks.checkpoint_saved, run, step, path)
        self._tell(CheckpointSaved(step, path))

    def worker_failed(self, run: RunFacts, failure: WorkerFailure) -> None:
        in_main_thread(self._hooks.worker_failed, run, failure)
        self._tell(WorkerFailed(failure))

    def run_end(self, run: RunFacts, error: str) -> None:
        """Tells the hooks alone: the summary, which is not written yet, shows what they draw."""
        in_main_thread(self._hooks.run_end, run, error)

    def all_written(self, error: str) -> None:
        """Tells the observers of the job that the run is over, and that all its files are there."""
        self._tell(RunEnded(error))
