"""A trainer rank: the time that it says it worked is its own; a push is of the version it says."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing import fake

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import CheckpointError, ContractError
from gcore_core.run.saved_weights import weights_sha256
from gcore_core.runtime.messages import (
    BeginPush,
    Nothing,
    PrepareRequest,
    SaveState,
    TrainReply,
    TrainRequest,
)
from gcore_core.workers.trainer import TrainerShell

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
    node = "agent.0"

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


class Saving(fake.FakeTrainer):
    """Counts how often its weights are exported."""

    def __init__(self) -> None:
        super().__init__(fake.FakeTrainerConfig(), WorkerContext(role="policy"))
        self.exports = 0

    def export_weights(self) -> Any:
        self.exports += 1
        return super().export_weights()


async def saved(
    trainer: Saving, path: Path, rank: int = 0, *, urgent: bool = False, step: int = 0
) -> str:
    shell = TrainerShell(trainer, NoRecords(), compute, path, rank)  # type: ignore[arg-type]
    await shell.save_state(SaveState(step, str(path)), None)  # type: ignore[arg-type]
    reply = await shell.finish_save(SaveState(step, "", urgent), None)  # type: ignore[arg-type]
    return reply.weights_sha256


async def test_a_save_is_hashed_by_rank_0_as_the_files_of_its_weights_are(tmp_path: Path) -> None:
    trainer = Saving()
    trainer.save_pretrained(tmp_path / "weights")
    assert await saved(trainer, tmp_path) == weights_sha256(tmp_path / "weights")


async def test_other_ranks_take_part_in_the_export_and_hash_nothing(tmp_path: Path) -> None:
    trainer = Saving()
    assert await saved(trainer, tmp_path, rank=1) == ""
    assert trainer.exports == 1


async def test_a_rank_that_cannot_save_still_takes_part_in_the_export(tmp_path: Path) -> None:
    trainer = Saving()
    shell = TrainerShell(trainer, NoRecords(), compute, tmp_path, 1)  # type: ignore[arg-type]

    def full(directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer.begin_save = full  # type: ignore[method-assign]
    with pytest.raises(CheckpointError):
        await shell.save_state(SaveState(0, str(tmp_path)), None)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert trainer.exports == 1


async def test_large_weights_are_not_hashed_where_a_run_must_end_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await saved(Saving(), tmp_path, urgent=True)
    monkeypatch.setattr("gcore_core.workers.trainer._URGENT_BYTES", 1)
    shell = TrainerShell(Saving(), NoRecords(), late, tmp_path, 0)  # type: ignore[arg-type]
    await shell.save_state(SaveState(0, str(tmp_path)), None)  # type: ignore[arg-type]
    reply = await shell.finish_save(SaveState(0, "", True), None)  # type: ignore[arg-type]
    assert reply.weights_sha256 == ""


async def late(work: Callable[..., Any], *args: Any) -> Any:
    for _ in range(3):
        await asyncio.sleep(0)
    return work(*args)


async def test_weights_that_have_changed_since_the_save_are_not_hashed(tmp_path: Path) -> None:
    assert await saved(Saving(), tmp_path, step=4) == ""


async def test_whatever_a_trainer_that_sleeps_is_asked_wakes_it(tmp_path: Path) -> None:
    trainer = Ranked({})
    shell = TrainerShell(trainer, NoRecords(), compute, tmp_path / "push", 0)  # type: ignore[arg-type]
    for step, asked in enumerate(("prepare", "push")):
        first = await shell.sleep(Nothing(), None)  # type: ignore[arg-type]
        again = await shell.sleep(Nothing(), None)  # type: ignore[arg-type]
        assert not trainer.memory_bytes
        assert first.sleep_s > 0 and again == first, "asked again, as after a lost reply"
        assert (first.wake_s > 0) == bool(step)
        if asked == "prepare":
            await shell.prepare([PrepareRequest(step, [], [])], None)  # type: ignore[arg-type]
        else:
            await shell.begin_push(BeginPush(0, 64, 1), None)  # type: ignore[arg-type]
        assert trainer.memory_bytes


async def test_a_trainer_that_cannot_sleep_says_so(tmp_path: Path) -> None:
    class Wakeful(Ranked):
        sleep = None  # type: ignore[assignment]

    shell = TrainerShell(Wakeful({}), NoRecords(), compute, tmp_path, 0)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="cannot sleep"):
        await shell.sleep(Nothing(), None)  # type: ignore[arg-type]


async def test_a_save_that_the_lead_had_finished_in_a_hurry_can_be_committed_without_it(
    tmp_path: Path,
) -> None:
    """The supervisor asks for the end of the save once more when the lead is lost meanwhile."""
    shell = TrainerShell(Saving(), NoRecords(), compute, tmp_path, 0)  # type: ignore[arg-type]
    await shell.save_state(SaveState(0, str(tmp_path)), None)  # type: ignore[arg-type]
    of_lead = await shell.finish_save(SaveState(0, "", True), None)  # type: ignore[arg-type]
    of_supervisor = await shell.finish_save(SaveState(0, ""), None)  # type: ignore[arg-type]
    assert of_supervisor == of_lead and of_lead.weights_sha256
