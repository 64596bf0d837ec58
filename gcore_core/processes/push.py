"""A weight push: a plan, buckets of whole tensors in shared memory, a commit; verified on both sides.

The trainer's rank 0 fills one bucket at a time; a receiver that asks for bucket i has read the ones before it, so the
next is written when all have asked. One gather, one bucket of extra memory, whatever the number of receivers.
"""

from __future__ import annotations

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
from gcore_core.processes.messages import (
    Bucket,
    BucketRequest,
    OpenPush,
    PlanRequest,
    PullWeights,
    PushConfirmed,
)
from gcore_core.processes.service import Call, Peer
from gcore_core.processes.store import map_file
from gcore_core.protocols import Fingerprints, ReceivesWeights, Trainer
from gcore_core.records import TensorSpec, WeightPlan

PUSH_DEADLINE_S = 300.0


def exhaust(tensors: Iterable[object]) -> None:
    """Runs an export to its end without keeping anything."""
    deque(tensors, maxlen=0)


class PushSource:
    """The sending half, in the shell of trainer rank 0. ``path`` is a file in shared memory, made on first use."""

    def __init__(self, trainer: Trainer, path: Path, compute: Compute, request: OpenPush) -> None:
        self._path, self._compute = path, compute
        self.key = request.version, request.attempt
        specs = trainer.weight_specs()
        self.plan = WeightPlan(request.version, specs)
        self._size = max(request.bucket_bytes, max((spec.nbytes for spec in specs), default=0))
        self._size = min(self._size, max(1, sum(spec.nbytes for spec in specs)))
        self._tensors: Iterator[tuple[TensorSpec, np.ndarray]] = trainer.export_weights()
        self._held: tuple[TensorSpec, np.ndarray] | None = None
        self._gathering = Gathering(request.receivers)

    async def bucket(self, request: BucketRequest) -> Bucket:
        async def fill(_: list[None]) -> Bucket:
            return await self._compute(self._fill, request.index)

        answer: Bucket = await self._gathering.join(request.index, request.receiver, None, fill)
        return answer

    async def close(self) -> None:
        """Gives up what is not sent. The export still runs to its end, since other ranks may take part in it."""
        self._gathering.abandon(ContractError("another push began before this one ended", where="push"))
        await self._compute(exhaust, self._tensors)

    def _fill(self, index: int) -> Bucket:
        """Copies the next tensors into the bucket until one does not fit any more."""
        if not self._path.exists() or self._path.stat().st_size < self._size:
            with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                file.truncate(self._size)
        memory = map_file(self._path, writable=True)
        used, specs, digests = 0, [], []
        while (item := self._held or next(self._tensors, None)) is not None:
            spec, array = item
            if used + spec.nbytes > self._size:
                self._held = item
                break
            self._held = None
            memory[used : used + spec.nbytes] = array.data
            specs.append(spec)
            digests.append(xxhash.xxh3_64_intdigest(array.data))
            used += spec.nbytes
        digest = xxhash.xxh3_64_intdigest(memoryview(memory)[:used])
        last = self._held is None
        return Bucket(self.key[0], index, str(self._path), used, digest, specs, digests, last)


async def pull_weights(
    receiver: ReceivesWeights, source: Peer, request: PullWeights, compute: Compute, call: Call
) -> PushConfirmed:
    """The receiving half. Raises WeightMismatch for a push that is truncated, altered, or not of this model."""
    version, attempt = request.version, request.attempt
    plan = await insist(source, "plan", PlanRequest(version, attempt), WeightPlan, PUSH_DEADLINE_S)
    await compute(receiver.begin_weights, plan)
    digests: dict[str, int] = {}
    awaited = deque(plan.tensors)
    total, index, last = 0, 0, False
    while not last:
        asked = BucketRequest(version, request.receiver, index, attempt)
        bucket = await insist(source, "bucket", asked, Bucket, PUSH_DEADLINE_S)
        for spec in bucket.tensors:
            if not awaited or spec != awaited.popleft():
                raise WeightMismatch(f"tensor {spec.name!r} is not the one planned here", where=f"version {version}")
        await compute(_load, receiver, bucket)
        digests.update((spec.name, digest) for spec, digest in zip(bucket.tensors, bucket.digests, strict=True))
        total, index, last = total + bucket.nbytes, index + 1, bucket.last
        call.progress()
    if awaited:
        raise WeightMismatch(f"the push ended without tensor {awaited[0].name!r}", where=f"version {version}")
    await compute(receiver.commit_weights, plan)
    verified = isinstance(receiver, Fingerprints)
    if isinstance(receiver, Fingerprints):
        held = await compute(receiver.fingerprint)
        if wrong := [name for name, digest in digests.items() if held.get(name) != digest]:
            raise WeightMismatch(
                f"after the push the generator holds other bytes in {wrong[0]!r}",
                where=f"version {version}",
                why=f"{len(wrong)} of {len(digests)} tensors differ",
            )
    return PushConfirmed(version, total, verified)


def _load(receiver: ReceivesWeights, bucket: Bucket) -> None:
    memory = memoryview(map_file(Path(bucket.path), writable=False))[: bucket.nbytes]
    whole = len(memory) == bucket.nbytes == sum(spec.nbytes for spec in bucket.tensors)
    if not whole or xxhash.xxh3_64_intdigest(memory) != bucket.digest:
        raise WeightMismatch(
            "a bucket is not what its sender hashed",
            where=f"version {bucket.version}, bucket {bucket.index}",
            why="tensors " + ", ".join(repr(spec.name) for spec in bucket.tensors[:8]),
        )
    offset, tensors = 0, []
    for spec in bucket.tensors:
        tensors.append((spec, np.frombuffer(memory, np.uint8, spec.nbytes, offset)))
        offset += spec.nbytes
    receiver.load_weights(tensors)
