"""Weight pushes that stay on devices; see ``gcore_core.contract.weight_transfer``.

ipc: the sender's memory is opened by the receivers' processes. What crosses is a handle of plain
fields; on CUDA those of torch's own sharing of storages. nccl: every bucket is broadcast into
memory of each receiver, in a process group that is made for the push. On a CPU a file takes the
place of CUDA's handle and gloo that of NCCL, so that all else is the same; there shared memory is
quicker, and these are for who asks for them.

Digests are computed where the bytes lie, by both sides.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.errors import ConfigError, ContractError, WeightMismatch
from gcore_core.contract.generator import ReceivesWeights
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.weight_transfer import SHM, Bucket, Offers, WeightWriter, verified
from gcore_language.push_group import PushGroup, group_library
from gcore_language.weights import flat_bytes

log = logging.getLogger(__name__)

IPC, NCCL = "ipc", "nccl"
_FORMAT = "push-1"  # of handles and digests
_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 19  # what a digest takes at a time: its memory is some times that
# odd numbers that look random (the golden ratio, and a multiplier of splitmix64)
_STRIDE, _SPREAD = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


# -- what a side speaks, and what is chosen --------------------------------------------------------


def offers_of(device: torch.device) -> Offers:
    """Best first, each with words: what all sides of a push must say alike, the process, and
    devices: this one first, then, of ipc, those whose memory it can read. Nothing where the system
    does not say which machine this is.
    """
    try:
        boot, space = (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/ipc"),
        )
    except OSError:
        return {}
    machine, process = f"{_FORMAT} {boot} {space}", str(os.getpid())
    release = ".".join(
        torch.__version__.split(".")[:2]
    )  # what a CUDA handle consists of is torch's own affair
    if device.type == "cpu":
        return {
            SHM: [],
            IPC: [machine, process, "cpu"],
            NCCL: [f"{machine} {group_library(device)}", process],
        }
    return {
        IPC: [f"{machine} torch {release}", process, *_readable(device)],
        NCCL: [f"{machine} {group_library(device)}", process, _name(device.index)],
        SHM: [],
    }


def _name(index: int) -> str:
    """Of a CUDA device, whatever number it has in a process."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _readable(device: torch.device) -> list[str]:
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    near = [index for index in others if torch.cuda.can_device_access_peer(device.index, index)]
    return [_name(index) for index in [device.index, *near]]


def choose(wanted: str, sides: Sequence[Offers]) -> str:
    """The first transport in the trainer's order that all sides can use together, or the one that
    is wanted.

    sides: what the trainer speaks, then each generator. Raises ConfigError, which lists that.
    """
    told = [{**side, SHM: []} for side in sides]
    common = [name for name in told[0] if _together(name, [side.get(name) for side in told])]
    if wanted == "auto":
        return common[0]
    if wanted in common:
        return wanted
    lists = ["; ".join(" ".join([name, *words]) for name, words in side.items()) for side in told]
    raise ConfigError(
        f"weights cannot be pushed by {wanted!r}, which not all sides can use together.",
        where="controller.config.push_transport",
        why="\n".join(
            [
                f"The trainer speaks {lists[0]}.",
                *(f"A generator speaks {side}." for side in lists[1:4]),
            ]
        ),
        todo=f"Use auto, or one of {', '.join(common)}.",
    )


def _together(name: str, words: Sequence[list[str] | None]) -> bool:
    if name == SHM:
        return True
    given = [side for side in words if side]
    alike, processes, devices = ([side[at] for side in given] for at in (0, 1, slice(2, None)))
    if len(given) < len(words) or len(set(alike)) > 1 or len(set(processes)) < len(words):
        return False
    if name == IPC:
        return all(devices[0][0] in seen for seen in devices)
    taken = [device for seen in devices for device in seen]
    return len(set(taken)) == len(taken)  # NCCL has no two ranks on one device


# -- digests ---------------------------------------------------------------------------------------


