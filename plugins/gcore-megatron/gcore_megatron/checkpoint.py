"""A trainer's state as Megatron-Core's distributed checkpoint (torch_dist, fully reshardable) and one JSON file.

Writing happens in forked processes while training goes on. The JSON file is written last: a directory without it is no
state. Megatron-Core's own files contain pickles; a state is opened only where whoever calls trusts its directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from gcore_language.prompts import first_lines
from torch.distributed.checkpoint.api import CheckpointException

from gcore_core.errors import DataError
from gcore_megatron.library import (
    AsyncCallsQueue,
    CheckpointingException,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    dist_checkpointing,
)
from gcore_megatron.model import PolicyModel

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
_NUMBERS = "state.json"
_SHARDS = "shards"


class PendingSave:
    """A save under way."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Until the state is whole; every rank calls it, once. Raises what went wrong in writing."""
        self._finish()


def begin_save(directory: Path, model: PolicyModel, optimizer: Any, numbers: dict[str, Any]) -> PendingSave:
    """Copies this rank's part of the state and starts to write it; every rank calls it.

    Megatron-Core's persistent writer asks for a CUDA device, so each save forks anew.
    """
    shards = directory / _SHARDS
    shards.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        (directory / _NUMBERS).unlink(missing_ok=True)
    dist.barrier()
    request = dist_checkpointing.save(
        _sharded(model, optimizer, loading=False),
        str(shards),
        TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
        async_sharded_save=True,
    )
    queue = AsyncCallsQueue(persistent=False)
    queue.schedule_async_request(request)

    def finish() -> None:
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        if dist.get_rank() == 0:
            (directory / _NUMBERS).write_text(json.dumps(numbers), encoding="utf-8")
        dist.barrier()

    return PendingSave(finish)


def load_state(directory: Path, model: PolicyModel, optimizer: Any) -> dict[str, Any]:
    """Takes a saved state into model and optimizer; returns the numbers. Raises DataError."""
    file = directory / _NUMBERS
    try:
        numbers: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError("trainer state cannot be read.", where=str(file), why=str(error)) from error
    wanted = _sharded(model, optimizer, loading=True)
    try:
        found = dist_checkpointing.load(wanted, str(directory / _SHARDS), TorchDistLoadShardedStrategy())
    except (CheckpointingException, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # rank -> (exception, traceback)
            cause = next(iter(error.failures.values()), (error, None))[0]
        what = "trainer state is damaged or of another model."
        raise DataError(what, where=str(directory), why=first_lines(cause)) from error
    model.load_state_dict(found["model"], strict=False)
    optimizer.load_state_dict(found["optimizer"])
    return numbers


def _sharded(model: PolicyModel, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    weights = model.sharded_state_dict()
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=_METADATA),
    }
