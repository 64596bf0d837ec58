"""The weights of a generator while it sleeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from gcore_language.weights import to_bytes
from torch import Tensor

from gcore_core.contract.errors import ContractError, WeightMismatch


class SleepingWeights:
    """Gives the memory of tensors back and takes it again, in another place.

    On an accelerator ``sleep`` moves the weights to host memory. On a CPU they lie there already
    and stay, unless
    ``discard``: then they are dropped, and after the wake a push must bring them again.
    """

    def __init__(self, role: str, tensors: Mapping[str, Tensor], *, discard: bool) -> None:
        self.asleep = False
        self.lacking = False  # awake, and the discarded weights have not been pushed yet
        self._role, self._tensors, self._discard = role, tensors, discard
        self._version = 0
        self._hashes: dict[str, int] = {}
        self._copies: dict[
            str, Tensor
        ] = {}  # on the host; of those that are discarded, shape and dtype alone

    def fingerprint(self) -> dict[str, int]:
        """Name -> xxh3-64 of the bytes that are held."""
        return {
            name: xxhash.xxh3_64_intdigest(to_bytes(self._tensors[name]).data)
            for name in sorted(self._tensors)
        }

    @property
    def leaves(self) -> bool:
        """Whether a sleep takes the weights from where they are."""
        return self._discard or any(
            tensor.device.type != "cpu" for tensor in self._tensors.values()
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        storages = [tensor.untyped_storage() for tensor in self._tensors.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def sleep(self, version: int) -> None:
        """Nothing when it is asleep. After the wake of discarded weights that no push brought there
        is none to keep.
        """
        if self.asleep:
            return
        self.asleep = True
        if not self.lacking:
            self._version, self._hashes = version, self.fingerprint()
        if not self.leaves:
            return
        for name, tensor in self._tensors.items():
            host = (
                torch.empty_like(tensor, device="meta") if self._discard else tensor.detach().cpu()
            )
            self._copies[name], tensor.data = host, tensor.data.new_empty(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def wake(self) -> None:
        """Raises WeightMismatch when the weights are not those that fell asleep."""
        if not self.asleep:
            return
        for name, copy in self._copies.items():
            tensor = self._tensors[name]
            tensor.data = torch.empty_like(copy, device=tensor.device)
            if not self._discard:
                tensor.data.copy_(copy)
        self._copies, self.asleep, self.lacking = {}, False, self._discard
        if not self.lacking:
            self._compare()

    def pushed(self, version: int) -> None:
        """A push is loaded: discarded weights are here again. Raises WeightMismatch when it has
        their version and other bytes.
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

    def _refusal(self, what: str, todo: str) -> ContractError:
        return ContractError(what, where=f"roles.{self._role}", todo=todo)

    def _compare(self) -> None:
        found = self.fingerprint()
        for name, expected in self._hashes.items():
            if found[name] != expected:
                raise WeightMismatch(
                    f"tensor {name} is not what it was before the sleep.",
                    where=f"roles.{self._role}",
                    why=f"Both are called version {self._version}.",
                    tensor=name,
                )
