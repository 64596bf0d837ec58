"""Pushes weights: a plan, buckets of whole tensors in one memory, a commit; digested on both sides.

One word for one idea, on the wire and in what backends offer:

========  ==================  =============================================  =====================
word      endpoint            what the sender does, trainer rank 0           what a receiver does
========  ==================  =============================================  =====================
begin     ``push.begin``      all ranks export; rank 0 makes a `PushSource`
pull      ``push.pull``                                                      runs `pull_weights`
plan      ``push.plan``       says which tensors will come                   ``begin_weights``
bucket    ``push.bucket``     fills buckets in advance (``fill``), gives     ``load_weights``
                              the next one to all (``send``)
commit                                                                       ``commit_weights``
========  ==================  =============================================  =====================

The lead calls the first two, a receiver the next two. Rank 0 begins the push on the other ranks,
too, and hears by ``push.exported`` that their part of the export is over.

All buckets share one memory of ``bucket_bytes``, or of all tensors if that is less, or of the
largest tensor if that is more. A bucket is handed out when all receivers have asked for it; what
else happens then:

=============  =================  ===============  =========================
handed out     receivers load     filled, waits    begins to be filled
=============  =================  ===============  =========================
bucket 0       nothing yet        none             1 and 2
bucket 1       0                  2                3
bucket 2       1                  3                4, where 0 was
bucket 3       2                  4                5, where 1 was
=============  =================  ===============  =========================

A receiver asks for bucket i when it has loaded those before i - 1. So while i + 2 is filled, three
buckets may still be read: i - 1, i and i + 1. `PushSource._fill` finds room next to them.

All receivers share one export. The memory is shared memory, unless both
sides speak something better (see ``gcore_core.contract.weight_transfer``): this module does not
know what.

A receiver on another node has no part in that memory. It asks its own agent for each bucket that it
gets (`MIRROR`), and loads the bucket from a file of its node, the *mirror*: it has the same bytes
at the same offsets. The agent pulls a bucket once, however many receivers its node has.

The nodes are a tree, so that the trainer's node sends ``fan_out`` copies, whatever the number of
nodes (`parents_of`). The others get a bucket from the mirror of their parent, while it comes there.

The mirror needs no rule of its own for what may be overwritten. This is why:

- Bucket j is written into the mirror after a receiver got it.
- A receiver gets j when all receivers, on whatever node, have asked for j.
- Who asks for j has loaded all buckets before j - 1. So only j - 1 and j may still be read.
- `PushSource._fill` has put j next to j - 1, and the mirror has the same offsets.

The sender's memory is safe meanwhile. An agent reads j there for a receiver that has not loaded it
yet. The sender fills that region again only when all receivers have asked for j + 2, and they ask
after they have loaded j. A parent's mirror is safe for its children by the same argument: what goes
over j is a bucket that was handed out after all had asked for j + 2.

Two pushes share one memory, on either side. The agent ends what it still pulls of the earlier one
before it writes anything of the later one. A receiver of the earlier one finds other bytes then,
as it does in the sender's memory: it digests what it reads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from gcore_core.contract.errors import ConfigError, ContractError, DataError, WeightMismatch
from gcore_core.contract.generator import Fingerprints, ReceivesWeights
from gcore_core.contract.launching import Peer
from gcore_core.contract.lineage import stamp_of
from gcore_core.contract.records import TensorSpec, WeightPlan
from gcore_core.contract.remote_store import MirrorRequest
from gcore_core.contract.trainer import SendsAdapter, Trainer
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
from gcore_core.runtime.compute import Compute
from gcore_core.runtime.messages import (
    MIRROR,
    PUSH_BUCKET,
    PUSH_PLAN,
    BeginPush,
    BucketRequest,
    PlanRequest,
    PullWeights,
    PushConfirmed,
)
from gcore_core.store.client import allocate, copy_hashed, map_file
from gcore_core.wire.gathering import Gathering
from gcore_core.wire.retry import insist, keep_alive
from gcore_core.wire.service import Call
from gcore_core.workers.run_journals import TensorJournal

# The most bytes of a bucket of several tensors. It need not fit a processor's cache, since copies
# go past the caches. So buckets are large: then they are few, and so are their messages.
_BUCKET_BYTES = 64 << 20
# Buckets that are filled before they are asked for, so that the sender waits for no round trip.
_AHEAD = 2
# Buckets before the one that is being filled which receivers still read or are yet to get.
_MAY_BE_READ = _AHEAD + 1
_MORE_MEMORY = (
    "free some of it (in a container: --shm-size=8g), or lower controller.config.push_bucket_bytes"
)

#: What backends call the dtypes of a push in their configs.
_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class DtypeSetting(NamedTuple):
    """Says in which dtype a generator holds its weights, as far as its configuration tells.

    key: of the configuration.
    dtype: its value, such as "float32"; empty where the backend has no such key.
    """

    key: str = "roles.rollout.config.dtype"
    dtype: str = ""


UNTOLD_DTYPE = DtypeSetting()


class Here(NamedTuple):
    """Says on which node a receiver is.

    node: its name.
    agent: its agent.
    """

    node: str
    agent: Peer


def exhaust(tensors: Iterable[object]) -> None:
    """Runs an export to its end without keeping anything."""
    deque(tensors, maxlen=0)


def sends_adapter(trainer: Trainer, transport: str) -> bool:
    """Returns whether a push brings the trainer's adapter alone, to receivers that can take it.

    It goes through shared memory; who asks for another transport gets whole weights by that.
    """
    if not isinstance(trainer, SendsAdapter) or transport not in ("auto", SHM):
        return False
    return trainer.adapter_facts() is not None


def exported(trainer: Trainer, adapter: bool) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Exports the trainer's adapter alone, or its whole weights; all ranks take part."""
    if adapter and isinstance(trainer, SendsAdapter):
        return trainer.export_adapter()
    return trainer.export_weights()


