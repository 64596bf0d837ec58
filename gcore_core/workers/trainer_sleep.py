"""Lets a trainer's rank sleep, and wakes it before whatever it is asked to do next."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from gcore_core.contract.errors import ContractError
from gcore_core.contract.trainer import SleepsInRollout, Trainer
from gcore_core.runtime.compute import Compute
from gcore_core.runtime.messages import TrainerSlept

T = TypeVar("T")


class TrainerRest:
    """Runs a backend's calls as ``Compute`` does, and wakes it before a call where it sleeps.

    So nobody has to know what a trainer that sleeps may be asked: a generator that was started anew
    in the middle of a rollout gets its weights.
    """

    def __init__(self, backend: Trainer, compute: Compute) -> None:
        self._backend = backend
        self._compute = compute
        self._asleep = False
        self._wake_s = 0.0  # seconds that the wake since the latest sleep took
        self._slept = TrainerSlept(0.0, 0.0)  # of the latest sleep

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        return await self._compute(self._awake, work, args)

    async def sleep(self) -> TrainerSlept:
        """Puts the backend to sleep. Where it sleeps, says again what it said then.

        Raises ContractError for a backend that cannot.
        """
        return await self._compute(self._sleep)

    def _awake(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        if self._asleep and isinstance(self._backend, SleepsInRollout):
            began_s = time.perf_counter()
            self._backend.wake()
            self._asleep = False
            self._wake_s = time.perf_counter() - began_s
        return work(*args)

    def _sleep(self) -> TrainerSlept:
        if not isinstance(self._backend, SleepsInRollout):
            raise ContractError("this trainer cannot sleep.", where="placement.sleep_in_rollout")
        if self._asleep:
            return self._slept
        began_s = time.perf_counter()
        self._backend.sleep()
        self._asleep = True
        self._slept = TrainerSlept(time.perf_counter() - began_s, self._wake_s)
        self._wake_s = 0.0
        return self._slept
