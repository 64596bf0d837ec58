"""A weight push: a plan, buckets of whole tensors in shared memory, a commit; hashed on both sides.

The trainer's rank 0 fills buckets while the receivers read earlier ones, all in one memory of ``bucket_bytes``, or of
the largest tensor if that is more. Who asks for bucket i has read those before i - 1; so one is filled where the two
before it are not. A tensor for which there is no room beside them waits: empty buckets go first, until they were read.
One export, whatever the number of receivers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from gcore_core.errors import ContractError, WeightMismatch
from gcore_core.processes.compute import Compute
from gcore_core.processes.gathering import Gathering
from gcore_core.processes.insist import insist
from gcore_core.processes.messages import Bucket, BucketRequest, OpenPush, PlanRequest, PullWeights, PushConfirmed
from gcore_core.processes.service import Call, Peer
from gcore_core.processes.store import copy_hashed, map_file
from gcore_core.protocols import Fingerprints, ReceivesWeights, Trainer
from gcore_core.records import TensorSpec, WeightPlan

PUSH_DEADLINE_S = 300.0
_BUCKET_BYTES = 16 << 20  # long enough to hide a round trip, short enough that three of them stay in a cache


def exhaust(tensors: Iterable[object]) -> None:
    """Runs an export to its end without keeping anything."""
    deque(tensors, maxlen=0)


class PushMemory:
    """A file in shared memory, made on first use. It stays mapped between pushes, since fresh pages are slow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = np.zeros(0, np.uint8)

    def of(self, nbytes: int) -> np.ndarray:
        """Its first ``nbytes``, uint8."""
        if len(self._mapped) < nbytes:
            with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                file.truncate(nbytes)
            self._mapped = np.frombuffer(map_file(self.path, writable=True), np.uint8)
        return self._mapped[:nbytes]


