"""Saving a rank's part of a trainer's state: at once, or from a copy while training goes on.

A rank writes one file of the safetensors format, with its rows of every tensor it has a part of;
``state_files`` puts them together again for any number of ranks. A save in the background copies
first, into memory that is kept from one save to the next, since fresh pages take ten times as long;
only an update that comes before the copy is complete waits.
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
from gcore_language.ranks import Ranks
from gcore_language.settings import TrainerSettings
from gcore_language.state_files import write_numbers, write_tensors
from gcore_language.training import LanguageTrainer, TrainingEngine


class PendingSave(Protocol):
    """A save under way."""

    def wait(self) -> None:
        """Until it is durable; every rank calls it, once. Raises what went wrong in writing."""


class SavingEngine(TrainingEngine, Protocol):
    """An engine that trains on while its state is written."""

    def begin_save(self, directory: Path, numbers: dict[str, Any]) -> PendingSave:
        """What ``save`` would save now."""


class SavingTrainer(LanguageTrainer):
    """A trainer with capability "save.background"; see
    ``gcore_core.contract.trainer.SavesInBackground``.
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
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


# -- this rank's file ------------------------------------------------------------------------------


def local_rows(tensor: Tensor, *, first: bool) -> Tensor | None:
    """The part of a tensor that this rank saves: its rows of a sharded one; a whole one belongs to
    the ``first``.
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
    """This rank's file of ``state_files``, and from rank 0 the numbers; meets no other rank.
    ``wrote`` as of ``write_tensors``. Raises CheckpointError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    own = {directory / f"state-{rank:05d}-00000.safetensors" for rank in range(ranks.count)}
    if ranks.rank == 0:
        for stale in set(directory.glob("state-*.safetensors")) - own:  # of a save by other ranks
            stale.unlink()
        write_numbers(directory, numbers)
    write_tensors(directory / f"state-{ranks.rank:05d}-00000.safetensors", rows, wrote)


# -- in the background -----------------------------------------------------------------------------


class BackgroundWrite:
    """``work(wrote)`` in a thread of its own: copying and writing hold no lock of the interpreter.

    The thread ends with the process, because half a save is worth nothing.
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
        except BaseException as error:  # told by wait
            self._error = error

    def wait(self) -> None:
        """See ``PendingSave``; tells progress for as long as there is some."""
        while self._thread.is_alive():
            self._thread.join(timeout=1.0)
            if self._moved.is_set():
                self._moved.clear()
                self._progress()
        if self._error is not None:
            raise self._error


class Staging:
    """Saves from a copy, made while training goes on with all that leaves the tensors as they are.

    The copy's memory is of the host, as much as this rank's part of the state; the first save makes
    it. waited_s: how long ``wait`` has held training up, in all.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._held: dict[str, Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()

    def save(
        self,
        tensors: Mapping[str, Tensor],
        write: Callable[[Mapping[str, Tensor], Callable[[], None]], None],
        progress: Callable[[], None],
    ) -> BackgroundWrite:
        """Begins ``write(copies, wrote)``; one save at a time."""
        self._copied.clear()

        def work(wrote: Callable[[], None]) -> None:
            try:
                self._copy(tensors)
            finally:
                self._copied.set()
            write(self._held, wrote)

        return BackgroundWrite(work, progress)

    def wait(self) -> None:
        """Until the tensors that are being saved may change; to be called before each change."""
        began_s = time.perf_counter()
        self._copied.wait()
        self.waited_s += time.perf_counter() - began_s

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        kept, self._held = self._held, {}
        for name, tensor in tensors.items():
            held = kept.get(name)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._held[name] = held.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
