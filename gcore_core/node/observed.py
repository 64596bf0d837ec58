"""Holds what the supervisor and the process of an observer send each other, and how.

The supervisor sends an ``ObserverSpec`` and then one event after the other; the observer answers
each of these, the spec too, with ``Handled`` or ``Failed``.
"""

from __future__ import annotations

import socket

import msgspec

from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure
from gcore_core.wire.framing import receive

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
