"""The meters of ``signal: hardware``: real processor time, and NVML by a fake of the library."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from gcore_placement import gcore_check
from gcore_placement.config import UtilisationConfig
from gcore_placement.nvml import Nvml
from gcore_placement.processors import Processors
from gcore_testing import MeterContract

from gcore_core.contract.errors import ConfigError

#: Uses one processor until it is ended; with "below", by a process below it.
BURNS = """
import os, subprocess, sys
if "below" in sys.argv:
    below = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    print(below.pid, flush=True)
    below.wait()
print(0, flush=True)
while True: pass
"""


class FakeNvml:
    """A library of the form of pynvml, for GPUs whose utilisation the test sets.

    percent: of each GPU, by its number; None: the driver does not tell it.
    """

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.percent: list[int | None] = [0, 0]
        self.has_driver = True
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= len(self.percent):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        return {"GPU-a": 0, "GPU-b": 1}[name]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        percent = self.percent[handle]
        if percent is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=percent, memory=0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


class TestProcessors(MeterContract):
    @pytest.fixture
    def meter(self) -> Processors:
        return Processors()


class TestNvml(MeterContract):
    @pytest.fixture
    def meter(self, library: FakeNvml) -> Iterator[Nvml]:
        library.percent = [50, 70]
        meter = Nvml(interval_s=0.01)
        yield meter
        meter._closing.set()


@pytest.fixture(params=["", "below"])
def burning(request: pytest.FixtureRequest) -> Iterator[int]:
    """The pid of a process that uses a processor, itself or by one below it."""
    process = subprocess.Popen(
        [sys.executable, "-c", BURNS, request.param], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    with contextlib.suppress(ProcessLookupError):  # a test may have ended it
        os.killpg(process.pid, 9)
    process.wait()
    process.stdout.close()


def test_processor_time_of_a_worker_and_below_it_is_shared_by_its_devices(burning: int) -> None:
    meter = Processors()
    devices = {0: [burning], 1: [burning, os.getpid()], 2: [os.getpid()], 3: []}
    before = meter.used_s(devices)
    after = before
    while after[0] - before[0] < 0.2:
        after = meter.used_s(devices)
    grown = {index: after[index] - before[index] for index in devices}
    assert grown[1] == pytest.approx(grown[0] + grown[2]), "half of each of its two workers"
    assert grown[3] == 0.0


def test_the_time_of_a_worker_that_ended_stays_counted(burning: int) -> None:
    meter = Processors()
    while (used_s := meter.used_s({0: [burning]})[0]) < 0.1:
        pass
    os.killpg(burning, 9)
    os.waitpid(burning, 0)
    assert meter.used_s({0: [burning]})[0] == used_s


def test_nvml_adds_utilisation_up_over_the_time_between_samples(library: FakeNvml) -> None:
    now_s = 100.0
    meter = Nvml(clock_s=lambda: now_s, interval_s=3600.0)
    devices: dict[int, list[int]] = {0: [], 1: []}
    assert meter.used_s(devices) == {0: 0.0, 1: 0.0}
    for seconds, percent in ((2.0, [50, 100]), (1.0, [0, 100]), (4.0, [25, 0])):
        now_s += seconds
        library.percent = percent
        used_s = meter.used_s(devices)
    assert used_s == pytest.approx({0: 2.0, 1: 3.0})
    meter.close()
    assert not library.is_open


def test_nvml_is_sampled_without_being_asked(library: FakeNvml) -> None:
    """A thread samples, so that what happened between two readings counts."""
    library.percent = [100, 100]
    meter = Nvml(interval_s=0.001)
    before_s = meter.used_s({0: []})[0]
    deadline_s = time.monotonic() + 30
    while not meter._used_s[0] > before_s:
        assert time.monotonic() < deadline_s, "no sample was taken"
    meter.close()


@pytest.mark.parametrize("visible", ["1,0", "GPU-b,GPU-a", " 1 , 0 "])
def test_a_device_is_the_gpu_that_cuda_visible_devices_lists_there(
    visible: str, library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    library.percent = [10, 90]
    now_s = 0.0
    meter = Nvml(clock_s=lambda: now_s, interval_s=3600.0)
    meter.used_s({0: []})
    now_s = 1.0
    assert meter.used_s({0: []}) == pytest.approx({0: 0.9})
    meter.close()


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match=r"pip install .*gcore-placement\[nvml\]'"):
        Nvml()


def test_without_a_driver_the_error_says_so(library: FakeNvml) -> None:
    library.has_driver = False
    with pytest.raises(ConfigError, match=r"libnvidia-ml\.so\.1"):
        Nvml()


@pytest.mark.parametrize(("percent", "error"), [([None], "MIG"), ([], "does not know GPU 0")])
def test_a_gpu_that_cannot_be_read_is_an_error(
    percent: list[int | None], error: str, library: FakeNvml
) -> None:
    library.percent = percent
    meter = Nvml(interval_s=3600.0)
    with pytest.raises(ConfigError, match=error):
        meter.used_s({0: []})
    meter.close()


def test_meters_are_named_for_the_hardware_signal_alone() -> None:
    assert (
        UtilisationConfig().traits().meters
        == UtilisationConfig(signal="filled").traits().meters
        == {}
    )
    assert UtilisationConfig(signal="hardware").traits().meters.keys() == {"cuda", "cpu"}


@pytest.mark.parametrize(
    ("launcher", "signal", "count"),
    [("core/inline", "hardware", 1), ("core/inline", "filled", 0), ("core/local", "hardware", 0)],
)
def test_workers_that_share_a_process_are_refused(launcher: str, signal: str, count: int) -> None:
    plan: dict[str, Any] = {
        "placement": {"use": "placement/utilisation", "config": {"signal": signal}},
        "launcher": {"use": launcher},
    }
    assert len(list(gcore_check(plan))) == count
