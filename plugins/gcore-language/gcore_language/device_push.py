"""Weight pushes that stay on devices; see ``gcore_core.contract.weight_transfer``.

There are two transports:

    ipc   The receivers' processes open the sender's memory. Only a handle of plain fields is sent;
          on CUDA it has the fields of torch's own sharing of storages.
    nccl  Every bucket is broadcast into memory of each receiver, in a process group that is made
          for the push.

On a CPU a file takes the place of CUDA's handle and gloo that of NCCL; all else is the same. Shared
memory is quicker there, so these transports are used only when a configuration names them.

Both sides compute digests on the device that holds the bytes.
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

IPC = "ipc"
NCCL = "nccl"
_FORMAT = "push-1"  # version of handles and digests
_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 19  # words digested at a time; temporary memory is a few times this
# Odd multipliers with well mixed bits: 2^64 over the golden ratio, and a constant of splitmix64.
# 2^64 is taken off both, because torch has signed 64-bit integers only.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_SPREAD = 0xBF58476D1CE4E5B9 - (1 << 64)


# -- what each side supports, and which transport is chosen ----------------------------------------


def offers_of(device: torch.device) -> Offers:
    """Returns the transports that this process supports on a device, best first, with their words.

    Words of ipc and nccl, in order:

    0: the machine, the format and the library; must be equal on all sides.
    1: the process id; must differ between sides.
    2: the device; then, for ipc, each other device whose memory this one can read. nccl on a CPU
        has none.

    Empty when the system does not tell which machine this is.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/ipc")
    except OSError:
        return {}
    machine = f"{_FORMAT} {boot} {space}"
    process = str(os.getpid())
    # the fields of a CUDA handle may change with torch's minor version
    release = ".".join(torch.__version__.split(".")[:2])
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
    """Returns a CUDA device's UUID, the same in every process however it numbers devices."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _readable(device: torch.device) -> list[str]:
    # the device's own name, then those of its peers
    other_devices = [index for index in range(torch.cuda.device_count()) if index != device.index]
    near = [
        index for index in other_devices if torch.cuda.can_device_access_peer(device.index, index)
    ]
    return [_name(index) for index in [device.index, *near]]


def choose(wanted: str, sides: Sequence[Offers]) -> str:
    """Returns the transport of a push.

    wanted: its name, or "auto" for the first in the trainer's order that all sides share.
    sides: the offers of the trainer, then those of each generator. Shared memory is added to all.
    Raises ConfigError, which lists the offers, when not all sides can use the wanted one together.
    """
    offers = [{**side, SHM: []} for side in sides]
    common = [name for name in offers[0] if _together(name, [side.get(name) for side in offers])]
    if wanted == "auto":
        return common[0]
    if wanted in common:
        return wanted
    lists = ["; ".join(" ".join([name, *words]) for name, words in side.items()) for side in offers]
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
    """Returns whether all sides can use a transport together.

    words: of each side, the sender's first, as ``offers_of`` gives them; None where a side lacks
        the transport.
    """
    if name == SHM:
        return True
    known_words = [side for side in words if side]
    alike, processes, devices = (
        [side[at] for side in known_words] for at in (0, 1, slice(2, None))
    )
    if len(known_words) < len(words) or len(set(alike)) > 1 or len(set(processes)) < len(words):
        return False
    if name == IPC:  # every receiver reads the memory of the sender's device
        return all(devices[0][0] in side_devices for side_devices in devices)
    all_devices = [device for side_devices in devices for device in side_devices]
    return len(set(all_devices)) == len(all_devices)  # NCCL has no two ranks on one device


# -- digests ---------------------------------------------------------------------------------------


def fingerprint(content: Tensor) -> int:
    """Returns a signed 64-bit digest of flat uint8, the same on every device.

    Each 64-bit word is mixed with its position, and the results are summed modulo 2^64, so the
    digest changes when bytes change, move or are swapped. It is not cryptographic: it finds
    accidents, not attacks. A last part of a word is filled with zeros. Waits for the device to
    finish its earlier work.
    """
    whole_bytes = content.numel() // _WORD_BYTES * _WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for start in range(0, whole_bytes, _CHUNK_WORDS * _WORD_BYTES):
        total += _mixed(
            content[start : min(whole_bytes, start + _CHUNK_WORDS * _WORD_BYTES)],
            start // _WORD_BYTES,
        )
    if whole_bytes < content.numel():
        tail = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=content.device)
        tail[: content.numel() - whole_bytes] = content[whole_bytes:]
        total += _mixed(tail, whole_bytes // _WORD_BYTES)
    return int(total)


def _mixed(content: Tensor, first: int) -> Tensor:
    """Returns the sum, int64 0-d, of mixed words.

    content: flat uint8, a whole number of words.
    first: the position of its first word in the whole tensor.
    """
    # a view as int64 needs aligned memory
    if content.data_ptr() % _WORD_BYTES or content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    words = content.view(torch.int64)
    mixed = torch.arange(first, first + len(words), device=content.device).mul_(_STRIDE).add_(words)
    # torch shifts copies of the sign in from the left; the masks make the shifts logical ones
    mixed ^= (mixed >> 32).bitwise_and_(0xFFFFFFFF)
    mixed *= _SPREAD
    mixed ^= (mixed >> 29).bitwise_and_(0x7FFFFFFFF)
    return mixed.sum()


# -- handles ---------------------------------------------------------------------------------------


class CudaHandle(msgspec.Struct, array_like=True, frozen=True):
    """The fields that torch's ``UntypedStorage._share_cuda_`` returns, in their order.

    The first, the device's number, is replaced by ``name``, the device's UUID: another process may
    number its devices differently.
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
    """What a receiver needs in order to reach a push's memory.

    nbytes: size of the memory.
    file: for ipc on a CPU, the file that is the memory; for nccl, the file at which the process
        group meets.
    cuda: for ipc on CUDA, what opens the memory.
    ranks: for nccl, the number of processes in the group.
    """

    nbytes: int
    file: str = ""
    cuda: CudaHandle | None = None
    ranks: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Handle).decode