def fingerprint(content: Tensor) -> int:
    """A signed 64-bit digest of flat uint8, the same on every device; not made against those who
    mean harm.

    The sum over its 64-bit words of a mixture of word and position, so that bytes that changed,
    moved or were swapped show. Waits until the device has done what it was asked before.
    """
    whole = content.numel() // _WORD_BYTES * _WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for start in range(0, whole, _CHUNK_WORDS * _WORD_BYTES):
        total += _mixed(
            content[start : min(whole, start + _CHUNK_WORDS * _WORD_BYTES)], start // _WORD_BYTES
        )
    if whole < content.numel():
        tail = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=content.device)
        tail[: content.numel() - whole] = content[whole:]
        total += _mixed(tail, whole // _WORD_BYTES)
    return int(total)


def _mixed(content: Tensor, first: int) -> Tensor:
    """Whole words, the first of which is number ``first``."""
    if content.data_ptr() % _WORD_BYTES or content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    words = content.view(torch.int64)
    mixed = torch.arange(first, first + len(words), device=content.device).mul_(_STRIDE).add_(words)
    mixed ^= (mixed >> 32).bitwise_and_(0xFFFFFFFF)  # without the mask the sign would come along
    mixed *= _SPREAD
    mixed ^= (mixed >> 29).bitwise_and_(0x7FFFFFFFF)
    return mixed.sum()


# -- handles ---------------------------------------------------------------------------------------


class CudaHandle(msgspec.Struct, array_like=True, frozen=True):
    """The fields of ``UntypedStorage._share_cuda_`` after the device's number, which another
    process may count
    otherwise: ``name`` stands for it.
    """

    name: str
    memory: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    must_wait: bool


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """nbytes: of the memory. file: on a CPU the memory itself; of a broadcast where the group
    meets, with ``ranks``.
    """

    nbytes: int
    file: str = ""
    cuda: CudaHandle | None = None
    ranks: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Handle).decode


def open_file(file: Path, nbytes: int) -> Tensor:
    """Flat uint8 that another process has, too. Raises OSError or ValueError."""
    mapped = np.memmap(file, np.uint8, mode="r+")
    if len(mapped) < nbytes:
        raise ValueError(f"it has {len(mapped)} bytes, not {nbytes}")
    return torch.from_numpy(mapped)[:nbytes]


def share_cuda(memory: Tensor) -> CudaHandle:
    """Not tested: needs CUDA."""
    index, *fields = memory.untyped_storage()._share_cuda_()
    return CudaHandle(_name(index), *fields)


def open_cuda(handle: CudaHandle) -> Tensor:
    """Not tested: needs CUDA. Raises RuntimeError or ValueError."""
    index = [_name(index) for index in range(torch.cuda.device_count())].index(handle.name)
    _, *fields = msgspec.structs.astuple(handle)
    storage = torch.UntypedStorage._new_shared_cuda(index, *fields)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (handle.nbytes,), (1,)
    )


# -- the sending side ------------------------------------------------------------------------------


class IpcWriter:
    """A memory that receivers open. See ``gcore_core.contract.weight_transfer.WeightWriter``."""

    transport = IPC

    def __init__(self, device: torch.device, path: Path, nbytes: int) -> None:
        self._file: Path | None = None
        self._cuda: CudaHandle | None = None
        if device.type == "cpu":
            self._file = _own_name(path)
            with open(
                os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b"
            ) as file:
                file.truncate(nbytes)
            self._memory = open_file(self._file, nbytes)
            self.handle = _encode(Handle(nbytes, file=str(self._file)))
        else:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._cuda = share_cuda(self._memory)
            self.handle = _encode(Handle(nbytes, cuda=self._cuda))

    def fill(self, offset: int, content: Tensor) -> int:
        return _put(self._memory, offset, content)

    def send(self, bucket: Bucket) -> None:
        """It lies where all can read it."""

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if self._cuda is not None:
            # torch would keep the memory for a receiver that was killed before it let go of it
            cuda, self._cuda = self._cuda, None
            torch.UntypedStorage._release_ipc_counter_cuda(cuda.counter, cuda.counter_offset)
            torch.cuda.ipc_collect()


