"""Saves a rank's part of a trainer's state, at once or while training goes on.

A rank writes one safetensors file with its rows of every tensor that it has a part of.
``state_files`` joins them again for any number of ranks.

A save in the background first copies the tensors. The copy's memory is kept from one save to the
next, because fresh pages take ten times as long. Only an update that comes before the copy is
complete has to wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_language.pinned import pinned_like
from gcore_language.ranks import Ranks
from gcore_language.settings import TrainerSettings
from gcore_language.state_files import write_numbers, write_tensors
from gcore_language.training import LanguageTrainer, TrainingEngine


class PendingSave(Protocol):
    """A save that has begun."""

    def wait(self) -> None:
        """Waits until the save is durable. Every rank calls it, once.

        Raises the error with which writing failed.
        """


class SavingEngine(TrainingEngine, Protocol):
    """An engine that trains on while its state is written."""

    def begin_save(self, directory: Path, numbers: dict[str, Any]) -> PendingSave:
        """Begins to save what ``save`` would save now."""


class SavingTrainer(LanguageTrainer):
    """A trainer with the trait ``saves_in_background``.

    See ``gcore_core.contract.trainer.SavesInBackground``.
    """

    def __init__(
        self, settings: TrainerSettings, context: WorkerContext, engine: SavingEngine
    ) -> None:
        super().__init__(settings, context, engine)
        self._saving_engine = engine
        self._pending: PendingSave | None = None

    def begin_save(self, directory: Path) -> None:
        if self._pending is not None:
            raise RuntimeError("a save is under way; finish_save ends it")
        self._pending = self._saving_engine.begin_save(directory, self.numbers())

    def finish_save(self) -> None:
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.wait()


# -- this rank's file ------------------------------------------------------------------------------


def local_rows(tensor: Tensor, *, first: bool) -> Tensor | None:
    """Returns the part of a tensor that this rank saves.

    Of a sharded tensor that is its rows. A whole tensor is saved by the ``first`` rank alone; the
    others get None.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return tensor if first else None


def save_rank(
    directory: Path,
    ranks: Ranks,
    rows: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    wrote: Callable[[], None] | None = None,
) -> None:
    """Writes this rank's file of ``state_files``; rank 0 writes the numbers too.

    It waits for no other rank. Rank 0 also removes files that a save by other ranks has left.

    rows: key of ``state_files`` -> this rank's rows.
    wrote: see ``write_tensors``.

    Raises CheckpointError when the system refuses to write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    current = {directory / f"state-{rank:05d}-00000.safetensors" for rank in range(ranks.count)}
    if ranks.rank == 0:
        for stale in set(directory.glob("state-*.safetensors")) - current:
            stale.unlink()
        write_numbers(directory, numbers)
    write_tensors(directory / f"state-{ranks.rank:05d}-00000.safetensors", rows, wrote)


# -- in the background -----------------------------------------------------------------------------


class BackgroundWrite:
    """Runs ``work(wrote)`` in a thread of its own.

    Copying and writing do not hold the interpreter's lock, so training goes on beside them. The
    thread ends with the process, because half a save is worth nothing.
    """

    def __init__(
        self, work: Callable[[Callable[[], None]], None], progress: Callable[[], None]
    ) -> None:
        self._progress = progress
        self._error: BaseException | None = None
        self._moved = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name="save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Callable[[], None]], None]) -> None:
        try:
            work(self._moved.set)
        except BaseException as error:  # raised by wait
            self._error = error

    def wait(self) -> None:
        """See ``PendingSave``. It reports progress for as long as the thread makes some."""
        while self._thread.is_alive():
            self._thread.join(timeout=1.0)
            if self._moved.is_set():
                self._moved.clear()
                self._progress()
        if self._error is not None:
            raise self._error


class Staging:
    """Saves from a copy of the tensors.

    While the copy is made, training may do all that does not change the tensors. The copy lies in
    host memory and is as large as this rank's part of the state; the first save allocates it.

    waited_s: how long ``wait`` has delayed training, summed over all calls.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._copies: dict[str, Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()

    def save(
        self,
        tensors: Mapping[str, Tensor],
        write: Callable[[Mapping[str, Tensor], Callable[[], None]], None],
        progress: Callable[[], None],
    ) -> BackgroundWrite:
        """Begins to copy the tensors and then to run ``write(copies, wrote)``.

        Only one save may be under way at a time.
        """
        self._copied.clear()

        def work(wrote: Callable[[], None]) -> None:
            try:
                self._copy(tensors)
            finally:
                self._copied.set()
            write(self._copies, wrote)

        return BackgroundWrite(work, progress)

    def wait(self) -> None:
        """Waits until the tensors may change; call it before each change."""
        began_s = time.perf_counter()
        self._copied.wait()
        self.waited_s += time.perf_counter() - began_s

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors to host memory, into that of the save before where it fits."""
        former = self._copies
        self._copies = {}
        for name, tensor in tensors.items():
            copy = former.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = (
                    pinned_like(tensor)
                    if tensor.is_cuda
                    else torch.empty(tensor.shape, dtype=tensor.dtype)
                )
            self._copies[name] = copy.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