class PushSource:
    """The sending half, in the shell of trainer rank 0."""

    def __init__(self, trainer: Trainer, memory: PushMemory, compute: Compute, request: OpenPush) -> None:
        self._memory, self._compute = memory, compute
        self.key = request.version, request.attempt
        self.plan = WeightPlan(request.version, trainer.weight_specs())
        sizes = [spec.nbytes for spec in self.plan.tensors]
        self._size = max(1, *sizes, min(request.bucket_bytes, sum(sizes)))
        self._full = min(_BUCKET_BYTES, request.bucket_bytes // 3)  # a bucket that has a tensor gets no more than this
        self._tensors: Iterator[tuple[TensorSpec, np.ndarray]] = trainer.export_weights()
        self._held: tuple[TensorSpec, np.ndarray] | None = None
        self._unread: deque[tuple[int, int]] = deque(maxlen=2)  # where the two latest buckets begin and end
        self._gathering = Gathering(request.receivers)
        self._ahead: asyncio.Future[Bucket] | None = None

    async def bucket(self, request: BucketRequest) -> Bucket:
        async def answer(_: list[None]) -> Bucket:
            bucket = await (self._ahead or self._compute(self._fill, request.index))
            if not bucket.last:
                self._ahead = asyncio.ensure_future(self._compute(self._fill, request.index + 1))
            return bucket

        found: Bucket = await self._gathering.join(request.index, request.receiver, None, answer)
        return found

    async def close(self) -> None:
        """Gives up what is not sent. The export still runs to its end, since other ranks may take part in it."""
        self._gathering.abandon(ContractError("another push began before this one ended", where="push"))
        await self._compute(exhaust, self._tensors)

    def _fill(self, index: int) -> Bucket:
        """Copies the next tensors to where nobody reads, none of them if there is no room for one."""
        memory = self._memory.of(self._size)
        self._held = self._held or next(self._tensors, None)
        wanted = max(self._full, self._held[0].nbytes if self._held else 0)
        bounds = [0, *itertools.chain(*sorted(self._unread)), self._size]
        gaps = zip(bounds[::2], bounds[1::2], strict=True)
        start, end = max(gaps, key=lambda gap: min(gap[1] - gap[0], wanted))  # the first that is large enough
        offset, specs, digests = start, list[TensorSpec](), list[int]()
        while self._held is not None:
            spec, array = self._held
            if offset + spec.nbytes > (min(end, start + self._full) if specs else end):
                break
            if array.nbytes != spec.nbytes:
                what = f"the trainer exported {array.nbytes} bytes for {spec.name!r}, its plan says {spec.nbytes}"
                raise ContractError(what, where=f"version {self.key[0]}")
            digests.append(copy_hashed([array.data], memory[offset : offset + spec.nbytes].data))
            specs.append(spec)
            offset += spec.nbytes
            self._held = next(self._tensors, None)
        self._unread.append((start, offset))
        return Bucket(self.key[0], index, str(self._memory.path), start, specs, digests, self._held is None)


async def pull_weights(
    receiver: ReceivesWeights,
    source: Peer,
    request: PullWeights,
    compute: Compute,
    call: Call,
    mapped: dict[str, np.ndarray],
) -> PushConfirmed:
    """The receiving half. Raises WeightMismatch for a push that is truncated, altered, or not of this model.

    mapped: path -> shared memory, kept by the caller between pushes.
    """
    version = request.version
    plan = await insist(source, "plan", PlanRequest(version, request.attempt), WeightPlan, PUSH_DEADLINE_S)
    await compute(receiver.begin_weights, plan)
    digests: dict[str, int] = {}
    loading: asyncio.Future[None] | None = None
    try:
        for index in itertools.count():
            asked = BucketRequest(version, request.receiver, index, request.attempt)
            bucket = await insist(source, "bucket", asked, Bucket, PUSH_DEADLINE_S)
            if len(bucket.digests) != len(bucket.tensors):
                what = f"a bucket has {len(bucket.tensors)} tensors and {len(bucket.digests)} digests"
                raise WeightMismatch(what, where=f"version {version}, bucket {index}")
            for spec, digest in zip(bucket.tensors, bucket.digests, strict=True):
                if plan.tensors[len(digests) : len(digests) + 1] != [spec]:
                    what = f"tensor {spec.name!r} is not the one planned here"
                    raise WeightMismatch(what, where=f"version {version}")
                digests[spec.name] = digest
            memory = _memory(bucket, mapped)
            before, loading = loading, asyncio.ensure_future(compute(_load, receiver, memory, bucket))
            if before is not None:
                await before
            call.progress()
            if bucket.last:
                await loading
                break
    finally:
        if loading is not None:
            loading.cancel()  # nothing more of a push that failed
    if missing := plan.tensors[len(digests) :]:
        raise WeightMismatch(f"the push ended without tensor {missing[0].name!r}", where=f"version {version}")
    await compute(receiver.commit_weights, plan)
    if isinstance(receiver, Fingerprints):
        held = await compute(receiver.fingerprint)
        if wrong := [name for name, digest in digests.items() if held.get(name) != digest]:
            raise WeightMismatch(
                f"after the push the generator holds other bytes in {wrong[0]!r}",
                where=f"version {version}",
                why=f"{len(wrong)} of {len(digests)} tensors differ",
            )
    return PushConfirmed(version, sum(spec.nbytes for spec in plan.tensors), isinstance(receiver, Fingerprints))


def _memory(bucket: Bucket, mapped: dict[str, np.ndarray]) -> np.ndarray:
    if bucket.path not in mapped:
        try:
            mapped[bucket.path] = np.frombuffer(map_file(Path(bucket.path), writable=False), np.uint8)
        except (OSError, ValueError) as error:  # ValueError: it is empty, or its name is none
            why = getattr(error, "strerror", None) or str(error)
            raise WeightMismatch("a bucket's memory cannot be opened", where=bucket.path, why=why) from None
    return mapped[bucket.path]


def _load(receiver: ReceivesWeights, memory: np.ndarray, bucket: Bucket) -> None:
    def verified() -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Hashes each tensor right before the receiver copies it; one that is altered does not reach it."""
        offset = bucket.offset
        for spec, digest in zip(bucket.tensors, bucket.digests, strict=True):
            array = memory[offset : offset + spec.nbytes]
            if array.nbytes != spec.nbytes or xxhash.xxh3_64_intdigest(array.data) != digest:
                raise WeightMismatch(
                    f"tensor {spec.name!r} is not what its sender hashed",
                    where=f"version {bucket.version}, bucket {bucket.index}",
                )
            yield spec, array
            offset += spec.nbytes

    if bucket.tensors:
        receiver.load_weights(verified())