class BroadcastWriter:
    """A memory that is broadcast bucket by bucket. See
    ``gcore_core.contract.weight_transfer.WeightWriter``.
    """

    transport = NCCL

    def __init__(self, device: torch.device, path: Path, nbytes: int, receivers: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._place, self._ranks = _own_name(path), receivers + 1
        self._group: PushGroup | None = None
        self.handle = _encode(Handle(nbytes, file=str(self._place), ranks=self._ranks))

    def fill(self, offset: int, content: Tensor) -> int:
        return _put(self._memory, offset, content)

    def send(self, bucket: Bucket) -> None:
        """All receivers take part. Raises ContractError when one does not, so that the push is
        begun anew.
        """
        self._group = self._group or PushGroup(self._memory.device, self._place, 0, self._ranks)
        self._group.broadcast(self._memory[bucket.offset : bucket.offset + _nbytes(bucket)])

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        if self._group is not None:
            self._group.close()
        self._group = None
        self._place.unlink(missing_ok=True)


def open_writer(
    device: torch.device, wanted: str, offers: Sequence[Offers], path: Path, nbytes: int
) -> WeightWriter | None:
    """See ``gcore_core.contract.weight_transfer.SendsDevice.push_writer``."""
    chosen = choose(wanted, [offers_of(device), *offers])
    try:
        if chosen == IPC:
            return IpcWriter(device, path, nbytes)
        return BroadcastWriter(device, path, nbytes, len(offers)) if chosen == NCCL else None
    except (OSError, RuntimeError) as error:
        log.warning("no memory for a weight push by %s", chosen, exc_info=True)
        raise ContractError(
            f"no memory for a weight push by {chosen}", where="push", why=str(error)
        ) from error


def _own_name(path: Path) -> Path:
    return path.with_name(f"{path.name}-{secrets.token_hex(4)}")


def _put(memory: Tensor, offset: int, content: Tensor) -> int:
    memory[offset : offset + content.numel()].copy_(content)
    return fingerprint(content)


def _handle_of(bucket: Bucket) -> Handle:
    """Raises ContractError, with the path, for bytes that are no handle."""
    try:
        return _decode(bucket.handle)
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: text that is no UTF-8
        raise ContractError(
            f"malformed handle of a bucket: {error}", where=f"version {bucket.version}"
        ) from None


def _nbytes(bucket: Bucket) -> int:
    return sum(spec.nbytes for spec in bucket.tensors)


class DeviceEngine(Protocol):
    """What a trainer's engine brings; see ``gcore_core.contract.weight_transfer.SendsDevice``."""

    device: torch.device

    def export_tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]: ...


class PushesFromDevice:
    """Stands before a trainer of language models among the bases; see
    ``gcore_core.contract.weight_transfer.SendsDevice``.
    """

    _engine: DeviceEngine

    def push_writer(
        self, wanted: str, offers: Sequence[Offers], path: Path, nbytes: int
    ) -> WeightWriter | None:
        return open_writer(self._engine.device, wanted, offers, path, nbytes)

    def export_tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        return self._engine.export_tensors()


# -- the receiving side ----------------------------------------------------------------------------


class DeviceReader:
    """See ``gcore_core.contract.weight_transfer.WeightReader``.

    receiver: its ``load_weights`` gets flat uint8 tensors on ``device`` in place of arrays.
    tensors: what it holds, by name, where it holds them as they were pushed.
    """

    def __init__(
        self,
        receiver: ReceivesWeights,
        transport: str,
        number: int,
        device: torch.device,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._receiver, self._transport, self._number, self._device = (
            receiver,
            transport,
            number,
            device,
        )
        self._tensors = tensors
        self._opened: Tensor | None = None
        self._group: PushGroup | None = None

    def load(self, bucket: Bucket) -> None:
        handle = _handle_of(bucket)
        if self._transport == NCCL:
            memory = torch.empty(_nbytes(bucket), dtype=torch.uint8, device=self._device)
            place = Path(handle.file)
            self._group = self._group or PushGroup(
                self._device, place, 1 + self._number, handle.ranks
            )
            self._group.broadcast(memory)
            bucket = msgspec.structs.replace(bucket, offset=0)
        else:
            memory = self._opened = self._open(handle) if self._opened is None else self._opened
        if bucket.tensors:
            self._receiver.load_weights(verified(bucket, memory, fingerprint))
        for device in {memory.device, self._device} - {torch.device("cpu")}:
            torch.cuda.synchronize(device)  # the sender may overwrite it from here on

    def _open(self, handle: Handle) -> Tensor:
        try:
            return (
                open_file(Path(handle.file), handle.nbytes)
                if handle.cuda is None
                else open_cuda(handle.cuda)
            )
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("a push's memory cannot be opened", exc_info=True)
            raise WeightMismatch(
                "a bucket's memory cannot be opened", where=handle.file, why=str(error)
            ) from error

    def held(self) -> dict[str, int] | None:
        tensors = self._tensors
        return (
            None
            if tensors is None
            else {name: fingerprint(flat_bytes(t)) for name, t in tensors.items()}
        )

    def close(self) -> None:
        self._opened = None
        if self._group is not None:
            self._group.close()
        self._group = None
