"""Compares a weight push between two processes with a plain copy of the same bytes.

    python benchmarks/weight_push.py [--json] [--check] [--rounds 9]

A push is opened by this process as a controller does it, and goes between two worker processes over
unix sockets. The trainer exports the weights and copies them into shared memory, where they are
hashed. The generator's worker hashes them again, refuses what differs, and commits. The generator
reads every tensor and copies none. The plain copy is one ``numpy.copyto`` between two warm buffers
of this process. Every round does both, with other weights each time; the claims are ratios of
medians.

with_loading: the same push into a generator that copies every tensor into its own memory. Loading
    is the engine's own affair, so it is a claim apart. After each of these, outside of the time,
    the hash of what the generator holds is compared with that of what the trainer has; the
    benchmark fails when they differ.

fingerprinted: the same push into a generator that also returns the hash of every loaded tensor,
    which the push compares.

Memory is that of the first push, when nothing is mapped yet. It is the largest resident set of a
process meanwhile (pages of the shared bucket included, once) less the resident set before, over the
size of a bucket; the larger of both processes counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from report import Claim, add_options, median_ratio, publish, repeated

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.job_settings import RunSettings
from gcore_core.contract.records import FAILED, Header, Lease, TensorSpec, WeightPlan
from gcore_core.controllers.config import SyncConfig
from gcore_core.node import handshake
from gcore_core.node.spawn import spawn_process
from gcore_core.runtime.messages import (
    GENERATE,
    GREEDY,
    HELLO,
    PLACE_WEIGHTS,
    PUSH_BEGIN,
    PUSH_PULL,
    SAVE_PRETRAINED,
    TRAIN_RANKS,
    BeginPush,
    GenerateRequest,
    Hello,
    Nothing,
    PlaceWeights,
    PullWeights,
    SaveWeights,
    StorePlace,
    TrainRequest,
    WorkerSpec,
)
from gcore_core.runtime.worker_settings import GeneratorSettings, PlainContext, TrainerSettings
from gcore_core.wire.service import Call, Service
from gcore_core.wire.sockets import RpcNetwork

BUCKET_BYTES = SyncConfig.push_bucket_bytes
SIZES = {"1gb": 1_000_000_000, "500mb": 500_000_000, "100mb": 100_000_000}
DISTRIBUTIONS = ["gcore-core", "msgspec", "numpy", "xxhash"]
BAR = 0.4
NOTHING_HELD = xxhash.xxh3_64_hexdigest(b"")


# -- what is pushed, and the two backends ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model of about ``nbytes`` bytes.

    nbytes: bytes of all tensors.
    tensors: number of equal tensors; 0: shaped like a language model with 24 layers.
    """

    nbytes: int
    tensors: int = 0
    embedding: float = 1 / 16
    """Share of the embedding in all bytes."""

    def specs(self) -> list[TensorSpec]:
        """Returns the tensors, whose sizes are multiples of 64 bytes."""
        if self.tensors:
            shares = {f"tensor.{i}": 1 / self.tensors for i in range(self.tensors)}
        else:
            parts = {"q": 2, "k": 1, "v": 1, "o": 2, "gate": 6, "up": 6, "down": 6, "norm": 0.002}
            layer = (1 - self.embedding) / 24 / sum(parts.values())
            shares = {
                f"layers.{i}.{matrix}": size * layer
                for i in range(24)
                for matrix, size in parts.items()
            }
            shares = {"embedding": self.embedding, **shares}
        sizes = {name: max(1, int(self.nbytes * share / 64)) * 64 for name, share in shares.items()}
        return [TensorSpec(name, "U8", (size,), size) for name, size in sizes.items()]


def fingerprint(tensors: Iterable[np.ndarray]) -> str:
    """Returns one hash of the hashes of all tensors."""
    return xxhash.xxh3_64_hexdigest(
        b"".join(xxhash.xxh3_64_digest(tensor.data) for tensor in tensors)
    )


