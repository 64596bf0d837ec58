"""Measures how long an accelerator works on this rank's passes, without waiting for it.

Kernels run after the call that starts them has returned, so the host's clock says nothing. An event
before a pass and one behind it are recorded by the device itself, as it comes to them. They are
read once, after the step.

What is not measured: the update of the weights, which takes every rank equally long and in which
the ranks meet. What cannot be told apart: where weights are gathered inside a pass (FSDP, ZeRO-3,
pipeline stages), the device waits there for other ranks, and that counts as work.

It has run on one GPU. How exact its seconds are was not measured there: the part ``busy`` of
``benchmarks/gpu.py`` would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A mark in a device's queue, as ``torch.cuda.Event`` and ``torch.Event`` are."""

    def record(self) -> Any:
        """Puts the mark behind what is queued on the current stream."""

    def synchronize(self) -> None:
        """Waits until the device has come to the mark."""

    def elapsed_time(self, end: Any) -> float:
        """Returns the milliseconds from this mark to ``end``."""


class DeviceClock:
    """Adds up the seconds of the passes between ``start`` and ``stop``.

    On a CPU it measures nothing: there the processor time of the process is known.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], Event] | None = None) -> None:
        """
        device: where the passes run.
        make_event: makes an event that keeps time; None: the device's own.
        """
        self._measures = device.type != "cpu"
        self._make_event = make_event or _event_of(device)
        self._began: Event | None = None
        self._passes: list[tuple[Event, Event]] = []

    def start(self) -> None:
        """Marks the beginning of a pass."""
        if self._measures:
            self._began = self._make_event()
            self._began.record()

    def stop(self) -> None:
        """Marks the end of the pass that began; does nothing when none did."""
        if self._began is not None:
            end = self._make_event()
            end.record()
            self._passes.append((self._began, end))
            self._began = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures what is started inside the block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def forget(self) -> None:
        """Drops what was measured."""
        self._began = None
        self._passes.clear()

    def read_s(self) -> float | None:
        """Returns the seconds of all passes since the last reading; None on a CPU.

        It waits until the device has finished the last pass.
        """
        if not self._measures:
            return None
        passes = self._passes
        self._passes = []
        for _, end in passes[-1:]:
            end.synchronize()  # the marks before it have then been passed too
        return sum(begin.elapsed_time(end) for begin, end in passes) / 1000


def _event_of(device: torch.device) -> Callable[[], Event]:
    if device.type == "cuda":
        return lambda: torch.cuda.Event(enable_timing=True)
    return lambda: torch.Event(device, enable_timing=True)