def open_file(file: Path, nbytes: int) -> Tensor:
    """Maps a file as flat uint8[nbytes], shared with the other processes that map it.

    Raises OSError if it cannot be mapped, and ValueError if it is too short.
    """
    mapped = np.memmap(file, np.uint8, mode="r+")
    if len(mapped) < nbytes:
        raise ValueError(f"it has {len(mapped)} bytes, not {nbytes}")
    return torch.from_numpy(mapped)[:nbytes]


def share_cuda(memory: Tensor) -> CudaHandle:
    """Returns a handle by which another process can open CUDA memory.

    No test runs it, since it needs CUDA; ``benchmarks/gpu.py`` does.
    """
    index, *fields = memory.untyped_storage()._share_cuda_()
    return CudaHandle(_name(index), *fields)


def open_cuda(handle: CudaHandle) -> Tensor:
    """Opens another process's CUDA memory as flat uint8.

    No test runs it, since it needs CUDA; ``benchmarks/gpu.py`` does.

    Raises ValueError if this process does not see the device, and RuntimeError if CUDA refuses.
    """
    index = [_name(index) for index in range(torch.cuda.device_count())].index(handle.name)
    _, *fields = msgspec.structs.astuple(handle)
    storage = torch.UntypedStorage._new_shared_cuda(index, *fields)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (handle.nbytes,), (1,)
    )


# -- the sending side ------------------------------------------------------------------------------


class IpcWriter:
    """Sends a push through memory that receivers open.

    See ``gcore_core.contract.weight_transfer.WeightWriter``.

    device: where the memory is.
    path: the name, but for a random suffix, of the file that is the memory on a CPU.
    nbytes: size of the memory.
    """

    transport = IPC

    def __init__(self, device: torch.device, path: Path, nbytes: int) -> None:
        self._file: Path | None = None
        self._cuda: CudaHandle | None = None
        if device.type == "cpu":
            self._file = _unique_path(path)
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
        """Does nothing: the receivers read the sender's memory."""

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if self._cuda is not None:
            # torch counts the receivers of shared memory and keeps it until all have closed it; one
            # that was killed never does, so this side's count is released by hand
            cuda = self._cuda
            self._cuda = None
            torch.UntypedStorage._release_ipc_counter_cuda(cuda.counter, cuda.counter_offset)
            torch.cuda.ipc_collect()


