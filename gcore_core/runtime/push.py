"""A weight push: a plan, buckets of whole tensors in one memory, a commit; digested on both sides.

The trainer's rank 0 fills buckets while the receivers read earlier ones, all in one memory of
``bucket_bytes``, or of the largest tensor if that is more. Who asks for bucket i has read those
before i - 1, and then bucket i + 2 is filled: where the three before it are not. A tensor for which
there is no room beside them waits: empty buckets go first, until they were read. One export,
whatever the number of receivers. The memory is shared memory, unless both sides speak something
better (see ``gcore_core.contract.weight_transfer``): this module does not know what.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gcore_core.contract.errors import ConfigError, ContractError, WeightMismatch
from gcore_core.contract.generator import Fingerprints, ReceivesWeights
from gcore_core.contract.launching import Peer
from gcore_core.contract.records import TensorSpec, WeightPlan
from gcore_core.contract.trainer import Trainer
from gcore_core.contract.weight_transfer import (
    SHM,
    Bucket,
    Offers,
    ReceivesDevice,
    SendsDevice,
    WeightReader,
    WeightWriter,
    verified,
)
from gcore_core.runtime.messages import (
    BUCKET,
    PLAN,
    BucketRequest,
    OpenPush,
    PlanRequest,
    PullWeights,
    PushConfirmed,
)
from gcore_core.runtime.process.compute import Compute
from gcore_core.runtime.rpc.gathering import Gathering
from gcore_core.runtime.rpc.retry import insist, shown
from gcore_core.runtime.rpc.service import Call
from gcore_core.runtime.store.client import copy_hashed, map_file

_BUCKET_BYTES = (
    64 << 20
)  # no cache holds one, and what is copied passes by the caches: so few, and few messages
_AHEAD = 2  # buckets that are filled before they are asked for: the sender waits for no round trip


def exhaust(tensors: Iterable[object]) -> None:
    """Runs an export to its end without keeping anything."""
    deque(tensors, maxlen=0)


class PushMemory:
    """A file in shared memory, made on first use. It stays mapped between pushes, since fresh pages
    are slow.

    It is the WeightWriter of shared memory.
    """

    transport, handle = SHM, b""

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

    def fill(self, offset: int, content: np.ndarray) -> int:
        return copy_hashed([content.data], self._mapped[offset : offset + content.nbytes].data)

    def send(self, bucket: Bucket) -> None: ...

    def close(self) -> None: ...


class PushSource:
    """The sending half, in the shell of trainer rank 0."""

    def __init__(
        self, trainer: Trainer, memory: PushMemory, compute: Compute, request: OpenPush
    ) -> None:
        self._trainer, self._compute, self._request, self._path = (
            trainer,
            compute,
            request,
            memory.path,
        )
        self.key = request.version, request.attempt
        self.plan = WeightPlan(request.version, trainer.weight_specs())
        sizes = [spec.nbytes for spec in self.plan.tensors]
        self._size = max(1, *sizes, min(request.bucket_bytes, sum(sizes)))
        self._full = min(
            _BUCKET_BYTES, request.bucket_bytes // 4
        )  # a bucket that has a tensor gets no more than this
        memory.of(self._size)
        self._writer: WeightWriter = memory
        self._tensors: Iterator[tuple[TensorSpec, Any]] = trainer.export_weights()
        self._held: tuple[TensorSpec, Any] | None = None
        self._unread: deque[tuple[int, int]] = deque(
            maxlen=_AHEAD + 1
        )  # where the latest buckets begin and end
        self._gathering, self._asked = (
            Gathering(request.receivers),
            -1,
        )  # the bucket that all have asked for
        self._latest: Bucket | None = None
        self._ahead: deque[asyncio.Future[Bucket]] = deque()
        self._sent: asyncio.Future[None] | None = None

    async def bucket(self, request: BucketRequest, call: Call) -> Bucket:
        async def answer(offers: list[Offers]) -> Bucket:
            self._asked = request.index
            if request.index == 0:
                await self._compute(self._begin, offers)
                self._fill_soon()
            if self._sent is not None:
                await self._sent
            bucket = await self._ahead.popleft()
            if bucket.index < request.index:  # everybody has read the last one
                await self._compute(self._writer.close)
                return bucket
            self._sent = asyncio.ensure_future(self._compute(self._writer.send, bucket))
            while len(self._ahead) < _AHEAD:
                self._fill_soon()
            return bucket

        with shown(call.progress, lambda: self._asked < request.index):
            found: Bucket = await self._gathering.join(
                request.index, request.receiver, request.offers, answer
            )
        return found

    async def close(self) -> None:
        """Gives up what is not sent. The export still runs to its end, since other ranks may take
        part in it.
        """
        self._gathering.abandon(
            ContractError("another push began before this one ended", where="push")
        )
        await asyncio.gather(*self._ahead, *filter(None, [self._sent]), return_exceptions=True)
        await self._compute(self._writer.close)
        await self._compute(exhaust, self._tensors)

    def _begin(self, offers: list[Offers]) -> None:
        """Chooses the transport."""
        trainer, wanted = self._trainer, self._request.transport
        if isinstance(trainer, SendsDevice):
            if writer := trainer.push_writer(wanted, offers, self._path, self._size):
                self._writer, self._tensors = writer, trainer.export_tensors()
        elif wanted not in ("auto", SHM):
            what = f"this trainer pushes weights through shared memory, not by {wanted!r}."
            raise ConfigError(
                what, where="controller.config.push_transport", todo=f"Use auto or {SHM}."
            )

    def _fill_soon(self) -> None:
        self._ahead.append(asyncio.ensure_future(self._compute(self._next)))

    def _next(self) -> Bucket:
        """The bucket after the latest, or that one when it is the last."""
        if self._latest is None or not self._latest.last:
            self._latest = self._fill(0 if self._latest is None else self._latest.index + 1)
        return self._latest

    def _fill(self, index: int) -> Bucket:
        """Copies the next tensors to where nobody reads, none of them if there is no room for
        one.
        """
        self._held = self._held or next(self._tensors, None)
        wanted = max(self._full, self._held[0].nbytes if self._held else 0)
        # An empty bucket takes no room: it must not part the gap that a large tensor waits for.
        taken = sorted(place for place in self._unread if place[0] < place[1])
        bounds = [0, *itertools.chain(*taken), self._size]
        gaps = zip(bounds[::2], bounds[1::2], strict=True)
        start, end = max(
            gaps, key=lambda gap: min(gap[1] - gap[0], wanted)
        )  # the first that is large enough
        offset, specs, digests = start, list[TensorSpec](), list[int]()
        while self._held is not None:
            spec, array = self._held
            if offset + spec.nbytes > (min(end, start + self._full) if specs else end):
                break
            if array.nbytes != spec.nbytes:
                what = (
                    f"the trainer exported {array.nbytes} bytes for {spec.name!r}, its plan "
                    f"says {spec.nbytes}"
                )
                raise ContractError(what, where=f"version {self.key[0]}")
            digests.append(self._writer.fill(offset, array))
            specs.append(spec)
            offset += spec.nbytes
            self._held = next(self._tensors, None)
        self._unread.append((start, offset))
        place = self._writer.transport, self._writer.handle
        return Bucket(
            self.key[0], index, str(self._path), start, specs, digests, self._held is None, *place
        )


async def pull_weights(
    receiver: ReceivesWeights,
    source: Peer,
    request: PullWeights,
    compute: Compute,
    progress: Callable[[], None],
    mapped: dict[str, np.ndarray],
) -> PushConfirmed:
    """The receiving half. Raises WeightMismatch for a push that is truncated, altered, or not of
    this model.

    progress: told of every bucket that was loaded, and while the source or other receivers are
        waited for.
    mapped: path -> shared memory, kept by the caller between pushes.
    """
    version = request.version
    plan = await insist(source, PLAN, PlanRequest(version, request.attempt))
    await compute(receiver.begin_weights, plan)
    offers = receiver.push_offers() if isinstance(receiver, ReceivesDevice) else {}

    async def ask(index: int) -> Bucket:
        asked = BucketRequest(version, request.receiver, index, request.attempt, offers)
        with shown(progress):
            return await insist(source, BUCKET, asked)

    bucket, digests = await ask(0), dict[str, int]()
    reader = _reader(receiver, bucket.transport, request.receiver, mapped)
    loading: asyncio.Future[None] | None = None
    try:
        for index in itertools.count(1):
            _check_planned(bucket, plan, digests)
            before, loading = loading, asyncio.ensure_future(compute(reader.load, bucket))
            if before is not None:
                await before
            progress()
            if bucket.last:
                await loading
                break
            bucket = await ask(index)
    finally:
        if loading is not None:
            loading.cancel()  # nothing more of a push that failed
        await compute(reader.close)
    if bucket.transport != SHM:
        await ask(index)  # the sender may give its memory back
    if missing := plan.tensors[len(digests) :]:
        raise WeightMismatch(
            f"the push ended without tensor {missing[0].name!r}", where=f"version {version}"
        )
    progress()
    await compute(receiver.commit_weights, plan)
    progress()
    held = await compute(reader.held)
    if wrong := [
        name for name, digest in digests.items() if held is not None and held.get(name) != digest
    ]:
        raise WeightMismatch(
            f"after the push the generator holds other bytes in {wrong[0]!r}",
            where=f"version {version}",
            why=f"{len(wrong)} of {len(digests)} tensors differ",
        )
    return PushConfirmed(version, sum(spec.nbytes for spec in plan.tensors), held is not None)


def _check_planned(bucket: Bucket, plan: WeightPlan, digests: dict[str, int]) -> None:
    """Adds the bucket's digests to those of the buckets before."""
    if len(bucket.digests) != len(bucket.tensors):
        what = f"a bucket has {len(bucket.tensors)} tensors and {len(bucket.digests)} digests"
        raise WeightMismatch(what, where=f"version {plan.version}, bucket {bucket.index}")
    for spec, digest in zip(bucket.tensors, bucket.digests, strict=True):
        if plan.tensors[len(digests) : len(digests) + 1] != [spec]:
            what = f"tensor {spec.name!r} is not the one planned here"
            raise WeightMismatch(what, where=f"version {plan.version}")
        digests[spec.name] = digest


