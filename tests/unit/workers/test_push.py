"""A weight push: every byte arrives, or the error names the tensor; whoever fails, the trainer can
push again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from gcore_testing.simulation import TimedCompute, run_virtual

from gcore_core.contract.deadlines import Deadlines, Wait
from gcore_core.contract.errors import (
    ConfigError,
    ContractError,
    DataError,
    GcoreError,
    WeightMismatch,
)
from gcore_core.contract.job_settings import RunSettings
from gcore_core.contract.launching import Endpoint
from gcore_core.contract.records import TensorSpec, WeightPlan
from gcore_core.contract.remote_store import MirrorRequest
from gcore_core.contract.weight_transfer import Bucket, Offers, verified
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.publishing import Publishing
from gcore_core.runtime.compute import Compute, DirectCompute
from gcore_core.runtime.messages import (
    PUSH_BEGIN,
    PUSH_BUCKET,
    PUSH_EXPORTED,
    PUSH_PLAN,
    PUSH_PULL,
    BeginPush,
    BucketRequest,
    PullWeights,
    PushConfirmed,
)
from gcore_core.runtime.relay import Relay
from gcore_core.store.client import StoreReader
from gcore_core.store.server import SlabService, StoreSpec
from gcore_core.wire.in_process import InlineNetwork, InlineView
from gcore_core.wire.service import Call, Service
from gcore_core.workers.push import DtypeSetting, Here, PushMemory, PushSource, pull_weights
from gcore_core.workers.trainer import TrainerShell
from tests.support.joined_stores import joining, of_service, sent_bytes
from tests.support.wires import Wire, free_address

NAMES = ["embed", "layer.0", "layer.1", "empty", "head"]
SIZES = [40, 24, 24, 0, 40]


def weights(version: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(version)
    return {
        name: random.integers(0, 256, size, np.uint8)
        for name, size in zip(NAMES, SIZES, strict=True)
    }


def digest_of(content: np.ndarray) -> int:
    """A digest that is not shared memory's."""
    return xxhash.xxh3_64_intdigest(content.tobytes()[::-1])


class Writer:
    """A device of its own, which is the host's memory: ``MEMORIES`` finds it by the handle that
    crosses.
    """

    transport, handle = "host", b"first"

    def __init__(self, nbytes: int) -> None:
        self.memory, self.done = np.zeros(nbytes, np.uint8), list[str]()
        MEMORIES[self.handle] = self

    def fill(self, offset: int, content: np.ndarray) -> int:
        self.memory[offset : offset + content.nbytes] = content
        return digest_of(content)

    def send(self, bucket: Bucket) -> None:
        self.done.append(f"sent {bucket.index}")

    def close(self) -> None:
        self.done.append("closed")


MEMORIES: dict[bytes, Writer] = {}


class Trainer:
    """Holds ``weights(version)``; ``exported`` counts tensors handed out since the last export
    began.
    """

    def __init__(self) -> None:
        self.version = 0
        self.exported: list[str] = []
        self.running = 0  # exports that began and did not end: other ranks would wait in them
        self.ends_before = self.cuts = self.fails_at = ""  # names of tensors

    def weight_specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(name, "U8", (size,), size) for name, size in zip(NAMES, SIZES, strict=True)
        ]

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        self.running += 1
        self.exported = []
        for spec in self.weight_specs():
            if spec.name == self.ends_before:
                break
            if spec.name == self.fails_at:
                raise RuntimeError("a collective failed")
            self.exported.append(spec.name)
            yield spec, weights(self.version)[spec.name][int(spec.name == self.cuts) :]
        self.running -= 1


