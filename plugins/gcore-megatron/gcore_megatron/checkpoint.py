"""Saves a trainer's state as Megatron-Core's distributed checkpoint and one JSON file.

The checkpoint has the format torch_dist and can be loaded with any parallel sizes (fully
reshardable). A thread writes it while training goes on. Rejected: Megatron-Core's own writer, which
forks; the fork of a worker, which has other threads, may hang.

The JSON file is written last: a directory without it is no state.

A rank that cannot write is an error on every rank (``gcore_language.agreed_saves``). Some files are
written by rank 0 amid collectives of the library, which go on without them then.

Megatron-Core's own files contain pickles. A caller opens a state only when it trusts the directory.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gcore_language.agreed_saves import agreed, errors_put_off
from gcore_language.prompts import first_lines
from gcore_language.ranks import Ranks
from gcore_language.saving import BackgroundWrite
from gcore_language.state_files import read_numbers, write_numbers
from torch.distributed.checkpoint.api import CheckpointException

from gcore_core.contract.errors import DataError
from gcore_megatron.library import (
    CheckpointingException,
    FileSystemWriterAsync,
    TorchCommonSaveStrategy,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    dist_checkpointing,
    filesystem_async,
    serialization,
)
from gcore_megatron.model import PolicyModel

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
_NUMBERS = "state.json"
_SHARDS = "shards"


class PendingSave:
    """A save that has begun."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Waits until the state is whole. Every rank calls it, once.

        Raises CheckpointError on every rank when one of them could not write.
        """
        self._finish()


def begin_save(
    directory: Path,
    model: PolicyModel,
    optimizer: Any,
    numbers: dict[str, Any],
    ranks: Ranks,
    progress: Callable[[], None],
) -> PendingSave:
    """Copies this rank's part of the state and starts to write the copy; every rank calls it.

    An older state in the directory stops counting as one at once, since its JSON file is removed.

    progress: called while this rank waits for the writer.

    Raises CheckpointError on every rank when one of them could not write.
    """
    shards = directory / _SHARDS
    with agreed(ranks, directory):
        shards.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            (directory / _NUMBERS).unlink(missing_ok=True)
    # give it a queue, because it would start a process to get one
    filesystem_async._results_queue = queue.SimpleQueue()
    with agreed(ranks, directory), errors_put_off((TorchCommonSaveStrategy, "save_common")):
        request = dist_checkpointing.save(
            _sharded(model, optimizer, loading=False),
            str(shards),
            TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            async_sharded_save=True,
        )
    writing = BackgroundWrite(_writer(request), progress)

    def finish() -> None:
        with agreed(ranks, directory):
            writing.wait()
        last = (FileSystemWriterAsync, "finish"), (serialization, "save_config")
        with agreed(ranks, directory), errors_put_off(*last):
            for finalize in request.finalize_fns:
                finalize()
        with agreed(ranks, directory):
            if ranks.rank == 0:
                write_numbers(directory, numbers, "distributed")

    return PendingSave(finish)


def _writer(request: Any) -> Callable[[Callable[[], None]], None]:
    """Copies the tensors of the files that Megatron-Core asks for; returns what writes the files.

    Tensors on a device are copied by Megatron-Core already. Those in host memory are cloned here,
    because training would change them while they are written.
    """
    if request.async_fn is None:
        return lambda wrote: None  # this rank has nothing to write
    transforms, *_ = request.async_fn.args
    _, requested, results = request.async_fn_args
    files = []
    for (path, key, (numbers, tensors)), (*_, (_, staged)) in zip(
        requested, request.preload_fn(), strict=True
    ):
        pairs = zip(tensors, staged, strict=True)
        copies = [
            (item, host if live.is_cuda else live.clone()) for (item, live), (_, host) in pairs
        ]
        files.append((path, key, (numbers, copies)))

    def write(wrote: Callable[[], None]) -> None:
        outcomes: dict[int, Any] = {}
        for place, file in enumerate(files):
            outcome_queue = queue.Queue[Any]()
            count_queue = queue.Queue[int]()
            count_queue.put(place)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, place, file, outcome_queue, count_queue, use_fsync=True
            )
            _, outcomes[place] = outcome_queue.get()
            if isinstance(outcomes[place], Exception):
                raise outcomes[place]
            wrote()
        results.put(outcomes)

    return write


def is_distributed(directory: Path) -> bool:
    """Whether a directory holds a state of this format, whole or not."""
    return (directory / _SHARDS).is_dir()


def load_state(directory: Path, model: PolicyModel, optimizer: Any) -> dict[str, Any]:
    """Loads a saved state into model and optimizer; returns the numbers of its JSON file.

    Raises DataError when the state is damaged or of another model.
    """
    _, numbers = read_numbers(directory)
    shards = _sharded(model, optimizer, loading=True)
    try:
        state = dist_checkpointing.load(
            shards, str(directory / _SHARDS), TorchDistLoadShardedStrategy()
        )
    except (CheckpointingException, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # rank -> (exception, traceback)
            cause = next(iter(error.failures.values()), (error, None))[0]
        what = "trainer state is damaged or of another model."
        raise DataError(what, where=str(directory), why=first_lines(cause)) from error
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    return numbers


def _sharded(model: PolicyModel, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    """Describes this rank's shards of weights and optimizer state to Megatron-Core."""
    weights = model.sharded_state_dict()
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=_METADATA),
    }