def _plan_of(trainer: Trainer, version: int, adapter: bool) -> WeightPlan:
    if adapter and isinstance(trainer, SendsAdapter):
        return WeightPlan(version, trainer.adapter_specs(), adapter=trainer.adapter_facts())
    return WeightPlan(version, trainer.weight_specs())


class PushMemory:
    """Writes to a file in shared memory; it is the WeightWriter of shared memory.

    It is made on first use and stays mapped between pushes, since fresh pages are slow.
    """

    transport = SHM
    handle = b""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = np.zeros(0, np.uint8)

    def of(self, nbytes: int) -> np.ndarray:
        """Returns the memory's first ``nbytes`` bytes, uint8; it grows where it is smaller.

        Raises DataError where memory is lacking.
        """
        if len(self._mapped) < nbytes:
            try:
                allocate(self.path, nbytes, "memory for pushes", make=True)
            except DataError as error:
                error.todo = _MORE_MEMORY
                raise
            self._mapped = np.frombuffer(map_file(self.path, writable=True), np.uint8)
        return self._mapped[:nbytes]

    def fill(self, offset: int, content: np.ndarray) -> int:
        return copy_hashed([content.data], self._mapped[offset : offset + content.nbytes].data)

    def send(self, bucket: Bucket) -> None: ...

    def close(self) -> None: ...