class DeviceTrainer(Trainer):
    def push_writer(
        self, wanted: str, offers: Sequence[Offers], path: Path, nbytes: int
    ) -> Writer | None:
        return (
            Writer(nbytes) if wanted != "shm" and all("host" in told for told in offers) else None
        )

    def export_tensors(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        return self.export_weights()


class Receiver:
    """Takes what comes, as its contract says. ``dies_at``: raises when this tensor comes."""

    def __init__(self, dies_at: str = "") -> None:
        self.version, self.held, self.dies_at = 0, {}, dies_at  # type: ignore[var-annotated]
        self.calls: list[int] = []

    def begin_weights(self, plan: WeightPlan) -> None:
        if plan.version < self.version:
            raise WeightMismatch(
                f"version {plan.version} is older than {self.version}", where="tensor 'embed'"
            )
        if [spec.name for spec in plan.tensors] != NAMES:
            raise WeightMismatch(
                "the push is of another model", where=f"tensor {plan.tensors[-1].name!r}"
            )

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        pairs = list(tensors)
        self.calls.append(len(pairs))
        for spec, array in pairs:
            if spec.name == self.dies_at:
                raise RuntimeError("out of memory")
            self.held[spec.name] = array.copy()

    def commit_weights(self, plan: WeightPlan) -> None:
        self.version = plan.version

    def fingerprint(self) -> dict[str, int]:
        return {name: xxhash.xxh3_64_intdigest(array.data) for name, array in self.held.items()}

    def push_offers(self) -> Offers:
        return {"host": [""]}

    def push_reader(self, transport: str, receiver: int) -> Reader:
        assert transport == "host"
        return Reader(self)


class Reader:
    """See WeightReader; ``closed`` when it reads no more."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver, self.closed = receiver, False

    def load(self, bucket: Bucket) -> None:
        assert not self.closed
        self._receiver.load_weights(verified(bucket, MEMORIES[bucket.handle].memory, digest_of))

    def held(self) -> dict[str, int]:
        return {name: digest_of(array) for name, array in self._receiver.held.items()}

    def close(self) -> None:
        self.closed = True


class Forgetful(Receiver):
    """Loads one tensor wrong; only its fingerprint can tell."""

    def commit_weights(self, plan: WeightPlan) -> None:
        super().commit_weights(plan)
        self.held["layer.1"] = self.held["layer.1"] ^ 1


class Site:
    """A trainer shell that is reached through ``network``; ``tamper`` changes buckets and plans on
    their way.
    """

    def __init__(
        self, directory: Path, compute: Compute | None = None, transport: str = "shm", rank: int = 0
    ) -> None:
        self.trainer = Trainer() if transport == "shm" else DeviceTrainer()
        self.directory, self.transport = directory, transport
        self.network = InlineNetwork()
        self.view: InlineView = self.network.view("rollout.0")
        self.shell = TrainerShell(
            self.trainer,  # type: ignore[arg-type]
            StoreReader(directory, "node0", b""),
            compute or DirectCompute(),
            directory / "push",
            rank,
        )
        self.service = Service("policy.0")
        self.shell.register(self.service, Relay(self.view, self.service, shards=1))

    @property
    def source(self) -> PushSource:
        assert self.shell._push is not None
        return self.shell._push

    async def begin(
        self, version: int, receivers: int, bucket_bytes: int = 96, attempt: int = 0
    ) -> None:
        self.trainer.version = version
        await self.view.serve("policy.0", self.service)
        request = BeginPush(version, bucket_bytes, receivers, attempt, self.transport)
        await self.view.peer("policy.0").call(PUSH_BEGIN, request)

    def memory(self) -> np.ndarray:
        """That which is sent from."""
        return (
            self.shell._memory.of(96) if self.transport == "shm" else MEMORIES[Writer.handle].memory
        )

    async def pull(
        self,
        receiver: Receiver,
        version: int,
        number: int = 0,
        attempt: int = 0,
        compute: Compute | None = None,
        dtype: str = "",
    ) -> Any:
        request = PullWeights(version, number, "policy.0", attempt)
        source = self.view.peer("policy.0")
        return await pull_weights(
            receiver,
            source,
            request,
            compute or DirectCompute(),
            lambda: None,
            {},
            DtypeSetting("roles.rollout.config.dtype", dtype),
        )

    def tamper(self, endpoint: Endpoint[Any, Any], change: Any) -> None:
        honest = getattr(self.shell, endpoint.name.removeprefix("push."))

        async def handler(request: Any, call: Call) -> Any:
            return change(await honest(request, call))

        self.service.add(endpoint, handler)


@pytest.fixture(params=["shm", "auto"])
async def site(tmp_path: Path, request: pytest.FixtureRequest) -> Site:
    """By shared memory, and by a transport that both sides speak."""
    return Site(tmp_path, transport=request.param)


def assert_holds(receiver: Receiver, version: int) -> None:
    assert receiver.version == version
    assert {name: array.tobytes() for name, array in receiver.held.items()} == {
        name: array.tobytes() for name, array in weights(version).items()
    }


@pytest.mark.parametrize("bucket_bytes", [1, 40, 64, 88, 1 << 20])
async def test_every_byte_arrives_whatever_the_size_of_a_bucket(
    bucket_bytes: int, site: Site
) -> None:
    await site.begin(1, receivers=1, bucket_bytes=bucket_bytes)
    receiver = Receiver()
    confirmed = await site.pull(receiver, 1)
    assert (confirmed.version, confirmed.nbytes, confirmed.verified) == (1, sum(SIZES), True)
    assert_holds(receiver, 1)


async def pushed(
    directory: Path, sizes: list[int], bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes tensors of these sizes; every byte must arrive, in no more buckets than a few for each
    tensor.
    """
    monkeypatch.setitem(globals(), "NAMES", [f"layer.{i}" for i in range(len(sizes))])
    monkeypatch.setitem(globals(), "SIZES", sizes)
    site, receiver = Site(directory), Receiver()
    asked = Counter[int]()

    def counted(bucket: Bucket) -> Bucket:
        asked[bucket.index] += 1
        assert bucket.index < 4 * len(sizes), f"a push without end of {sizes} by {bucket_bytes}"
        return bucket

    site.tamper(PUSH_BUCKET, counted)
    await site.begin(1, receivers=1, bucket_bytes=bucket_bytes)
    await site.pull(receiver, 1)
    assert_holds(receiver, 1)


async def test_a_tensor_that_needs_most_of_the_memory_comes_after_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buckets before it lie at the beginning of the memory: it waits until they were read, and
    what it waits with must not lie in its way.
    """
    await pushed(tmp_path, [20, 20, 70, 10], 100, monkeypatch)


async def test_tensors_of_any_sizes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    for turn in range(150):
        sizes = [draw.choice((0, 1, 7, 24, 60, 100)) for _ in range(draw.randint(1, 9))]
        directory = tmp_path / str(turn)
        directory.mkdir()
        await pushed(directory, sizes, draw.choice((1, 40, 96, 100, 150, 400)), monkeypatch)


async def test_several_receivers_get_the_same_from_one_export(site: Site) -> None:
    await site.begin(1, receivers=3)
    receivers = [Receiver() for _ in range(3)]
    await asyncio.gather(
        *(site.pull(receiver, 1, number) for number, receiver in enumerate(receivers))
    )
    for receiver in receivers:
        assert_holds(receiver, 1)
    assert site.trainer.exported == NAMES


async def test_a_push_takes_one_bucket_of_memory(site: Site) -> None:
    """The file in shared memory is a bucket, not the model; and the export runs ahead of the
    receivers by no more.
    """
    await site.begin(1, receivers=1, bucket_bytes=96)
    first = await site.view.peer("policy.0").call(PUSH_BUCKET, BucketRequest(1, 0, 0))
    again = await site.view.peer("policy.0").call(PUSH_BUCKET, BucketRequest(1, 0, 1))
    assert [[spec.name for spec in bucket.tensors] for bucket in (first, again)] == [
        ["embed"],
        ["layer.0"],
    ]
    await asyncio.wait(site.source._ahead)
    assert (
        site.trainer.exported == NAMES
    )  # the third and fourth are filled while the others are read; the last has no room
    assert site.source._next_tensor[0].name == "head"  # type: ignore[index]
    assert (site.directory / "push").stat().st_size == len(site.memory()) == 96


async def test_a_push_for_which_there_is_no_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are missing when they are written would kill the trainer, without a reason."""

    def full(handle: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match="no memory for pushes of 96 bytes") as error:
        PushMemory(tmp_path / "push").of(96)
    assert error.value.why == "No space left on device"
    assert "controller.config.push_bucket_bytes" in error.value.todo


async def test_small_tensors_travel_together(site: Site) -> None:
    await site.begin(1, receivers=1, bucket_bytes=256)
    receiver = Receiver()
    await site.pull(receiver, 1)
    assert receiver.calls == [2, 3]


async def test_a_tensor_larger_than_a_bucket_makes_the_bucket_larger(site: Site) -> None:
    await site.begin(1, receivers=1, bucket_bytes=8)
    await site.pull(Receiver(), 1)
    assert (site.directory / "push").stat().st_size == max(SIZES)


async def test_consecutive_pushes_all_arrive(site: Site) -> None:
    receiver = Receiver()
    for version in (1, 2, 3):
        await site.begin(version, receivers=1)
        await site.pull(receiver, version)
        assert_holds(receiver, version)
    assert site.trainer.running == 0


# -- what is refused -------------------------------------------------------------------------------


async def refused(site: Site, receiver: Receiver, match: str, version: int = 1) -> None:
    await site.begin(version, receivers=1)
    before = receiver.version
    with pytest.raises(WeightMismatch, match=match):
        await site.pull(receiver, version)
    assert receiver.version == before or isinstance(receiver, Forgetful)


async def test_a_truncated_push_names_the_first_tensor_that_is_missing(site: Site) -> None:
    site.tamper(PUSH_BUCKET, lambda bucket: msgspec.structs.replace(bucket, last=True))
    await refused(site, Receiver(), r"version 1: the push ended without tensor 'layer\.0'")


async def test_an_export_that_ends_early_names_the_first_tensor_that_is_missing(site: Site) -> None:
    site.trainer.ends_before = "layer.1"
    await refused(site, Receiver(), r"version 1: the push ended without tensor 'layer\.1'")


async def test_a_tensor_that_is_cut_short_is_named(site: Site) -> None:
    site.trainer.cuts = "layer.1"
    await site.begin(1, receivers=1)
    with pytest.raises(
        ContractError, match=r"version 1: the trainer exported 23 bytes for 'layer\.1', .* says 24"
    ):
        await site.pull(Receiver(), 1)


async def test_a_bucket_outside_the_shared_memory_is_refused(site: Site) -> None:
    site.tamper(PUSH_BUCKET, lambda bucket: msgspec.structs.replace(bucket, offset=90))
    await refused(
        site, Receiver(), r"version 1, bucket 0: tensor 'embed' is not what its sender hashed"
    )


@pytest.mark.parametrize("altered", ["embed", "layer.0", "layer.1", "head"])
async def test_an_altered_tensor_is_refused_before_it_is_loaded(altered: str, site: Site) -> None:
    def flip(bucket: Bucket) -> Bucket:
        offset = bucket.offset
        for spec in bucket.tensors:
            if spec.name == altered:
                site.memory()[offset + spec.nbytes // 2] ^= 1
            offset += spec.nbytes
        return bucket

    site.tamper(PUSH_BUCKET, flip)
    receiver = Receiver()
    await refused(
        site, receiver, rf"version 1, bucket \d: tensor '{altered}' is not what its sender hashed"
    )
    assert list(receiver.held) == [
        name for name in NAMES[: NAMES.index(altered)] if name in receiver.held
    ]
    site.service.add(PUSH_BUCKET, site.shell.bucket)
    await site.begin(1, receivers=1, attempt=1)
    await site.pull(receiver, 1, attempt=1)
    assert_holds(receiver, 1)


async def test_a_bucket_out_of_order_names_the_tensor(site: Site) -> None:
    def swap(bucket: Bucket) -> Bucket:
        return msgspec.structs.replace(
            bucket, tensors=bucket.tensors[::-1], digests=bucket.digests[::-1]
        )

    site.tamper(PUSH_BUCKET, swap)
    await refused(site, Receiver(), "tensor 'empty' is not the one planned here")


async def test_a_tensor_of_another_shape_than_planned_is_refused(site: Site) -> None:
    def reshape(plan: WeightPlan) -> WeightPlan:
        tensors = [msgspec.structs.replace(spec, shape=(spec.nbytes, 1)) for spec in plan.tensors]
        return msgspec.structs.replace(plan, tensors=tensors)

    site.tamper(PUSH_PLAN, reshape)
    await refused(site, Receiver(), "tensor 'embed' is not the one planned here")


async def test_a_push_of_another_model_is_refused_before_any_byte(site: Site) -> None:
    def rename(plan: WeightPlan) -> WeightPlan:
        return msgspec.structs.replace(
            plan, tensors=[*plan.tensors[:-1], TensorSpec("lm_head", "U8", (40,), 40)]
        )

    site.tamper(PUSH_PLAN, rename)
    receiver = Receiver()
    await refused(site, receiver, "tensor 'lm_head': the push is of another model")
    assert receiver.calls == []


async def test_an_older_version_is_refused(site: Site) -> None:
    receiver = Receiver()
    receiver.version = 5
    await refused(site, receiver, "tensor 'embed': version 1 is older than 5")


async def test_weights_that_changed_on_loading_are_found_by_the_fingerprint(site: Site) -> None:
    await refused(site, Forgetful(), r"holds other bytes in 'layer\.1'\n  1 of 5 tensors differ")


class Converts(Forgetful):
    """Holds all tensors in another dtype than they were sent in; one has no bytes to differ."""

    def commit_weights(self, plan: WeightPlan) -> None:
        Receiver.commit_weights(self, plan)
        self.held = {name: digest ^ 1 for name, digest in self.held.items()}


async def test_if_every_tensor_differs_the_error_names_both_dtypes_and_the_setting(
    site: Site,
) -> None:
    await refused(
        site,
        Converts(),
        r"4 of 5 tensors differ\n  the policy pushes U8 .*\n.* such as "
        r"roles\.rollout\.config\.dtype",
    )
    with pytest.raises(WeightMismatch) as caught:
        await site.begin(2, receivers=1)
        await site.pull(Converts(), 2, dtype="float32")
    assert str(caught.value).endswith(
        "4 of 5 tensors differ\n"
        "  the policy pushes U8 weights, and this generator holds float32\n"
        "  set roles.rollout.config.dtype to U8"
    )


async def test_a_version_the_trainer_does_not_hold_cannot_be_pushed(site: Site) -> None:
    await site.begin(3, receivers=1)
    with pytest.raises(ContractError, match="asked to push version 4, the trainer holds 3"):
        await site.view.peer("policy.0").call(PUSH_BEGIN, BeginPush(4, 48, 1))
    with pytest.raises(ContractError, match="no push of version 2, attempt 0, is open"):
        await site.pull(Receiver(), 2)


# -- what goes wrong on the way --------------------------------------------------------------------


async def test_opening_a_push_twice_makes_one_push(site: Site) -> None:
    await site.begin(1, receivers=1)
    receiver = Receiver()
    await site.view.peer("policy.0").call(
        PUSH_BUCKET, BucketRequest(1, 0, 0, 0, receiver.push_offers())
    )
    await site.begin(1, receivers=1)  # the answer to the first was lost
    await site.pull(receiver, 1)
    assert_holds(receiver, 1)
    assert site.trainer.running == 0


async def test_a_bucket_may_be_requested_twice(site: Site) -> None:
    await site.begin(1, receivers=1)
    peer = site.view.peer("policy.0")
    for index in range(3):
        first, again = [await peer.call(PUSH_BUCKET, BucketRequest(1, 0, index)) for _ in range(2)]
        assert first == again


@pytest.mark.parametrize("again", [(2, 0), (1, 1)])
async def test_a_receiver_that_dies_in_the_middle_leaves_the_trainer_able_to_push(
    again: tuple[int, int], site: Site
) -> None:
    """The next version, or the same once more: survivors are freed, the old export ran to its
    end.
    """
    version, attempt = again
    dying, survivor = Receiver(dies_at="layer.0"), Receiver()
    await site.begin(1, receivers=2, bucket_bytes=40)
    waiting = asyncio.ensure_future(site.pull(survivor, 1, number=0))
    with pytest.raises(RuntimeError, match="out of memory"):
        await site.pull(dying, 1, number=1)
    assert not waiting.done()
    assert site.trainer.running == 1
    reopening = asyncio.ensure_future(site.begin(version, receivers=2, attempt=attempt))
    with pytest.raises(GcoreError, match="another push began before this one ended"):
        await waiting
    await reopening
    replacement = Receiver()
    await asyncio.gather(
        site.pull(survivor, version, 0, attempt),
        site.pull(replacement, version, 1, attempt),
    )
    assert_holds(survivor, version)
    assert_holds(replacement, version)
    assert site.trainer.running == 0


async def test_a_failed_export_is_reported_and_the_next_push_works(site: Site) -> None:
    site.trainer.fails_at = "layer.1"
    await site.begin(1, receivers=1)
    receiver = Receiver()
    with pytest.raises(GcoreError, match="a collective failed"):
        await site.pull(receiver, 1)
    site.trainer.fails_at = ""
    await site.begin(1, receivers=1, attempt=1)
    await site.pull(receiver, 1, attempt=1)
    assert_holds(receiver, 1)


class Slow:
    """Takes ``slow_s`` for each piece of the work of one name; ``shown_within``: signs of progress
    during each.
    """

    def __init__(self, name: str, slow_s: float, shown: Counter[int]) -> None:
        self._name, self._slow_s, self._shown = name, slow_s, shown
        self.shown_within: list[int] = []

    async def __call__(self, work: Callable[..., Any], *args: Any) -> Any:
        # What a trainer does is passed to what wakes it.
        done = args[0] if work.__name__ == "_awake" else work
        if done.__name__ == self._name:
            before = self._shown[1]
            await asyncio.sleep(self._slow_s)
            self.shown_within.append(self._shown[1] - before)
        return work(*args)


@pytest.mark.parametrize("slow", ["load", "_fill_next"])
def test_progress_distinguishes_slow_receivers_from_waiting_ones(slow: str, tmp_path: Path) -> None:
    """A receiver, by its own silence; or the trainer, by that of the requests for buckets, which
    expire then alone.
    """
    slow_s, shown = 2 * Deadlines().seconds(Wait.PUSH), Counter[int]()
    compute = Slow(slow, slow_s, shown)

    async def push() -> Counter[tuple[int, int]]:
        site, asked = Site(tmp_path, compute), Counter[tuple[int, int]]()

        async def bucket(request: BucketRequest, call: Call) -> Bucket:
            asked[request.receiver, request.index] += 1
            return await site.shell.bucket(request, call)

        site.service.add(PUSH_BUCKET, bucket)
        await site.begin(1, receivers=2, bucket_bytes=40)
        receivers, computes = [Receiver(), Receiver()], [DirectCompute(), compute]
        source = site.view.peer("policy.0")
        pulls = [
            pull_weights(
                receiver,
                source,
                PullWeights(1, i, "policy.0"),
                computes[i],
                partial(shown.update, [i]),
                {},
            )
            for i, receiver in enumerate(receivers)
        ]
        await asyncio.gather(*pulls)
        for receiver in receivers:
            assert_holds(receiver, 1)
        return asked

    asked = run_virtual(push())
    assert shown[0] >= slow_s, "one that waits shows it every second"
    if slow == "load":
        assert max(compute.shown_within) <= 2, "who loads shows progress when a bucket is loaded"
        assert max(asked.values()) == 1, "a request expired, and the trainer was taken for slow"
    else:
        assert min(compute.shown_within) >= slow_s - 2
        assert max(asked.values()) > 1, "no request expired"


def test_no_receiver_reads_a_bucket_while_it_is_written(tmp_path: Path) -> None:
    """Receivers as slow as you like, some of which stop in the middle; every tensor is hashed
    before it is loaded.
    """

    async def weather(seed: int) -> None:
        random = np.random.default_rng(seed)
        site = Site(tmp_path, TimedCompute(seed))
        receivers = [Receiver() for _ in range(1 + seed % 3)]
        bucket_bytes = int(random.integers(1, 200))
        await site.begin(1, len(receivers), bucket_bytes)
        pulls = [
            site.pull(receiver, 1, i, compute=TimedCompute(seed + i))
            for i, receiver in enumerate(receivers)
        ]
        broken = asyncio.gather(*pulls)
        await asyncio.wait([broken], timeout=float(random.uniform(0, 2)))
        if broken.done():
            await broken
        broken.cancel()
        await site.begin(1, len(receivers), bucket_bytes, attempt=1)
        pulls = [
            site.pull(receiver, 1, i, 1, TimedCompute(-seed - i))
            for i, receiver in enumerate(receivers)
        ]
        await asyncio.gather(*pulls)
        for receiver in receivers:
            assert_holds(receiver, 1)

    for seed in range(60):
        run_virtual(weather(seed))


async def test_the_other_ranks_take_part_in_one_export_per_push(tmp_path: Path) -> None:
    site = Site(tmp_path, rank=1)
    site.trainer.version = 1
    await site.view.serve("policy.0", site.service)
    peer = site.view.peer("policy.0")
    for attempt, begins in ((1, True), (1, False), (2, True)):  # one is asked again
        site.trainer.exported = []
        await peer.call(PUSH_BEGIN, BeginPush(1, 96, 1, attempt))
        await peer.call(PUSH_EXPORTED, BeginPush(1, 96, 1, attempt))
        assert (site.trainer.exported, site.trainer.running) == (NAMES if begins else [], 0)


# -- other ways than shared memory -----------------------------------------------------------------


async def test_device_memory_is_freed_when_all_receivers_have_read_all(tmp_path: Path) -> None:
    site = Site(tmp_path, transport="auto")
    await site.begin(1, receivers=2, bucket_bytes=40)
    quick, slow = Receiver(), Receiver()
    pulling = asyncio.ensure_future(site.pull(quick, 1, number=0))
    for index in range(3):
        bucket = await site.view.peer("policy.0").call(
            PUSH_BUCKET, BucketRequest(1, 1, index, 0, slow.push_offers())
        )
    writer = MEMORIES[bucket.handle]
    assert (bucket.transport, "closed" in writer.done, pulling.done()) == ("host", False, False)
    await site.begin(1, receivers=2, bucket_bytes=40, attempt=1)
    assert writer.done[-1] == "closed"  # the slow one stopped in the middle
    with pytest.raises(
        GcoreError, match="another push began|no push of version 1, attempt 0, is open"
    ):
        await pulling
    await asyncio.gather(
        *(site.pull(receiver, 1, i, attempt=1) for i, receiver in enumerate((quick, slow)))
    )
    done = MEMORIES[bucket.handle].done
    assert done == [*(f"sent {index}" for index in range(len(done) - 1)), "closed"]
    assert len(done) > 3
    assert_holds(slow, 1)


async def test_a_receiver_that_supports_only_shared_memory_uses_it(tmp_path: Path) -> None:
    class Plain(Receiver):
        push_offers = None  # type: ignore[assignment]

    site = Site(tmp_path, transport="auto")
    await site.begin(1, receivers=2)
    plain, able = Plain(), Receiver()
    await asyncio.gather(site.pull(plain, 1, 0), site.pull(able, 1, 1))
    assert_holds(plain, 1)
    assert_holds(able, 1)
    assert site.source._writer is site.shell._memory


async def test_a_transport_that_the_trainer_does_not_support_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.transport = "ipc"
    await site.begin(1, receivers=1)
    with pytest.raises(
        ConfigError,
        match="push_transport: this trainer pushes weights through shared memory, not by",
    ):
        await site.pull(Receiver(), 1)
    site.transport = "shm"
    await site.begin(1, receivers=1, attempt=1)
    await site.pull(Receiver(), 1, attempt=1)


@pytest.mark.parametrize(("wanted", "second"), [("auto", "shm"), ("ipc", "ipc")])
async def test_a_restarted_push_uses_shared_memory_unless_configured_otherwise(
    wanted: str, second: str
) -> None:
    told: list[str] = []

    class Peer:
        name = "policy.0"

        async def call(
            self, endpoint: Endpoint[Any, Any], request: Any, *, deadline_s: float
        ) -> Any:
            if endpoint == PUSH_BEGIN:
                told.append(request.transport)
            elif endpoint == PUSH_PULL and len(told) == 1:
                raise WeightMismatch("a bucket's memory cannot be opened")
            return PushConfirmed(1, 0, True) if endpoint == PUSH_PULL else None

    context = SimpleNamespace(
        trainers=[Peer()],
        supervisor=Peer(),
        service=Service("controller.0"),
        annotators={},
        facts=SimpleNamespace(run=RunSettings(), trained={}, shards=1),
    )
    placing = SimpleNamespace(replicas=[Peer()])
    publishing = Publishing(context, SyncConfig(push_transport=wanted), placing)  # type: ignore[arg-type]
    await publishing._push_until_whole(1, 0)
    assert told == [wanted, second]


def test_a_push_that_cannot_be_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match="push_fan_out must be at least 1, not 0"):
        SyncConfig(push_fan_out=0)


# -- receivers on another node ---------------------------------------------------------------------


class Far:
    """A second node, to which the trainer of a site pushes over ``wire``.

    near, slabs: the stores of the trainer's node and of this one.
    """

    def __init__(self, site: Site, directory: Path) -> None:
        self.site = site
        own = free_address()
        self.wire = Wire(free_address(), own)
        self.near = self._store("node0", directory / "near", {"node0": own})
        self.slabs = self._store("node1", directory / "far", {"node0": self.wire.address})

    def _store(self, node: str, directory: Path, bulk: dict[str, str]) -> SlabService:
        spec = StoreSpec(node=node, directory=str(directory), spill=str(directory / "spill"))
        return SlabService(spec, b"s" * 32, joining(b"s" * 32, bulk, push_memory=self._memory))

    def _memory(self, worker: str) -> Path | None:
        return self.site.shell._memory.path if worker == "policy.0" else None

    async def open(self) -> None:
        self.near.remote.open()
        service = Service("node1")
        self.slabs.register(service)
        await self.site.network.view("node1").serve("node1", service)

    def close(self) -> None:
        self.slabs.close()
        self.near.close()

    async def pull(self, receiver: Receiver, version: int, number: int, attempt: int = 0) -> Any:
        here = Here("node1", self.site.network.view(f"rollout.{number}").peer("node1"))
        return await pull_weights(
            receiver,
            self.site.view.peer("policy.0"),
            PullWeights(version, number, "policy.0", attempt),
            DirectCompute(),
            lambda: None,
            self.mapped(receiver),
            here=here,
        )

    def mapped(self, receiver: Receiver) -> dict[str, np.ndarray]:
        """What the receiver has mapped; it stays from push to push."""
        found: dict[str, np.ndarray] = receiver.__dict__.setdefault("mapped", {})
        return found


@pytest.fixture
async def far(tmp_path: Path) -> AsyncIterator[Far]:
    far = Far(Site(tmp_path), tmp_path)
    with far.wire.opened():
        await far.open()
        yield far
        far.close()


async def test_a_push_comes_to_another_node_once(far: Far) -> None:
    """Two receivers are there and one is with the trainer; all get every byte, push after push."""
    near, one, other = Receiver(), Receiver(), Receiver()
    for version in (1, 2, 3):
        await far.site.begin(version, receivers=3)
        _, confirmed, _ = await asyncio.gather(
            far.site.pull(near, version, 0),
            far.pull(one, version, 1),
            far.pull(other, version, 2),
        )
        for receiver in (near, one, other):
            assert_holds(receiver, version)
        assert confirmed.verified
        assert sent_bytes(far.near) == version * sum(SIZES), "one copy a node"
    assert list(one.mapped) == list(other.mapped) == [str(mirror_of(far))]  # type: ignore[attr-defined]


def mirror_of(far: Far) -> Path:
    (mirror,) = Path(far.slabs._spec.directory).glob("mirror-*")
    return mirror


async def test_the_sender_says_who_reads_from_whom(tmp_path: Path) -> None:
    """Two generators of one node read from one parent; who is on the sender's node has none."""
    site = Site(tmp_path)
    await site.begin(1, receivers=6)
    nodes = ["node3", "node1", "", "node2", "node3", "node0"]
    asks = (
        site.view.peer("policy.0").call(PUSH_BUCKET, BucketRequest(1, number, 0, node=node))
        for number, node in enumerate(nodes)
    )
    buckets = await asyncio.gather(*asks)
    assert [bucket.parents for bucket in buckets] == [["node1"], [], [], [], ["node1"], []]
    assert {bucket.node for bucket in buckets} == {"node0"}


async def test_tensors_of_any_sizes_come_to_another_node(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region of the mirror is overwritten as that of the sender is: never while it is read."""
    draw = random.Random(5)
    receivers = [Receiver(), Receiver()]
    for version in range(1, 60):
        sizes = [draw.choice((0, 1, 7, 24, 60, 100)) for _ in range(draw.randint(1, 9))]
        monkeypatch.setitem(globals(), "NAMES", [f"layer.{i}" for i in range(len(sizes))])
        monkeypatch.setitem(globals(), "SIZES", sizes)
        for receiver in receivers:
            receiver.held.clear()
        await far.site.begin(version, 2, bucket_bytes=draw.choice((1, 40, 96, 150, 400)))
        await asyncio.gather(*(far.pull(each, version, i) for i, each in enumerate(receivers)))
        for receiver in receivers:
            assert_holds(receiver, version)


async def test_a_mirror_that_was_altered_is_refused(far: Far) -> None:
    """The agent's copy is digested by each receiver, like the sender's memory."""
    bring = of_service(far.slabs)._mirrors.bring

    async def spoil(request: Any, progress: Any) -> str:
        path = await bring(request, progress)
        with open(path, "r+b") as file:
            file.seek(request.offset)
            file.write(b"spoiled")
        return path

    of_service(far.slabs)._mirrors.bring = spoil  # type: ignore[method-assign]
    await far.site.begin(1, receivers=1)
    receiver = Receiver()
    with pytest.raises(WeightMismatch, match="is not what its sender hashed"):
        await far.pull(receiver, 1, 0)
    assert receiver.version == 0


async def test_a_push_that_is_begun_anew_takes_the_mirror_over(far: Far) -> None:
    """The first one's bucket is still on its way. Who waits for it hears that it is over."""
    far.wire.hold_after = 0
    await far.site.begin(1, receivers=1)
    first = asyncio.ensure_future(far.pull(Receiver(), 1, 0))
    await asyncio.to_thread(far.wire.holds.wait)
    far.wire.hold_after = None
    await far.site.begin(2, receivers=1)
    receiver = Receiver()
    await far.pull(receiver, 2, 0)
    assert_holds(receiver, 2)
    with pytest.raises(ContractError, match="another push began before this one ended"):
        await first
    request = MirrorRequest("node0", "policy.0", 1, 0, 1, 0, 1)
    with pytest.raises(ContractError, match="another push began before this one ended"):
        await far.slabs.mirror(request, Call(lambda: None))


async def test_a_source_that_is_gone_fails_the_push_and_not_its_receivers_agent(far: Far) -> None:
    """It is no WorkerDied, after which the agent would be asked again and again."""
    far.near.close()
    of_service(far.slabs).client._patience_s = 0.3
    await far.site.begin(1, receivers=1)
    with pytest.raises(ContractError, match=r"node node0, version 1, bucket 0: it sent 0 of \d+"):
        await far.pull(Receiver(), 1, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"worker": "policy.1"}, WeightMismatch, "no worker 'policy.1' pushes here"),
        ({"worker": "../far/1"}, WeightMismatch, "no worker '../far/1' pushes here"),
        ({"offset": 1 << 20}, WeightMismatch, "a reference points outside its slab"),
        ({"offset": -1}, ContractError, "a bucket lies outside its memory"),
        ({"nbytes": 1 << 62}, WeightMismatch, "no mirror of 4611686018427387904 bytes"),
        ({"node": "node7"}, ContractError, "node node7: no address is known for its content"),
    ],
)
async def test_no_other_memory_can_be_mirrored(
    change: dict[str, Any], error: type[GcoreError], message: str, far: Far
) -> None:
    await far.site.begin(1, receivers=1)
    request = MirrorRequest("node0", "policy.0", 1, 0, 0, 0, 40)
    with pytest.raises(error, match=re.escape(message)):
        await far.slabs.mirror(msgspec.structs.replace(request, **change), Call(lambda: None))
    assert sent_bytes(far.near) == 0


async def test_a_push_to_another_node_goes_through_shared_memory(tmp_path: Path) -> None:
    """Whatever both sides speak: a transport of devices ends at the node."""
    far = Far(Site(tmp_path, transport="auto"), tmp_path)
    with far.wire.opened():
        await far.open()
        await far.site.begin(1, receivers=1)
        receiver = Receiver()
        await far.pull(receiver, 1, 0)
        assert_holds(receiver, 1)
        assert sent_bytes(far.near) == sum(SIZES)
        far.site.transport = "host"
        await far.site.begin(1, receivers=1, attempt=1)
        message = "weights cannot be pushed by 'host' to another node"
        with pytest.raises(ConfigError, match=message):
            await far.pull(receiver, 1, 0, attempt=1)
        far.close()
