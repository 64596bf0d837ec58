"""Defines how buckets of a weight push travel: through shared memory or a way of both backends.

A bucket is some whole tensors in one memory. The sender writes them there and digests each one. The
receiver reads the same bytes, digests them again and loads a tensor only where the digests agree.
``gcore_core.workers.push`` says when this happens, whatever the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.records import TensorSpec

SHM = "shm"  # shared memory, the transport that is always there

#: The transports that a generator can use: transport -> words from which the trainer's backend sees
#: whether both can use it together.
Offers = dict[str, list[str]]


class Bucket(msgspec.Struct, array_like=True):
    """Says where some whole tensors of a push lie, one after the other in one memory.

    version: of the weights that the push brings.
    index: 0 for the push's first bucket.
    path: the file in shared memory that holds them, unless ``transport`` is another one.
    offset: where in the memory the first tensor begins, in bytes.
    tensors: which they are, in order.
    digests: of each tensor, xxh3-64, or what its transport takes in place of it.
    last: whether it ends the push.
    transport: how the bytes travel.
    handle: of other transports, where the memory is: plain fields, encoded.
    node: name of the node whose memory it is; empty where all of the push are on one.
    parents: names of other nodes that get the bucket as well. The receiver's node is to read it
        from the first, from the next where that fails, and from ``node`` where all do.
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
    node: str = ""
    parents: list[str] = []


class WeightWriter(Protocol):
    """Writes the buckets of one push.

    transport: its name, as in ``Offers``.
    handle: what receivers need to find the memory: plain fields, encoded; empty for shared memory.
    """

    transport: str
    handle: bytes

    def fill(self, offset: int, content: Any) -> int:
        """Copies the flat bytes of one tensor into the memory; returns their digest.

        Nobody reads the memory there at that time.
        """

    def send(self, bucket: Bucket) -> None:
        """Sends a bucket that every receiver has been told about.

        It returns when the transport needs nothing more of this side for the bucket.
        """

    def close(self) -> None:
        """Gives the memory back, in the middle of a push too; a second time it does nothing."""


class WeightReader(Protocol):
    """Reads the buckets of one push."""

    def load(self, bucket: Bucket) -> None:
        """Loads the tensors, and verifies each right before it is loaded.

        Raises WeightMismatch naming the tensor.
        """

    def held(self) -> Mapping[str, int] | None:
        """Returns the digests of what is loaded, by name; None where it cannot be told."""

    def close(self) -> None:
        """Lets go of the sender's memory, in the middle of a push too."""


@runtime_checkable
class SendsDevice(Protocol):
    """Pushes from device memory: capability "weights.device" of a trainer. Called on rank 0."""

    def push_writer(
        self, transport: str, offers: Sequence[Offers], path: Path, nbytes: int
    ) -> WeightWriter | None:
        """Chooses how a push travels; None means through shared memory.

        It is asked only where all generators of the push are on the trainer's node. To others a
        push travels through shared memory on both nodes, see ``gcore_core.workers.push``.

        transport: "auto", or the transport that a person asks for. Raises ConfigError where not all
            sides can use that one.
        offers: what each generator can use.
        path: beginning of the names of files that it may make, in a private directory of the run.
        nbytes: size of the memory for all buckets.
        """

    def export_tensors(self) -> Iterator[tuple[TensorSpec, Any]]:
        """Exports as ``export_weights`` does, with its collectives, but in the writer's form.

        That is the flat bytes of each tensor, as an object with ``nbytes``.
        """


@runtime_checkable
class ReceivesDevice(Protocol):
    """Receives pushes in device memory: capability "weights.device" of a generator."""

    def push_offers(self) -> Offers:
        """Returns the transports that it can use now.

        Each comes with words that the trainer's backend reads; see ``Offers``.
        """

    def push_reader(self, transport: str, receiver: int) -> WeightReader:
        """Makes the reader of a push that goes by ``transport``.

        receiver: this generator's number in the push, from 0.
        """


def verified(
    bucket: Bucket, memory: Any, digest_of: Callable[[Any], int]
) -> Iterator[tuple[TensorSpec, Any]]:
    """Gives the bucket's tensors one by one, each verified right before the receiver copies it.

    Raises WeightMismatch for a tensor that was altered, so that it does not reach the receiver.

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