class BroadcastWriter:
    """Sends a push by broadcasting its memory bucket by bucket.

    See ``gcore_core.contract.weight_transfer.WeightWriter``.

    device: where the memory is.
    path: the name, but for a random suffix, of the file at which the group meets.
    nbytes: size of the memory.
    receivers: how many there are; all take part in every broadcast.
    """

    transport = NCCL

    def __init__(self, device: torch.device, path: Path, nbytes: int, receivers: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._place = _unique_path(path)
        os.close(os.open(self._place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        self._ranks = receivers + 1
        self._group: PushGroup | None = None
        self.handle = _encode(Handle(nbytes, file=str(self._place), ranks=self._ranks))

    def fill(self, offset: int, content: Tensor) -> int:
        return _put(self._memory, offset, content)

    def send(self, bucket: Bucket) -> None:
        """Broadcasts a bucket to all receivers; the group is made with the first bucket.

        Raises ContractError when a receiver does not take part; the push then starts anew.
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
    """Chooses a transport and opens its sending side; None means shared memory.

    See ``gcore_core.contract.weight_transfer.SendsDevice.push_writer``. Raises ConfigError from
    ``choose``, and ContractError when there is no memory for the push.
    """
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


def _unique_path(path: Path) -> Path:
    """Adds a random suffix: a push that starts anew must not find the file of the first try."""
    return path.with_name(f"{path.name}-{secrets.token_hex(4)}")


def _put(memory: Tensor, offset: int, content: Tensor) -> int:
    # see ``WeightWriter.fill``
    memory[offset : offset + content.numel()].copy_(content)
    return fingerprint(content)


def _handle_of(bucket: Bucket) -> Handle:
    """Decodes a bucket's handle. Raises ContractError, which names the field, if malformed."""
    try:
        return _decode(bucket.handle)
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: text that is no UTF-8
        raise ContractError(
            f"malformed handle of a bucket: {error}", where=f"version {bucket.version}"
        ) from None


def _nbytes(bucket: Bucket) -> int:
    return sum(spec.nbytes for spec in bucket.tensors)


class DeviceEngine(Protocol):
    """What ``PushesFromDevice`` needs of a trainer's engine.

    device: where its weights are.
    export_tensors: see ``gcore_core.contract.weight_transfer.SendsDevice``.
    """

    device: torch.device

    def export_tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]: ...


class PushesFromDevice:
    """A mixin that lets a trainer push weights from its device.

    It comes before ``LanguageTrainer`` among the base classes. See
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
    """Receives a push; see ``gcore_core.contract.weight_transfer.WeightReader``.

    receiver: its ``load_weights`` gets flat uint8 tensors in place of arrays: on ``device`` by
        nccl, in the sender's memory by ipc.
    transport: "ipc" or "nccl".
    number: this receiver's, from 0; it has rank ``number + 1`` in the process group.
    device: where the receiver's weights are.
    tensors: the receiver's weights by name, if it holds them exactly as they were pushed; without
        them ``held`` returns None.
    """

    def __init__(
        self,
        receiver: ReceivesWeights,
        transport: str,
        number: int,
        device: torch.device,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._receiver = receiver
        self._transport = transport
        self._number = number
        self._device = device
        self._tensors = tensors
        self._opened: Tensor | None = None
        self._group: PushGroup | None = None

    def load(self, bucket: Bucket) -> None:
        """Has the receiver load a bucket; see ``WeightReader.load``.

        By nccl the bucket is broadcast into new memory. By ipc the sender's memory is opened with
        the first bucket and read at the bucket's offset.
        """
        handle = _handle_of(bucket)
        if self._transport == NCCL:
            memory = torch.empty(_nbytes(bucket), dtype=torch.uint8, device=self._device)
            place = Path(handle.file)
            self._group = self._group or PushGroup(
                self._device, place, 1 + self._number, handle.ranks
            )
            self._group.broadcast(memory)
            bucket = msgspec.structs.replace(bucket, offset=0)  # ``memory`` is this bucket alone
        else:
            memory = self._opened = self._open(handle) if self._opened is None else self._opened
        if bucket.tensors:
            self._receiver.load_weights(verified(bucket, memory, fingerprint))
        for device in {memory.device, self._device} - {torch.device("cpu")}:
            torch.cuda.synchronize(device)  # after this the sender may overwrite the bucket

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
