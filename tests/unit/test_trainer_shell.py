"""What a trainer rank says it worked: its own time, never that in which it waited for other
ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.runtime.messages import PrepareRequest, TrainReply, TrainRequest
from gcore_core.runtime.shells.trainer import TrainerShell
from gcore_core.testing import fake

WAIT_S = 0.1


class Ranked(fake.FakeTrainer):
    """One that waits for another rank, and one that says itself how long it worked."""

    def __init__(self, says: dict[str, float]) -> None:
        super().__init__(fake.FakeTrainerConfig(), WorkerContext(role="policy"))
        self._says = says

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        threading.Event().wait(WAIT_S)
        return super().train(step, advantages, minibatches, epochs) | self._says


class NoRecords:
    async def records(self, items: Sequence[Any]) -> list[Any]:
        return []


async def compute(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


async def trained(says: dict[str, float], path: Path) -> TrainReply:
    shell = TrainerShell(Ranked(says), NoRecords(), compute, path, 0)  # type: ignore[arg-type]
    await shell.prepare([PrepareRequest(0, [], [])], None)  # type: ignore[arg-type]
    (reply,) = await shell.train([TrainRequest(0, [], 2, 1)], None)  # type: ignore[arg-type]
    assert reply is not None
    return reply


async def test_busy_time_excludes_waiting(tmp_path: Path) -> None:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    reply = await trained({}, tmp_path)
    assert time.perf_counter() - began_s >= WAIT_S
    assert 0 < reply.busy_s <= time.process_time() - cpu_s


@pytest.mark.parametrize("busy_s", [7.5, 0.0])
async def test_busy_time_reported_by_a_backend_is_used_and_is_no_metric(
    busy_s: float, tmp_path: Path
) -> None:
    reply = await trained({"busy_s": busy_s}, tmp_path)
    assert reply.busy_s == busy_s
    assert "busy_s" not in reply.metrics and "loss" in reply.metrics