class TableTrainer:
    """A trainer whose numbers change in every step."""

    def __init__(self, config: ModelConfig, context: WorkerContext) -> None:
        self.version = 0
        self._specs = config.specs()
        random = np.random.default_rng(0)
        self._tensors = [
            np.frombuffer(random.bytes(spec.nbytes), np.uint8).copy() for spec in self._specs
        ]

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """Adds 1 to every number."""
        for tensor in self._tensors:
            tensor += np.uint8(1)
        self.version = step + 1
        return {}

    def skip(self, step: int) -> None:
        """Ends a step that has nothing to train on; see ``Trainer.skip``."""
        self.version = step + 1

    def weight_specs(self) -> list[TensorSpec]:
        return self._specs

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        yield from zip(self._specs, self._tensors, strict=True)

    def save_pretrained(self, directory: Path) -> None:
        """Writes the hash of the weights, which ``Site.push`` compares."""
        directory.mkdir(exist_ok=True)
        (directory / "fingerprint").write_text(fingerprint(self._tensors))

    def close(self) -> None:
        pass


class TableGenerator:
    """A generator that keeps what is pushed.

    A sample asked of it fails, with the hash of what it holds as the reason.
    """

    def __init__(self, config: ModelConfig, context: WorkerContext) -> None:
        self.version = 0
        self._tensors = {spec.name: np.ones(spec.nbytes, np.uint8) for spec in config.specs()}
        self._requests: list[SampleRequest] = []

    def begin_weights(self, plan: WeightPlan) -> None:
        pass

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        for spec, array in tensors:
            np.copyto(self._tensors[spec.name], array)

    def commit_weights(self, plan: WeightPlan) -> None:
        self.version = plan.version

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self._requests += requests

    def step(self) -> list[Finished]:
        """Fails every sample with the hash of the weights as the reason."""
        digest = fingerprint(self._tensors.values())
        versions = (self.version, self.version)
        requests = self._requests
        self._requests = []
        return [
            Finished(request=request, status=FAILED, versions=versions, reason=digest)
            for request in requests
        ]

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        return []

    def close(self) -> None:
        pass


class FingerprintedGenerator(TableGenerator):
    """A generator that also returns the hash of every tensor it holds."""

    def fingerprint(self) -> dict[str, int]:
        return {
            name: xxhash.xxh3_64_intdigest(tensor.data) for name, tensor in self._tensors.items()
        }


