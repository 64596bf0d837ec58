"""Keeps or drops the weights of a generator while it sleeps.

Weights of an accelerator are compared, before and after, by sums that it computes itself: bringing
all bytes to the host to hash them there would take longer than the sleep.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from gcore_language.offload import Offload, bytes_of
from gcore_language.weights import to_bytes
from torch import Tensor

from gcore_core.contract.errors import ContractError, WeightMismatch

#: Numbers of a row of ``sums_of``.
_ROW = 4096


@torch.no_grad()
def sums_of(memories: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a digest of each memory. The device on which it lies adds it up.

    The bytes are read as a table of 16-bit integers.
    Every row and every column of the table is added up, without rounding.
    The sums are copied to the host, and their hash (xxh3-64) is the digest.

    Equal bytes have equal digests on any device.
    One number that changes, or two that trade places, give another digest.
    Changes that cancel out in every row and every column do not.

    memories: name -> uint8[n].
    """
    sums: list[Tensor] = []
    counts: list[int] = []
    for memory in memories.values():
        numbers = memory[: len(memory) // 2 * 2].view(torch.int16)
        whole = len(numbers) // _ROW * _ROW
        rows = numbers[:whole].view(-1, _ROW)
        parts = [rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)]
        parts += [numbers[whole:].to(torch.int64), memory[2 * len(numbers) :].to(torch.int64)]
        sums += parts
        counts.append(sum(map(len, parts)))
    if not sums:
        return {}
    found = torch.cat(sums).cpu().numpy()
    ends = np.cumsum(counts)
    digests: dict[str, int] = {}
    for name, end, count in zip(memories, ends.tolist(), counts, strict=True):
        digests[name] = xxhash.xxh3_64_intdigest(found[end - count : end].data)
    return digests


class SleepingWeights:
    """Frees the memory of tensors for a sleep, and allocates it again afterwards.

    On an accelerator ``sleep`` moves the weights to pinned host memory. On a CPU they are there
    already, and stay. With ``discard`` the weights are dropped instead, on either, and after the
    wake a push must bring them again.

    asleep: whether the generator sleeps.
    lacking: whether it is awake without weights: they were discarded and not pushed yet.

    role: the generator's role, for errors.
    tensors: name -> tensor; the tensors' storage is replaced in place.
    discard: whether a sleep drops the weights.
    pushed: the same weights as pushes name them; None: as ``tensors``.
    """

    def __init__(
        self,
        role: str,
        tensors: Mapping[str, Tensor],
        *,
        discard: bool,
        pushed: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.asleep = False
        self.lacking = False
        self._role = role
        self._tensors = tensors
        self._pushed = tensors if pushed is None else pushed
        self._discard = discard
        # version and hashes of the weights that fell asleep
        self._version = 0
        self._hashes: dict[str, int] = {}
        # name -> shape and dtype (a tensor on "meta") of weights that were discarded on a CPU
        self._copies: dict[str, Tensor] = {}
        self._offload = Offload(role, 0, "")  # for an accelerator's weights

    def fingerprint(self) -> dict[str, int]:
        """Returns name -> xxh3-64 of the tensor's bytes."""
        return {
            name: xxhash.xxh3_64_intdigest(to_bytes(self._pushed[name]).data)
            for name in sorted(self._pushed)
        }

    @property
    def moves_tensors(self) -> bool:
        """Whether tensors have other memory after a sleep, and share none any more."""
        return self._discard and not self._on_device

    @property
    def _on_device(self) -> bool:
        return any(tensor.device.type != "cpu" for tensor in self._tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all storages; one that several tensors share counts once."""
        storages = [tensor.untyped_storage() for tensor in self._tensors.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def sleep(self, version: int) -> None:
        """Moves or drops the weights, and remembers their hashes; does nothing when asleep.

        No hashes are taken while weights are lacking: those of the sleep before are kept.
        """
        if self.asleep:
            return
        self.asleep = True
        if not self.lacking:
            self._version = version
            self._hashes = self._digests()
        if self._on_device:
            self._offload.sleep(self._tensors.values(), drop=self._discard)
        elif self._discard:
            for name, tensor in self._tensors.items():
                self._copies[name] = torch.empty_like(tensor, device="meta")
                tensor.data = tensor.data.new_empty(0)

    @torch.no_grad()
    def wake(self) -> None:
        """Allocates the weights again, and fills them unless they were discarded.

        Raises WeightMismatch when they are not the weights that fell asleep.
        """
        if not self.asleep:
            return
        self._offload.wake()
        for name, copy in self._copies.items():
            tensor = self._tensors[name]
            tensor.data = torch.empty_like(copy, device=tensor.device)
        self._copies = {}
        self.asleep = False
        self.lacking = self._discard
        if not self.lacking:
            self._compare()

    def pushed(self, version: int) -> None:
        """Notes that a push is loaded, so that no weights are lacking.

        Raises WeightMismatch when the push has the version of the discarded weights and other
        bytes.
        """
        if self.lacking and version == self._version:
            self._compare()
        self.lacking = False

    def check_awake(self) -> None:
        """Raises ContractError unless the weights are there."""
        if self.asleep:
            raise self._refusal("this generator sleeps.", "Wake it first.")
        if self.lacking:
            raise self._refusal(
                "the weights were discarded for a sleep.", "Push them, or set config.sleep: keep."
            )

    def _digests(self) -> dict[str, int]:
        """Returns what changes with the bytes: of each tensor, or of the memory that some share."""
        if not self._on_device:
            return self.fingerprint()
        first: dict[int, tuple[str, torch.UntypedStorage]] = {}
        for name, tensor in self._tensors.items():
            storage = tensor.untyped_storage()
            first.setdefault(storage.data_ptr(), (name, storage))
        digests: dict[str, int] = sums_of(
            {name: bytes_of(storage) for name, storage in first.values()}
        )
        return digests

    def _refusal(self, what: str, todo: str) -> ContractError:
        """Returns the error for a call that needs the weights."""
        return ContractError(what, where=f"roles.{self._role}", todo=todo)

    def _compare(self) -> None:
        """Raises WeightMismatch when a tensor's hash is not the one it had before the sleep."""
        hashes = self._digests()
        for name, expected in self._hashes.items():
            if hashes[name] != expected:
                raise WeightMismatch(
                    f"tensor {name} is not what it was before the sleep.",
                    where=f"roles.{self._role}",
                    why=f"Both are called version {self._version}.",
                    tensor=name,
                )
