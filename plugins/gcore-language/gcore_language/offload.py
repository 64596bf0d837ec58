"""Keeps a worker's weights and optimizer elsewhere while it sleeps.

What is moved are storages, not tensors: every tensor that looks at one, sharded or tied, is whole
again without being told.

From an accelerator the bytes go to pinned host memory. On a CPU that would be the same memory, so
they go to a file of the run's directory, and the system takes the pages of their memory; addresses
stay. The file must lie on a disk: files of a tmpfs are memory too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from gcore_core.contract.errors import ContractError, PlacementError
from gcore_language.pinned import pinned_bytes

_IN_MEMORY = ("tmpfs", "ramfs")


class Offload:
    """Holds a rank's tensors while it sleeps.

    asleep: whether it does.

    role, rank: whose they are.
    directory: of the run, for the file; "" refuses to sleep on a CPU.
    """

    def __init__(self, role: str, rank: int, directory: str) -> None:
        self.asleep = False
        self._role = role
        self._file = Path(directory) / f"asleep-{role}-{rank}.bin" if directory else None
        self._on_host: list[torch.UntypedStorage] = []
        self._on_device: list[tuple[torch.UntypedStorage, int]] = []  # and their bytes
        self._scratch: list[tuple[torch.UntypedStorage, int]] = []  # likewise
        self._dropped = False
        self._pinned: dict[int, Tensor] = {}  # by place; kept, since pinning is slow

    def check_awake(self) -> None:
        """Raises ContractError while the tensors are away."""
        if self.asleep:
            raise ContractError(
                "this trainer sleeps.", where=f"roles.{self._role}", todo="Wake it first."
            )

    def sleep(
        self, tensors: Iterable[Tensor], *, drop: bool = False, scratch: Iterable[Tensor] = ()
    ) -> None:
        """Moves the bytes of the tensors away and frees their memory.

        drop: whether the bytes of an accelerator are dropped instead; ``wake`` then gives memory
            with any bytes.
        scratch: tensors whose bytes nobody needs again; ``wake`` makes zeros of them. What they
            share with the tensors to keep is kept.

        Raises PlacementError where there is no room for them; nothing has been moved then.
        """
        if self.asleep:
            return
        storages = storages_of(tensors)
        self._on_host = [storage for storage in storages if storage.device.type == "cpu"]
        self._on_device = [
            (storage, storage.nbytes()) for storage in storages if storage.device.type != "cpu"
        ]
        kept = {storage.data_ptr() for storage in storages}
        self._scratch = [
            (storage, storage.nbytes())
            for storage in storages_of(scratch)
            if storage.data_ptr() not in kept
        ]
        self._write(self._on_host)
        self._dropped = drop
        for place, (storage, _) in enumerate(self._on_device if not drop else ()):
            self._pin(place, storage)
        _wait_for_devices()
        scratch_storages = [storage for storage, _ in self._scratch]
        for storage in (*storages, *scratch_storages):
            if storage.device.type == "cpu":
                _give_pages(storage)
            else:
                storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.asleep = True

    def wake(self) -> None:
        """Takes the memory again and fills it with the bytes that it had."""
        if not self.asleep:
            return
        for place, (storage, size) in enumerate(self._on_device):
            storage.resize_(size)
            if self._dropped:
                continue
            bytes_of(storage).copy_(self._pinned[place], non_blocking=True)
        for storage, size in self._scratch:
            if storage.nbytes() < size:  # on a CPU it never got smaller
                storage.resize_(size)
            bytes_of(storage).zero_()
        if self._on_host:
            path = self._path()
            with path.open("rb", buffering=0) as file:
                for storage in self._on_host:
                    _read_into(file.fileno(), _view(storage))
            path.unlink()
        _wait_for_devices()
        self.asleep = False

    def close(self) -> None:
        """Removes the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _pin(self, place: int, storage: torch.UntypedStorage) -> None:
        kept = self._pinned.get(place)
        if kept is None or kept.numel() != storage.nbytes():
            kept = pinned_bytes(storage.nbytes())
            self._pinned[place] = kept
        kept.copy_(bytes_of(storage), non_blocking=True)

    def _write(self, storages: list[torch.UntypedStorage]) -> None:
        """Writes storages in host memory to the file. Raises PlacementError without room for it."""
        if not storages:
            return
        path = self._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = _file_system(path.parent)
        if kind in _IN_MEMORY:
            raise self._no_room(f"{path.parent} is a {kind}, whose files are memory too.")
        try:
            with path.open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, sum(s.nbytes() for s in storages))
                for storage in storages:
                    _write_all(file.fileno(), _view(storage))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._no_room(f"{path}: {error.strerror}.") from error

    def _path(self) -> Path:
        if self._file is None:
            raise self._no_room("The run has no directory.")
        return self._file

    def _no_room(self, why: str) -> PlacementError:
        return PlacementError(
            "there is no room for what a trainer keeps while it sleeps.",
            where="placement.sleep_in_rollout",
            why=why,
            todo="Put run.dir on a disk with room for weights and moments, or set it to never.",
            role=self._role,
        )


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the pages and device memory in which this rank's rows lie."""
    return sum(
        _resident(storage) if storage.device.type == "cpu" else storage.nbytes()
        for storage in storages_of(tensors)
    )


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's rows of a tensor, the very tensor that it holds."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Returns the storages of this rank's rows of the tensors, each once, without empty ones."""
    storages = {}
    for tensor in tensors:
        storage = _local(tensor).untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())


def _view(storage: torch.UntypedStorage) -> memoryview:
    """Returns the bytes of a storage in host memory; the same memory."""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast(
        "B"
    )


def _pages(storage: torch.UntypedStorage, *, inner: bool) -> tuple[int, int]:
    """Returns address and bytes of the pages in which a storage lies.

    inner: without those that it shares with other memory.
    """
    first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    size = mmap.PAGESIZE
    if inner:
        return -(-first // size) * size, max(0, end // size * size - -(-first // size) * size)
    return first // size * size, -(-end // size) * size - first // size * size


def _give_pages(storage: torch.UntypedStorage) -> None:
    """Has the system take a storage's pages; they read as something else until they are filled."""
    address, size = _pages(storage, inner=True)
    if not size:
        return
    failed = _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    if failed:
        raise OSError(ctypes.get_errno(), "the system does not take memory back")


