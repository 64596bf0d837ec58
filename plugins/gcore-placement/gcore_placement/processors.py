"""Reads the processor time of workers, for ``signal: hardware`` on machines without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import psutil


class Processors:
    """Counts the processor time of the workers of each device, with all that they have started.

    A device is a core here. A worker that has several devices is taken to use all of them alike.
    """

    def __init__(self) -> None:
        self._used_s: dict[int, float] = {}  # by device
        self._latest_s: dict[int, float] = {}  # by pid: what it had used at the latest reading

    def used_s(self, devices: Mapping[int, Sequence[int]]) -> dict[int, float]:
        """See ``Meter.used_s``. What a worker uses after its last reading is lost."""
        indexes_of: dict[int, list[int]] = {}
        for index, pids in devices.items():
            self._used_s.setdefault(index, 0.0)
            for pid in pids:
                indexes_of.setdefault(pid, []).append(index)
        # Ended workers are forgotten, since another process may get their number.
        latest_s = {}
        for pid, indexes in indexes_of.items():
            cpu_s = _processor_s(pid)
            if cpu_s is None:
                continue
            latest_s[pid] = cpu_s
            # A child that ended without being waited for takes its seconds along.
            grown_s = max(cpu_s - self._latest_s.get(pid, 0.0), 0.0)
            for index in indexes:
                self._used_s[index] += grown_s / len(indexes)
        self._latest_s = latest_s
        return {index: self._used_s[index] for index in devices}

    def close(self) -> None:
        """Does nothing: nothing was started."""


def _processor_s(pid: int) -> float | None:
    """Returns the processor seconds of a process and all below it; None if it has ended."""
    try:
        process = psutil.Process(pid)
        return sum(_own_s(one) for one in _with_children(process))
    except psutil.NoSuchProcess:
        return None


def _with_children(process: psutil.Process) -> Iterator[psutil.Process]:
    yield process
    yield from process.children(recursive=True)


def _own_s(process: psutil.Process) -> float:
    """Returns the seconds of a process and of its children that it has waited for."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:  # it ended since it was listed
        return 0.0
    seconds = times.user + times.system + times.children_user + times.children_system
    return float(seconds)
