"""Is the process of one observer: ``python -m gcore_core.node.observing --fd N``.

The supervisor sends it an ``ObserverSpec`` and then one event after the other. The process answers
each of these, the spec too, with ``Handled`` or ``Failed``.

It makes the observer and tells it one event after the other. It ends with the run, and with the
first error of the observer. When the supervisor is lost, it still tells the observer what came
before, and that the run is over; for that it has ``ObserverSpec.timeout_s``. An observer that was
told of no run yet is ended at once then, as another process may go on with that run.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import queue
import socket
import sys
import threading
import traceback

import msgspec
from msgspec import structs

from gcore_core.contract.factories import FactorySpec, build
from gcore_core.contract.observer import Observer, ObserverContext
from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure
from gcore_core.wire.framing import framed, receive

_LIMIT_BYTES = 1 << 31  # of what the other side sends; it is of this run


class ObserverSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says which observer a process is to be.

    name: what the job calls it.
    directory: the run's.
    factory: what makes it.
    timeout_s: seconds that it has left when the supervisor is lost.
    """

    name: str
    directory: str
    factory: FactorySpec
    timeout_s: float


class RunStarted(msgspec.Struct, frozen=True, tag="run_start"):
    run: RunFacts


class StepEnded(msgspec.Struct, frozen=True, tag="step_end"):
    report: StepReport


class WeightsPublished(msgspec.Struct, frozen=True, tag="weights_published"):
    version: int


class CheckpointSaved(msgspec.Struct, frozen=True, tag="checkpoint_saved"):
    step: int
    path: str


class WorkerFailed(msgspec.Struct, frozen=True, tag="worker_failed"):
    failure: WorkerFailure


class RunEnded(msgspec.Struct, frozen=True, tag="run_end"):
    error: str


#: What an observer is told. The tag is the method of ``gcore_core.contract.observer.Observer``, the
#: fields are its arguments.
Event = RunStarted | StepEnded | WeightsPublished | CheckpointSaved | WorkerFailed | RunEnded


class Handled(msgspec.Struct, frozen=True, tag="handled"):
    """Says that the observer has handled what it was told."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Says that it raised; its process ends.

    method: what it was in; "factory" where it could not be made.
    error: type and text.
    at: file and line of its own code.
    """

    method: str
    error: str
    at: str


ObserverAnswer = Handled | Failed


def next_message(link: socket.socket) -> bytes:
    """Returns the next message; empty when the other side has ended."""
    try:
        return receive(link.recv, _LIMIT_BYTES)
    except OSError:
        return b""


log = logging.getLogger(__name__)
SUPERVISOR_LOST = "the supervisor was lost"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="observing")
    parser.add_argument("--fd", type=int, required=True)
    with socket.socket(fileno=parser.parse_args(words).fd) as link:
        spec = msgspec.msgpack.decode(next_message(link), type=ObserverSpec)
        logging.basicConfig(
            format=f"%(asctime)s observer.{spec.name} %(levelname)s %(message)s", level=logging.INFO
        )
        return _observe(spec, link)


class _EventReader:
    """Reads what the supervisor sends in a thread, so that its loss is noticed at once."""

    def __init__(self, link: socket.socket, timeout_s: float) -> None:
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.is_started = False
        self._link = link
        self._timeout_s = timeout_s
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        decode = msgspec.msgpack.Decoder(Event).decode
        event: Event | None = None
        while content := next_message(self._link):
            event = decode(content)
            self.events.put(event)
        if not isinstance(event, RunEnded):
            if not self.is_started:
                os._exit(0)
            # Nobody is left who would end this process. Signals and timers are the observer's.
            faulthandler.dump_traceback_later(self._timeout_s, exit=True)
        self.events.put(None)


def _observe(spec: ObserverSpec, link: socket.socket) -> int:
    """Makes the observer and tells it what comes; returns the exit code of the process."""
    inbox = _EventReader(link, spec.timeout_s)
    try:
        observer: Observer = build(
            spec.factory, ObserverContext(name=spec.name, directory=spec.directory)
        )
    except Exception as error:
        return _failed(link, "factory", error)
    _answer(link, Handled())
    while (event := inbox.events.get()) is not None:
        method = str(event.__struct_config__.tag)
        try:
            getattr(observer, method)(*structs.astuple(event))
        except Exception as error:
            return _failed(link, method, error)
        _answer(link, Handled())
        if isinstance(event, RunEnded):
            return 0
        inbox.is_started |= isinstance(event, RunStarted)
    observer.run_end(SUPERVISOR_LOST)
    return 0


def _failed(link: socket.socket, method: str, error: Exception) -> int:
    log.error("%s failed", method, exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    _answer(link, Failed(method=method, error=f"{type(error).__name__}: {error}", at=at))
    return 1


def _answer(link: socket.socket, answer: Handled | Failed) -> None:
    try:
        link.sendall(framed(msgspec.msgpack.encode(answer)))
    except OSError:
        log.warning("%s", SUPERVISOR_LOST)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # All is where it belongs; what a library has left behind must not hold this up.
    os._exit(code)