class Place(NamedTuple):
    """Names a part of the memory: the bytes from ``start`` to before ``end``."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def gaps_between(places: Iterable[Place], nbytes: int) -> list[Place]:
    """Returns the free gaps between ``places`` in a memory of ``nbytes`` bytes, in order.

    An empty place takes no room, so it parts no gap: else a tensor that waits for a large gap could
    wait for ever, since the empty buckets that go out meanwhile lie in it.
    """
    gaps = []
    start = 0
    for place in sorted(place for place in places if place.nbytes):
        gaps.append(Place(start, place.start))
        start = place.end
    return [*gaps, Place(start, nbytes)]


def parents_of(nodes: Iterable[str], fan_out: int) -> dict[str, list[str]]:
    """Returns from which nodes each node reads a push, the nearest first, without the sender's.

    Example, ``fan_out`` 2, nodes a to g: a and b read from the sender's node, c and d from a, e and
    f from b, g from c. So g has the parents c and a.

    The order is that of names, so a parent comes before its children in the trees of all pushes:
    nodes of two pushes at once never wait for each other.
    """
    parents: dict[str, list[str]] = {}
    ordered = sorted(nodes)
    for place, node in enumerate(ordered):
        parents[node] = []
        if place >= fan_out:
            parent = ordered[place // fan_out - 1]
            parents[node] = [parent, *parents[parent]]
    return parents


class PushSource:
    """Sends a push, in the shell of trainer rank 0.

    key: (version, attempt) of the push.
    plan: the tensors that will come.
    journal: gets the digests of all tensors when the last one is filled.
    adapter: it brings the adapter alone, see ``sends_adapter``.
    node: on which the memory is.
    stamp: of the weights, when all tensors are filled; 0 before.

    Two sizes: ``_memory_nbytes`` is that of the memory for all buckets, ``_bucket_nbytes`` bounds
    one bucket of several tensors.
    """

    def __init__(
        self,
        trainer: Trainer,
        memory: PushMemory,
        compute: Compute,
        request: BeginPush,
        journal: TensorJournal | None = None,
        node: str = "",
        adapter: bool = False,
    ) -> None:
        self.key = request.version, request.attempt
        self._node = node
        self._adapter = adapter
        self.plan = _plan_of(trainer, request.version, adapter)
        self._trainer = trainer
        self._compute = compute
        self._request = request
        self._path = memory.path
        sizes = [spec.nbytes for spec in self.plan.tensors]
        self._memory_nbytes = max(1, *sizes, min(request.bucket_bytes, sum(sizes)))
        # A bucket that has a tensor already gets no further one beyond this size, so that four
        # buckets fit next to each other: the one that is filled and three that may be read.
        self._bucket_nbytes = min(_BUCKET_BYTES, request.bucket_bytes // (_MAY_BE_READ + 1))
        memory.of(self._memory_nbytes)
        self._writer: WeightWriter = memory
        self._tensors: Iterator[tuple[TensorSpec, Any]] = exported(trainer, adapter)
        self._next_tensor: tuple[TensorSpec, Any] | None = None  # exported, but in no bucket yet
        self._may_be_read: deque[Place] = deque(maxlen=_MAY_BE_READ)  # of the latest buckets
        self._gathering = Gathering(request.receivers)
        self._parents: dict[str, list[str]] = {}  # of each receiver's node, see ``parents_of``
        self._all_asked_for = -1  # the latest bucket that all receivers have asked for
        self._latest: Bucket | None = None  # that was filled
        self._digests: dict[str, int] = {}  # of the tensors that were filled
        self.stamp = 0
        self._ahead: deque[asyncio.Future[Bucket]] = deque()  # filled or being filled, in order
        self._sending: asyncio.Future[None] | None = None  # of the bucket handed out last
        self._journal = journal
        self._error: BaseException | None = None  # why it cannot end well

    async def bucket(self, request: BucketRequest, call: Call) -> Bucket:
        """Returns the bucket of this index when all receivers have asked for it."""
        if self._error is not None:
            raise self._error

        async def act(receivers: list[tuple[str, Offers]]) -> Bucket:
            return await self._hand_out(request.index, receivers)

        def waits_for_others() -> bool:
            return self._all_asked_for < request.index

        with keep_alive(call.progress, waits_for_others):
            bucket: Bucket = await self._gathering.join(
                request.index, request.receiver, (request.node, request.offers), act
            )
        parents = self._parents.get(request.node, [])
        return msgspec.structs.replace(bucket, parents=parents)

    async def _hand_out(self, index: int, receivers: list[tuple[str, Offers]]) -> Bucket:
        """Runs once for each index: one row of the table at the top of this module.

        By asking for the index after the last bucket, receivers say that they have read all; where
        the memory is shared memory they need not ask (see ``pull_weights``). They get the last
        bucket once more, since ``_fill_next`` has nothing else to give, and the writer gives its
        memory back.
        """
        self._all_asked_for = index
        if index == 0:
            await self._compute(self._choose_transport, receivers)
            self._fill_soon()
        if self._sending is not None:
            await self._sending
        bucket = await self._ahead.popleft()
        all_are_read = bucket.index < index
        if all_are_read:
            await self._compute(self._writer.close)
            return bucket
        self._sending = asyncio.ensure_future(self._compute(self._writer.send, bucket))
        while len(self._ahead) < _AHEAD:
            self._fill_soon()
        return bucket

    def fail(self, error: BaseException) -> None:
        """Raises ``error`` at every receiver that waits, since another rank cannot take part."""
        self._error = error
        self._gathering.abandon(error)

    async def close(self) -> None:
        """Gives up what is not sent.

        The export still runs to its end, since other ranks may take part in its collectives.
        """
        self._gathering.abandon(
            ContractError("another push began before this one ended", where="push")
        )
        sending = [] if self._sending is None else [self._sending]
        await asyncio.gather(*self._ahead, *sending, return_exceptions=True)
        await self._compute(self._writer.close)
        await self._compute(exhaust, self._tensors)

    def _choose_transport(self, receivers: list[tuple[str, Offers]]) -> None:
        """Takes the writer that the trainer chooses, if it does; else it stays shared memory.

        receivers: node of each, empty for the trainer's, and what it can use.
        """
        trainer = self._trainer
        transport = self._request.transport
        offers = [offers for _, offers in receivers]
        elsewhere = {node for node, _ in receivers} - {"", self._node}
        self._parents = parents_of(elsewhere, self._request.fan_out)
        if elsewhere:
            if transport not in ("auto", SHM):
                raise ConfigError(
                    f"weights cannot be pushed by {transport!r} to another node.",
                    where="controller.config.push_transport",
                    why=f"The trainer is on {self._node}, generators are on {min(elsewhere)}.",
                    todo=f"Use auto or {SHM}.",
                )
        elif self._adapter:
            return  # a few megabytes, for which no way is better
        elif isinstance(trainer, SendsDevice):
            writer = trainer.push_writer(transport, offers, self._path, self._memory_nbytes)
            if writer:
                self._writer = writer
                self._tensors = trainer.export_tensors()
        elif transport not in ("auto", SHM):
            what = f"this trainer pushes weights through shared memory, not by {transport!r}."
            raise ConfigError(
                what, where="controller.config.push_transport", todo=f"Use auto or {SHM}."
            )

    def _fill_soon(self) -> None:
        """Begins to fill one more bucket.

        Several fills may wait. ``Compute`` runs them one at a time and in order, so ``_fill_next``
        needs no lock, and what is ``_latest`` to it is the bucket before.
        """
        self._ahead.append(asyncio.ensure_future(self._compute(self._fill_next)))

    def _fill_next(self) -> Bucket:
        """Fills the bucket after the latest; when that is the last one, returns it once more."""
        if self._latest is None:
            self._latest = self._fill(0)
        elif not self._latest.last:
            self._latest = self._fill(self._latest.index + 1)
        return self._latest

    def _fill(self, index: int) -> Bucket:
        """Copies the next tensors to where nobody reads; copies none where not even one fits.

        An example: a memory of 100 bytes, hence at most 25 for a bucket of several tensors, and
        tensors a (10 bytes), b (10), c (20) and d (70). d has no room before what lies in
        its way was read; until then empty buckets go out.

        ======  =================================  ===============  ==============================
        bucket  may still be read                  largest gap      filled
        ======  =================================  ===============  ==============================
        0       nothing                            0 to 100         a and b, at 0 to 20
        1       0 to 20                            20 to 100        c, at 20 to 40; d is too large
        2 to 4  0 to 20, 20 to 40; at 4 the        40 to 100        nothing
                second only
        5       nothing                            0 to 100         d, at 0 to 70; it is the last
        ======  =================================  ===============  ==============================
        """
        if self._next_tensor is None:
            self._next_tensor = next(self._tensors, None)
        room = self._room()
        offset = room.start
        specs: list[TensorSpec] = []
        digests: list[int] = []
        while self._next_tensor is not None:
            spec, content = self._next_tensor
            # A first tensor may take the whole gap, those after it only what a bucket should have.
            end = min(room.end, room.start + self._bucket_nbytes) if specs else room.end
            if offset + spec.nbytes > end:
                break
            self._check_size(spec, content)
            digests.append(self._writer.fill(offset, content))
            specs.append(spec)
            offset += spec.nbytes
            self._next_tensor = next(self._tensors, None)
        self._may_be_read.append(Place(room.start, offset))
        self._digests.update((spec.name, one) for spec, one in zip(specs, digests, strict=True))
        if self._next_tensor is None:
            self.stamp = stamp_of(self._digests)
            if self._journal is not None:
                in_order = [self._digests[spec.name] for spec in self.plan.tensors]
                self._journal.write(self.plan, in_order, self._writer.transport)
        return Bucket(
            version=self.key[0],
            index=index,
            path=str(self._path),
            offset=room.start,
            tensors=specs,
            digests=digests,
            last=self._next_tensor is None,
            transport=self._writer.transport,
            handle=self._writer.handle,
            node=self._node,
        )

    def _room(self) -> Place:
        """Returns the first gap with room for a whole bucket and for the next tensor.

        Without one, it is the largest gap.
        """
        wanted_nbytes = self._bucket_nbytes
        if self._next_tensor is not None:
            wanted_nbytes = max(wanted_nbytes, self._next_tensor[0].nbytes)
        gaps = gaps_between(self._may_be_read, self._memory_nbytes)
        large_enough = [gap for gap in gaps if gap.nbytes >= wanted_nbytes]
        return large_enough[0] if large_enough else max(gaps, key=lambda gap: gap.nbytes)

    def _check_size(self, spec: TensorSpec, content: Any) -> None:
        if content.nbytes != spec.nbytes:
            what = (
                f"the trainer exported {content.nbytes} bytes for {spec.name!r}, its plan "
                f"says {spec.nbytes}"
            )
            raise ContractError(what, where=f"version {self.key[0]}")


async def pull_weights(
    receiver: ReceivesWeights,
    source: Peer,
    request: PullWeights,
    compute: Compute,
    progress: Callable[[], None],
    mapped: dict[str, np.ndarray],
    setting: DtypeSetting = UNTOLD_DTYPE,
    came: dict[str, int] | None = None,
    here: Here | None = None,
) -> PushConfirmed:
    """Receives a push and loads it.

    Raises WeightMismatch for a push that is truncated, altered, or not of this model.

    progress: told of every bucket that was loaded, and while the source or other receivers are
        waited for.
    mapped: path -> shared memory, kept by the caller between pushes.
    setting: what the receiver's configuration says of its dtype, for the error.
    came: gets the digest of every tensor, by name, if they came through shared memory; those of
        other transports are not xxh3 of the bytes.
    here: where this receiver is; None: on the trainer's node, whatever that is called.
    """
    version = request.version
    with keep_alive(progress):
        plan = await insist(source, PUSH_PLAN, PlanRequest(version, request.attempt))
    await compute(receiver.begin_weights, plan)
    offers = receiver.push_offers() if isinstance(receiver, ReceivesDevice) else {}

    async def ask(index: int) -> Bucket:
        bucket_request = BucketRequest(
            version, request.receiver, index, request.attempt, offers, here.node if here else ""
        )
        with keep_alive(progress):
            bucket = await insist(source, PUSH_BUCKET, bucket_request)
            return bucket if here is None else await _mirrored(bucket, request, here)

    digests: dict[str, int] = {}  # of the tensors that came so far, in the order of the plan
    bucket = await ask(0)
    reader = _reader(receiver, bucket.transport, request.receiver, mapped)
    loading: asyncio.Future[None] | None = None
    try:
        for index in itertools.count(1):
            _check_planned(bucket, plan, digests)
            loading_before = loading
            loading = asyncio.ensure_future(compute(reader.load, bucket))
            if loading_before is not None:
                # To ask for bucket ``index`` says that all before ``index - 1`` were read.
                await loading_before
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
    digests_held = await compute(reader.held)
    if digests_held is not None:
        _check_held(digests_held, digests, plan, setting)
    if came is not None and bucket.transport == SHM:
        came.update(digests)
    nbytes = sum(spec.nbytes for spec in plan.tensors)
    return PushConfirmed(version, nbytes, digests_held is not None, stamp_of(digests))


async def _mirrored(bucket: Bucket, request: PullWeights, here: Here) -> Bucket:
    """Returns a bucket of another node's memory as one of this node's, with the same bytes.

    It is asked for once: where it fails the whole push begins again. The agent itself turns from a
    parent that fails to the next one, and at last to the sender's node.
    """
    if bucket.transport != SHM or bucket.node in ("", here.node):
        return bucket
    mirror = MirrorRequest(
        bucket.node,
        request.source,
        request.version,
        request.attempt,
        bucket.index,
        bucket.offset,
        sum(spec.nbytes for spec in bucket.tensors),
        bucket.parents,
    )
    path = await here.agent.call(MIRROR, mirror)
    return msgspec.structs.replace(bucket, path=path, node=here.node)


def _check_held(
    digests_held: Mapping[str, int],
    digests: Mapping[str, int],
    plan: WeightPlan,
    setting: DtypeSetting,
) -> None:
    """Compares what the generator holds now with what was sent."""
    wrong = [name for name, digest in digests.items() if digests_held.get(name) != digest]
    if not wrong:
        return
    todo = ""
    dtypes = {spec.dtype for spec in plan.tensors if spec.name in wrong}
    matching = set(digests).difference(wrong)
    if not any(
        spec.name in matching and spec.nbytes and spec.dtype in dtypes for spec in plan.tensors
    ):
        todo = _dtype_advice({_DTYPE_NAMES.get(dtype, dtype) for dtype in dtypes}, setting)
    raise WeightMismatch(
        f"after the push the generator holds other bytes in {wrong[0]!r}",
        where=f"version {plan.version}",
        why=f"{len(wrong)} of {len(digests)} tensors differ",
        todo=todo,
    )


def _dtype_advice(pushed: set[str], setting: DtypeSetting) -> str:
    """Says what to set where every tensor of the pushed dtypes was converted."""
    names = ", ".join(sorted(pushed))
    if setting.dtype and len(pushed) == 1 and setting.dtype not in pushed:
        return (
            f"the policy pushes {names} weights, and this generator holds {setting.dtype}\n"
            f"set {setting.key} to {names}"
        )
    return (
        f"the policy pushes {names} weights: a generator that holds another dtype has converted "
        f"every tensor\nset the dtype of both to one, such as {setting.key}"
    )


def _check_planned(bucket: Bucket, plan: WeightPlan, digests: dict[str, int]) -> None:
    """Adds the bucket's digests to ``digests``, which has what the buckets before gave.

    Raises WeightMismatch where its tensors are not the next ones of the plan.
    """
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
    """Reads buckets from shared memory; it is the WeightReader of shared memory.

    mapped: path -> shared memory, kept by the caller between pushes.
    """

    def __init__(self, receiver: ReceivesWeights, mapped: dict[str, np.ndarray]) -> None:
        self._receiver = receiver
        self._mapped = mapped

    def load(self, bucket: Bucket) -> None:
        end = bucket.offset + sum(spec.nbytes for spec in bucket.tensors)
        # A mirror grows with the first buckets of a push.
        if len(self._mapped.get(bucket.path, b"")) < max(1, end):
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
        """Does nothing: the memory stays mapped for the next push."""