def _resident(storage: torch.UntypedStorage) -> int:
    """Returns how many bytes of a storage's pages are in memory."""
    address, size = _pages(storage, inner=False)
    places = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    if _libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), places):
        raise OSError(ctypes.get_errno(), "the system does not say which pages are in memory")
    return mmap.PAGESIZE * sum(place & 1 for place in places)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns a storage as uint8[bytes]; the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _write_all(file: int, content: memoryview) -> None:
    while content:
        content = content[os.write(file, content) :]


def _read_into(file: int, room: memoryview) -> None:
    while room:
        n_read = os.readv(file, [room])
        if not n_read:
            raise EOFError("the file of a sleeping trainer has been cut")
        room = room[n_read:]


def _file_system(directory: Path) -> str:
    """Returns the kind of file system that a directory lies on; "" where nobody says."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    place = directory.resolve()
    fields = [line.split() for line in lines]
    around = [(row[1], row[2]) for row in fields if place.is_relative_to(row[1])]
    return max(around, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _wait_for_devices() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class OffloadedEngine(Protocol):
    """Is an engine whose tensors ``Offload`` can hold for a while."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's weights, optimizer and reference, as they are held now."""

    def sleep(self) -> None:
        """See ``SleepsInRollout.sleep``."""

    def wake(self) -> None:
        """See ``SleepsInRollout.wake``."""


class OffloadsInRollout:
    """Lets a trainer sleep in the rollout: ``gcore_core.contract.trainer.SleepsInRollout``."""

    _engine: OffloadedEngine

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, optimizer and reference, as they are held now."""
        return self._engine.memory_bytes

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()
