"""How buckets of a weight push travel: through shared memory, or as both backends can do it better.

A bucket is some whole tensors in one memory. The sender writes them there and digests each; the
receiver reads the same bytes, digests them again and loads what is right. ``runtime.push`` says
when, whatever the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.records import TensorSpec

SHM = "shm"  # the transport that is always there: shared memory

#: What a generator speaks: transport -> words by which the trainer's backend sees whether both can
#: use it together.
Offers = dict[str, list[str]]


class Bucket(msgspec.Struct, array_like=True):
    """Some whole tensors of a push, one after the other in one memory.

    version: of the weights that the push brings.
    index: 0 for the push's first bucket.
    path: the file in shared memory that holds them, unless ``transport`` is another one.
    offset: where in the memory the first tensor begins, in bytes.
    tensors: which they are, in order.
    digests: of each tensor, xxh3-64, or what its transport takes in place of it.
    last: whether it ends the push.
    transport: how the bytes travel.
    handle: of other transports, where the memory is: plain fields, encoded.
    """

    version: int
    index: int
    path: str
    offset: int
    tensors: list[TensorSpec]
    digests: list[int]
    last: bool
    transport: str = SHM
    handle: bytes = b""


class WeightWriter(Protocol):
    """The sending half of one push.

    transport: its name, as in ``Offers``.
    handle: what receivers need to find the memory; plain fields, encoded.
    """

    transport: str
    handle: bytes

    def fill(self, offset: int, content: Any) -> int:
        """Copies flat bytes of one tensor into the memory, where nobody reads, and returns their
        digest.
        """

    def send(self, bucket: Bucket) -> None:
        """Every receiver has been told of the bucket. Comes back when it needs nothing more of this
        side.
        """

    def close(self) -> None:
        """Gives the memory back, in the middle of a push too; a second time it does nothing."""


class WeightReader(Protocol):
    """The receiving half of one push."""

    def load(self, bucket: Bucket) -> None:
        """Loads the tensors, each verified right before that. Raises WeightMismatch naming the
        tensor.
        """

    def held(self) -> Mapping[str, int] | None:
        """The digests of what is loaded, by name; None where it cannot be told."""

    def close(self) -> None:
        """Lets go of the sender's memory, in the middle of a push too."""


@runtime_checkable
class SendsDevice(Protocol):
    """Capability "weights.device" of a trainer. Called on rank 0."""

    def push_writer(
        self, wanted: str, offers: Sequence[Offers], path: Path, nbytes: int
    ) -> WeightWriter | None:
        """Chooses how a push goes by what each generator offers; None: through shared memory.

        wanted: "auto", or the transport that a person asks for: raises ConfigError where not all
            sides speak it.
        path: names that begin so may be made, in a private directory of the run. nbytes: of the
            memory.
        """

    def export_tensors(self) -> Iterator[tuple[TensorSpec, Any]]:
        """As ``export_weights``, with its collectives: flat bytes with ``nbytes``, as the writer
        takes them.
        """


@runtime_checkable
class ReceivesDevice(Protocol):
    """Capability "weights.device" of a generator."""

    def push_offers(self) -> Offers:
        """The transports that it can use now, each with words that the trainer's backend reads."""

    def push_reader(self, transport: str, receiver: int) -> WeightReader:
        """The receiving half of a push that goes by ``transport``.

        receiver: this generator's number in the push, from 0.
        """


def verified(
    bucket: Bucket, memory: Any, digest_of: Callable[[Any], int]
) -> Iterator[tuple[TensorSpec, Any]]:
    """Digests each tensor right before the receiver copies it; one that is altered does not reach
    it.

    memory: flat bytes that can be sliced, with ``nbytes``, on whatever device.
    """
    offset = bucket.offset
    for spec, digest in zip(bucket.tensors, bucket.digests, strict=True):
        content = memory[offset : offset + spec.nbytes]
        if content.nbytes != spec.nbytes or digest_of(content) != digest:
            raise WeightMismatch(
                f"tensor {spec.name!r} is not what its sender hashed",
                where=f"version {bucket.version}, bucket {bucket.index}",
            )
        yield spec, content
        offset += spec.nbytes
