"""A rank's own seconds on an accelerator: events around its passes, read once after the step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gcore_language.device_clock import DeviceClock
from gcore_language.settings import TrainerSettings
from gcore_language.training import LanguageTrainer

from gcore_core.contract.context import WorkerContext

CUDA = torch.device("cuda")


class Queue:
    """A device that works off what is queued, and keeps time of its own."""

    def __init__(self) -> None:
        self.queued_ms = 0.0  # what was started and may not be done yet
        self.waits = 0

    def event(self) -> Mark:
        return Mark(self)


class Mark:
    """An event of a ``Queue``, as ``torch.cuda.Event`` is one of CUDA."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._at_ms: float | None = None
        self._is_past = False

    def record(self) -> None:
        self._at_ms = self._queue.queued_ms

    def synchronize(self) -> None:
        self._queue.waits += 1
        self._is_past = True

    def elapsed_time(self, end: Mark) -> float:
        assert self._at_ms is not None and end._at_ms is not None, "an event was not recorded"
        return end._at_ms - self._at_ms


def test_a_clock_adds_up_its_passes_and_nothing_between_them() -> None:
    queue = Queue()
    clock = DeviceClock(CUDA, queue.event)
    for pass_ms in (30.0, 50.0):
        with clock.running():
            queue.queued_ms += pass_ms
        queue.queued_ms += 1000.0  # an update, in which ranks wait for each other
    assert clock.read_s() == pytest.approx(0.08)
    assert clock.read_s() == 0.0, "a pass counts once"


def test_a_clock_waits_for_the_device_once_a_reading_and_never_in_a_pass() -> None:
    queue = Queue()
    clock = DeviceClock(CUDA, queue.event)
    for _ in range(5):
        with clock.running():
            queue.queued_ms += 1.0
    assert queue.waits == 0
    clock.read_s()
    assert queue.waits == 1


def test_a_pass_that_was_stopped_early_ends_there() -> None:
    queue = Queue()
    clock = DeviceClock(CUDA, queue.event)
    with clock.running():
        queue.queued_ms += 20.0
        clock.stop()
        queue.queued_ms += 500.0  # gradients are summed over the ranks
    assert clock.read_s() == pytest.approx(0.02)


def test_passes_that_are_forgotten_do_not_count() -> None:
    queue = Queue()
    clock = DeviceClock(CUDA, queue.event)
    with clock.running():
        queue.queued_ms += 20.0
    clock.forget()
    assert clock.read_s() == 0.0


def test_a_processor_has_no_clock_of_its_own() -> None:
    clock = DeviceClock(torch.device("cpu"))
    with clock.running():
        pass
    assert clock.read_s() is None


def trained(device: torch.device, queue: Queue) -> dict[str, float]:
    """What ``train`` reports of a step with one batch, whose passes take 70 ms."""
    clock = DeviceClock(device, queue.event)

    def accumulate(*_: object) -> None:
        with clock.running():
            queue.queued_ms += 70.0

    ranks = SimpleNamespace(count=1, sum=np.array, sum_terms=sum, max=np.array, add_up=lambda _: {})
    engine = SimpleNamespace(
        device=device,
        layouts=frozenset({"padded"}),
        ranks=ranks,
        hidden_size=8,
        clock=clock,
        accumulate=accumulate,
        sums_exactly=False,
        discard=lambda: None,
    )
    objective = SimpleNamespace(requires=frozenset(), weight=lambda columns: 0.0)
    context = WorkerContext(role="policy", parts={"objective": objective})
    trainer = LanguageTrainer(TrainerSettings(packing="padded"), context, engine)
    trainer.prepare([], frozenset())
    with clock.running():
        queue.queued_ms += 400.0  # log-probs of the preparation, which ``train`` does not count
    trainer._prepared.minibatches.append([None])
    return trainer.train(0, np.zeros(0), 1, 1)


def test_a_step_on_an_accelerator_reports_the_seconds_of_its_passes() -> None:
    assert trained(CUDA, Queue())["busy_s"] == pytest.approx(0.07)


def test_a_step_on_a_processor_leaves_the_seconds_to_the_process() -> None:
    assert "busy_s" not in trained(torch.device("cpu"), Queue())
