"""Reads the utilisation of NVIDIA GPUs from the driver, for ``signal: hardware``.

The library is NVML, through nvidia-ml-py (``import pynvml``). Nobody has run this on a GPU yet: its
tests use a fake of the library.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.installing import install_command

WHERE = "placement.config.signal: hardware"
#: Seconds between two samples. The driver's own value is a mean over up to one second.
INTERVAL_S = 0.5


class Nvml:
    """Adds up the utilisation of devices, which a thread samples every ``INTERVAL_S``.

    Utilisation is ``nvmlDeviceGetUtilizationRates(handle).gpu``: percent of the driver's latest
    period in which a kernel ran.
    """

    def __init__(
        self, clock_s: Callable[[], float] = time.monotonic, interval_s: float = INTERVAL_S
    ) -> None:
        """Opens the library. Raises ConfigError, which says what to install, where it cannot.

        clock_s: gives the seconds since any fixed time.
        interval_s: seconds between two samples.
        """
        self._nvml = _open_library()
        self._clock_s = clock_s
        self._interval_s = interval_s
        self._lock = threading.Lock()  # over all below
        self._handles: dict[int, Any] = {}
        self._used_s: dict[int, float] = {}
        self._sampled_s: dict[int, float] = {}  # when the device was sampled last
        self._error = ""  # of the driver, at the latest sample
        self._closing = threading.Event()
        self._sampler = threading.Thread(target=self._sample_regularly, name="nvml", daemon=True)
        self._sampler.start()

    def used_s(self, devices: Mapping[int, Sequence[int]]) -> dict[int, float]:
        """See ``Meter.used_s``. A device counts from when it is asked for first; pids are ignored:
        the driver knows devices.
        """
        with self._lock:
            for index in devices:
                if index not in self._handles:
                    self._handles[index] = self._find(index)
                    self._used_s[index] = 0.0
                    self._sampled_s[index] = self._clock_s()
            self._sample()
            if self._error:
                raise ConfigError(
                    f"the driver does not tell the utilisation of a GPU: {self._error}",
                    where=WHERE,
                    why="a GPU that is cut into parts (MIG) has none",
                    todo="use signal: filled",
                )
            return {index: self._used_s[index] for index in devices}

    def _find(self, index: int) -> Any:
        """Returns the driver's handle of a device, which counts as CUDA_VISIBLE_DEVICES lists."""
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [word.strip() for word in (listed or "").split(",") if word.strip()]
        name = names[index] if index < len(names) else str(index)
        try:
            if name.isdigit():
                return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        except self._nvml.NVMLError as error:
            raise ConfigError(
                f"the driver does not know GPU {name}: {error}",
                where=WHERE,
                why=f"device {index} of the run; CUDA_VISIBLE_DEVICES is {listed!r}",
                todo="correct CUDA_VISIBLE_DEVICES or cluster.devices, or use signal: filled",
            ) from error

    def _sample(self) -> None:
        """Adds what each device was in use since its last sample; the lock is held."""
        self._error = ""
        for index, handle in self._handles.items():
            now_s = self._clock_s()
            try:
                percent = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            except self._nvml.NVMLError as error:
                self._error = str(error)
                continue
            self._used_s[index] += (now_s - self._sampled_s[index]) * percent / 100
            self._sampled_s[index] = now_s

    def _sample_regularly(self) -> None:
        while not self._closing.wait(self._interval_s):
            with self._lock:
                self._sample()

    def close(self) -> None:
        """Ends the sampling and closes the library."""
        self._closing.set()
        self._sampler.join()
        self._nvml.nvmlShutdown()


def _open_library() -> Any:
    """Returns pynvml, ready for use; raises ConfigError where it or the driver is missing."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise ConfigError(
            "the utilisation of GPUs is read through nvidia-ml-py, which is not installed",
            where=WHERE,
            why=str(error),
            todo=f"{install_command('gcore-placement[nvml]')}, or use signal: filled",
        ) from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ConfigError(
            f"NVIDIA's driver does not answer: {error}",
            where=WHERE,
            todo="install the driver with its library libnvidia-ml.so.1, or use signal: filled",
        ) from error
    return nvml