class ReadingGenerator(TableGenerator):
    """A generator that holds nothing: what it gets was hashed on both sides, and is dropped."""

    def __init__(self, config: ModelConfig, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._tensors = {}

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        for _ in tensors:
            pass


# -- the processes ---------------------------------------------------------------------------------


class Process:
    """A worker's memory, seen from outside."""

    def __init__(self, pid: int) -> None:
        self._directory = Path(f"/proc/{pid}")
        self._marked_bytes = 0

    def _bytes(self, name: str) -> int:
        """Returns a line of the process's status in bytes."""
        lines = (self._directory / "status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

    def mark(self) -> None:
        """Begins to count: from here on ``extra`` says how much memory was added."""
        (self._directory / "clear_refs").write_text(
            "5"
        )  # the largest resident set becomes the present one
        self._marked_bytes = self._bytes("VmRSS")

    def extra(self) -> int:
        """Returns the largest resident set since ``mark`` less the one then, in bytes."""
        return self._bytes("VmHWM") - self._marked_bytes


@dataclass
class Site:
    """One trainer and one generator.

    network: reaches both.
    directory: where they write.
    processes: name -> process.
    step: the number of the next step.
    """

    network: RpcNetwork
    directory: Path
    processes: dict[str, Process]
    step: int = 0

    async def push(self) -> float:
        """Trains, pushes and compares; returns the seconds of the push."""
        policy = self.network.peer("policy.0")
        rollout = self.network.peer("rollout.0")
        (reply,) = await policy.call(TRAIN_RANKS.of_rank, [TrainRequest(self.step, [], 1, 1)])
        assert reply is not None
        self.step += 1
        began_s = time.perf_counter()
        await policy.call(PUSH_BEGIN, BeginPush(reply.version, BUCKET_BYTES, 1))
        request = PullWeights(reply.version, 0, "policy.0", release_before=self.step)
        await rollout.call(PUSH_PULL, request)
        taken_s = time.perf_counter() - began_s
        await policy.call(SAVE_PRETRAINED, SaveWeights(str(self.directory)))
        await policy.call(PLACE_WEIGHTS, PlaceWeights(str(self.directory), whole=True))
        request_of_sample = GenerateRequest(
            self.step, 0, 0, GREEDY, [Lease(-1, 0, 0, (0,))], least=0
        )
        headers: list[Header] = [
            header
            async for batch in rollout.stream(GENERATE, request_of_sample)
            for header in batch
        ]
        trainer_digest = (self.directory / "fingerprint").read_text()
        generator_digest = headers[0].reason
        if generator_digest != NOTHING_HELD and trainer_digest != generator_digest:
            raise SystemExit(
                f"version {reply.version}: the trainer has {trainer_digest}, the generator "
                f"{generator_digest}"
            )
        return taken_s


@dataclass
class Hellos:
    """Stands for the supervisor of these workers.

    expected: the workers that must say hello.
    pids: worker -> process id.
    complete: set when all have said hello.
    """

    expected: set[str]
    pids: dict[str, int] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def hello(self, request: Hello, call: Call) -> Nothing:
        """Notes the process of a worker."""
        self.pids[request.name] = request.pid
        if self.pids.keys() == self.expected:
            self.complete.set()
        return Nothing()


def worker_spec(
    name: str,
    model: ModelConfig,
    backend: str,
    addresses: dict[str, str],
    directory: Path,
    secret: bytes,
) -> WorkerSpec:
    """Returns the spec of a worker of this benchmark."""
    role = name.partition(".")[0]
    dataset = FactorySpec("gcore_testing.fake:FakeDataset", "gcore_testing.fake:FakeDataConfig")
    plain = {"nbytes": model.nbytes, "tensors": model.tensors, "embedding": model.embedding}
    kind = TrainerSettings if role == "policy" else GeneratorSettings
    return WorkerSpec(
        role=role,
        rank=0,
        ranks=1,
        peers=addresses,
        factories={
            "backend": FactorySpec(f"weight_push:{backend}", "weight_push:ModelConfig", plain),
            "dataset/evaluation": dataset,
        },
        secret=secret,
        settings=kind(
            run=RunSettings(steps=1, deterministic=True),
            context=PlainContext(directory=str(directory)),
        ),
        store=StorePlace(str(directory), "node0", "supervisor"),
        versions=handshake.versions([]),
    )


@contextlib.asynccontextmanager
async def site(model: ModelConfig, generator: str) -> AsyncIterator[Site]:
    """Yields two worker processes of g-core that hold ``model``, and ends them."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="gc-", dir=memory) as place:
        directory = Path(place)
        secret = secrets.token_bytes(32)
        backends = {"policy.0": "TableTrainer", "rollout.0": generator}
        addresses = {name: f"unix:{directory}/{name}" for name in ("supervisor", *backends)}
        network = RpcNetwork(addresses, secret)
        hellos = Hellos(set(backends))
        service = Service("supervisor")
        service.add(HELLO, hellos.hello)
        await network.serve("supervisor", service)
        paths = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "gcore_core.node.worker"]
        started = []
        try:
            for name, backend in backends.items():
                spec = worker_spec(name, model, backend, addresses, directory, secret)
                started.append(
                    await spawn_process(command, spec, directory / f"{name}.log", environment)
                )
            async with asyncio.timeout(120):
                await hellos.complete.wait()
            yield Site(
                network, directory, {name: Process(pid) for name, pid in hellos.pids.items()}
            )
        finally:
            await network.close()
            for process, lifeline in started:
                os.close(lifeline)
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                await process.wait()


# -- measuring -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the rounds of one model took.

    nbytes: bytes of the model.
    rounds: seconds of a plain copy and of a push, round by round.
    extra_bytes: worker -> memory of the first push.
    """

    nbytes: int
    rounds: list[tuple[float, float]]
    extra_bytes: dict[str, int]

    def gb_per_second(self, taken_s: Sequence[float]) -> float:
        """Returns the rate of the model's bytes at the median."""
        return self.nbytes / statistics.median(taken_s) / 1e9


def plain_copy(source: np.ndarray, target: np.ndarray) -> float:
    """Copies ``source`` to ``target`` and returns the seconds it took."""
    began_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began_s


async def measure(model: ModelConfig, rounds: int, generator: str = "TableGenerator") -> Measured:
    """Measures pushes of a model and plain copies in turn.

    generator: the name of the generator's class.
    """
    nbytes = sum(spec.nbytes for spec in model.specs())
    source = np.ones(nbytes, np.uint8)
    target = np.ones(nbytes, np.uint8)
    async with site(model, generator) as workers:
        for process in workers.processes.values():
            process.mark()
        await workers.push()
        extra = {name: process.extra() for name, process in workers.processes.items()}
        pairs = []
        for _ in range(rounds):
            push_s = await workers.push()
            pairs.append((plain_copy(source, target), push_s))
    return Measured(nbytes=nbytes, rounds=pairs, extra_bytes=extra)


def claims_of(name: str, measured: Measured, bar: float | None = None) -> list[Claim]:
    """Returns the claims of one model.

    bar: what the push's speed over the plain copy's is held to.
    """
    copy_s, push_s = zip(*measured.rounds, strict=True)
    rate = measured.gb_per_second
    return [
        repeated(f"gb_per_second_over_memcpy_{name}", measured.rounds, median_ratio, "ratio", bar),
        repeated(f"gb_per_second_{name}", push_s, rate, "GB/s"),
        repeated(f"memcpy_gb_per_second_{name}", copy_s, rate, "GB/s"),
    ]


async def measure_all(rounds: int, scale: float = 1.0) -> list[Claim]:
    """Measures every size and kind of generator.

    scale: what sizes are multiplied with; the names of the claims stay.
    """
    sizes = {name: int(nbytes * scale) for name, nbytes in SIZES.items()}
    models = {name: ModelConfig(nbytes=nbytes) for name, nbytes in sizes.items()}
    plain = {
        name: await measure(model, rounds, "ReadingGenerator") for name, model in models.items()
    }
    others = {
        **{f"{name}_with_loading": (model, "TableGenerator") for name, model in models.items()},
        "1gb_fingerprinted": (ModelConfig(nbytes=sizes["1gb"]), "FingerprintedGenerator"),
        "1gb_large_embedding": (ModelConfig(nbytes=sizes["1gb"], embedding=0.27), "TableGenerator"),
        "100mb_1000_tensors": (ModelConfig(nbytes=sizes["100mb"], tensors=1000), "TableGenerator"),
    }
    others_measured = {
        name: await measure(model, rounds, generator) for name, (model, generator) in others.items()
    }
    extra = {
        name: nbytes / BUCKET_BYTES
        for name, nbytes in others_measured["1gb_with_loading"].extra_bytes.items()
    }
    return [
        *itertools.chain.from_iterable(
            claims_of(name, measured, BAR) for name, measured in plain.items()
        ),
        Claim("peak_extra_memory_over_bucket", max(extra.values()), "ratio", 1.2, "<="),
        *(
            Claim(f"peak_extra_memory_over_bucket/{name}", value, "ratio")
            for name, value in extra.items()
        ),
        Claim("bucket_mib", BUCKET_BYTES / 2**20, "MiB"),
        *itertools.chain.from_iterable(
            claims_of(name, measured) for name, measured in others_measured.items()
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes; 1 for a result")
    add_options(parser)
    args = parser.parse_args()
    claims = asyncio.run(measure_all(args.rounds, args.scale))
    return publish("weight_push", claims, args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