def _reader(
    receiver: ReceivesWeights, transport: str, number: int, mapped: dict[str, np.ndarray]
) -> WeightReader:
    if isinstance(receiver, ReceivesDevice) and transport != SHM:
        return receiver.push_reader(transport, number)
    return _SharedReader(receiver, mapped)


class _SharedReader:
    """See WeightReader."""

    def __init__(self, receiver: ReceivesWeights, mapped: dict[str, np.ndarray]) -> None:
        self._receiver, self._mapped = receiver, mapped

    def load(self, bucket: Bucket) -> None:
        if bucket.path not in self._mapped:
            try:
                self._mapped[bucket.path] = np.frombuffer(
                    map_file(Path(bucket.path), writable=False), np.uint8
                )
            except (OSError, ValueError) as error:  # ValueError: it is empty, or its name is none
                why = getattr(error, "strerror", None) or str(error)
                raise WeightMismatch(
                    "a bucket's memory cannot be opened", where=bucket.path, why=why
                ) from None
        if bucket.tensors:
            hashed = verified(
                bucket,
                self._mapped[bucket.path],
                lambda array: xxhash.xxh3_64_intdigest(array.data),
            )
            self._receiver.load_weights(hashed)

    def held(self) -> dict[str, int] | None:
        return self._receiver.fingerprint() if isinstance(self._receiver, Fingerprints) else None

    def close(self) -> None:
        """The memory stays mapped for the next push."""
