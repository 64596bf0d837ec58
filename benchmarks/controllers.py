"""Measures the bytes, memory and processor time of controllers, as payload and their number grow.

    python benchmarks/controllers.py [--json] [--check] [--controllers 1 4 16 64] [--rounds 2]
    [--parts PART ...] [--verl-python PYTHON]

Everything of ours is ``g-core run`` with real processes, sockets, controllers, store and pushes;
generators, trainers and judges are those of the plugin sim, which take the protocol's path and
spend no time (``time_scale: 0``). The first step of a run, which connects and warms memory, is left
out; medians of the others, over rounds that take turns.

bytes_per_record_<payload>: encoded bytes that all controllers sent and received in a step, over its
records, each with a payload of its own. memory_<a>_over_<b>: peak resident memory of the largest
controller, likewise.

time_<size>_inline_single_over_ours: a step that makes 256 records with <size> bytes of payload in
all, shows them to a reward and trains on them, by one controller that the payload goes through,
over ours. That controller is written here, over the same RPC, as well as such a design can be:
parts of 128 KiB go to the reward while others come in, and its processes are tuned as ours are. It
does nothing but move bytes; ours is the whole step. On both sides reward and trainer have the
payload at hand and do not look at it.

time_<size>_read_inline_single_over_ours: reward and trainer open the payload, in every design, go
over every byte, and check that they are those that were made. verl_v1_time_<size>_read_over_ours
is the same with verl's default path (verl_transferqueue.py) at its default settings,
verl_v1_tuned_... at those that measured best. verl_old_... is its old path, a single controller
that verl 0.9.1 calls deprecated (verl_controller.py), by its default serialisation, and
verl_old_numpy_... by its other one. All take turns, in three rounds (the part ``readers``). Without
a Python that has verl the claims about it are absent, and so is a size whose step needs more memory
than is left.

controller_us_per_record_c<N>: user and system microseconds of all N controllers, over records:
8,192 a step, 256 emulated devices (64 ranks, 192 replicas) in a few processes. header_ms_p99_c<N>:
99th percentile of the time from a lease leaving a controller to its records' headers arriving
there; generation takes none. controller_messages_c<N>: messages of all controllers in a step.

The part "saturation" is saturation.py's, which says what it measures.

skewed_shard_time_over_even: seconds of a step, on virtual time, with one shard of 8 whose prompts
are four times as long, over those with every prompt longer, by as much in all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import verl_rival
import xxhash
from report import Claim, add_options, publish
from saturation import RATES, Saturation

from gcore_core.contract.errors import DataError
from gcore_core.contract.launching import Endpoint, StreamEndpoint
from gcore_core.contract.run_files import RecordTrace, read_metrics, read_trace
from gcore_core.runtime.files import STREAMED_BYTES
from gcore_core.wire.service import Call, Service
from gcore_core.wire.sockets import RpcNetwork

PAYLOADS = {"50kB": 50_000, "3MB": 3_000_000, "100MB": 100_000_000}
SIZES = {"0.1GB": 100_000_000, "0.5GB": 500_000_000, "1GB": 1_000_000_000, "2GB": 2_000_000_000}
RECORDS = 256  # of a step, whatever its size is
STEPS = 4
GROUP = 16
PROMPTS = 512
SKEWED = 8
FACTOR = 4
PARTS = ["payloads", "sizes", "readers", "numbers", "skew", "saturation"]
DISTRIBUTIONS = ["gcore-core", "gcore-placement", "msgspec", "numpy", "xxhash"]
Metrics = list[dict[str, float]]  # of each step, from the state before the first one on


def note(text: str) -> None:
    """Prints a line with the time and the machine's load to standard error."""
    print(
        f"{time.strftime('%H:%M:%S')} load {os.getloadavg()[0]:.1f}  {text}",
        file=sys.stderr,
        flush=True,
    )


# -- ours ------------------------------------------------------------------------------------------


def job(
    shards: int, prompts: int, group: int, *, ranks: int = 4, replicas: int = 4, hosts: int = 4
) -> dict[str, Any]:
    """Returns a job of emulated backends that spend no time; prompts and answers have 16 tokens.

    shards: controllers.
    prompts, group: groups of a step, and records of each.
    ranks, replicas: devices of the trainer and of the generators.
    hosts: processes that the emulated workers share.
    """
    return {
        "run": {"name": "controllers", "steps": STEPS},
        "launcher": {"use": "sim/crowd", "config": {"processes": hosts}},
        "cluster": {"devices": ranks + replicas},
        "controller": {"shards": shards, "config": {"prompts": prompts}},
        "data": {"use": "sim/prompts", "config": {"prompt_tokens": [16], "answer_tokens": [16]}},
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": group}},
        "objective": {"use": "sim"},
        "roles": {
            "policy": {"use": "sim", "slots": ranks, "config": {"time_scale": 0.0}},
            "rollout": {"use": "sim", "slots": replicas, "config": {"time_scale": 0.0}},
        },
        "rewards": {
            "judged": {"use": "sim/judge", "timeout_s": 600, "config": {"time_scale": 0.0}}
        },
    }


@contextlib.contextmanager
def ran(plan: dict[str, Any], *command: str) -> Iterator[Path]:
    """Yields the directory of a run of ``plan``; ends the benchmark when the run fails.

    command: the command of g-core; by default ``run``.
    """
    with tempfile.TemporaryDirectory(prefix="controllers-") as folder:
        file = Path(folder) / "job.yaml"
        directory = Path(folder) / "run"
        file.write_text(json.dumps(plan))
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "gcore_core",
                *(command or ("run",)),
                str(file),
                f"run.dir={directory}",
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if process.returncode:
            raise SystemExit(
                f"a run ended with {process.returncode}:\n"
                f"{(process.stdout + process.stderr)[-2000:]}"
            )
        yield directory


def metrics_of(directory: Path) -> Metrics:
    """Returns the metrics of every step in a run's directory."""
    return [row["metrics"] for row in read_metrics(directory)]


def medians(metrics: Metrics, name: str) -> float:
    """Returns the median of a metric over all steps but the first."""
    return statistics.median(step[name] for step in metrics[2:])


def memory_mib(metrics: Metrics) -> float:
    """Returns the peak resident MiB of the largest controller."""
    return max(
        value for name, value in metrics[-1].items() if name.startswith("memory_mib/controller.")
    )


def with_payload(
    shards: int, prompts: int, group: int, nbytes: int, reads: bool = False
) -> Metrics:
    """Runs a job whose records carry a payload; returns its metrics.

    nbytes: bytes of one record's payload.
    reads: whether reward and trainer go over every byte.
    """
    plan = job(shards, prompts, group)
    plan["roles"]["rollout"]["config"]["payload"] = {"nbytes": nbytes}
    for reader in (plan["roles"]["policy"], plan["rewards"]["judged"]):
        reader["config"]["reads"] = reads
    with ran(plan) as directory:
        metrics = metrics_of(directory)
    if not all(step["groups/trained"] == prompts for step in metrics[1:]):
        raise SystemExit(f"a step did not train on {prompts} groups")
    return metrics


def payloads() -> list[Claim]:
    """Runs 24 records a step through two controllers, with each size of payload in PAYLOADS.

    Once: bytes and memory do not depend on what else runs.
    """
    nbytes: dict[str, float] = {}
    mib: dict[str, float] = {}
    for name, size in PAYLOADS.items():
        note(f"payload of {name}")
        metrics = with_payload(2, 6, 4, size)
        nbytes[name] = medians(metrics, "controller/bytes_per_record")
        mib[name] = memory_mib(metrics)
    return [
        *(Claim(f"bytes_per_record_{p}", nbytes[p], "bytes", 1000, "<=") for p in PAYLOADS),
        Claim("memory_100MB_over_50kB", mib["100MB"] / mib["50kB"], "ratio", 1.05, "<="),
        *(Claim(f"controller_memory_{p}", mib[p], "MiB, peak resident") for p in PAYLOADS),
    ]


# -- one controller that the payload goes through --------------------------------------------------

PART_BYTES = 1 << 17
SENDING = 4  # parts on their way to a worker
MAKE = StreamEndpoint("make", int, bytes)
TAKE = Endpoint("take", bytes, int)


def inline_worker(addresses: dict[str, str], secret: bytes, name: str, reads: bool) -> None:
    """Runs a process that produces payload, and that takes payload from the controller.

    reads: whether it hashes what it takes and compares.
    """
    payload = np.random.default_rng(0).bytes(PART_BYTES)
    digests = {
        size: xxhash.xxh3_64_intdigest(payload[:size]) for size in (PART_BYTES, *last_parts())
    }

    async def make(nbytes: int, call: Call) -> AsyncGenerator[bytes, None]:
        for start in range(0, nbytes, PART_BYTES):
            yield payload[: nbytes - start]

    async def take(part: bytes, call: Call) -> int:
        if reads and xxhash.xxh3_64_intdigest(part) != digests[len(part)]:
            raise DataError("it is not what was made")
        return len(part)

    async def main() -> None:
        service = Service(name)
        service.add(MAKE, make)
        service.add(TAKE, take)
        network = RpcNetwork(addresses, secret)
        await network.serve(name, service)
        await asyncio.Event().wait()

    asyncio.run(main())


def inline_controller(
    addresses: dict[str, str], secret: bytes, nbytes: int, connection: Any
) -> None:
    """Sends (median seconds of a step, peak resident MiB) over the connection.

    nbytes: bytes of a step, which come from the producer and go to reward and trainer.
    """

    async def step(network: RpcNetwork) -> float:
        """Moves the payload of one step and returns the seconds it took."""
        began_s = time.perf_counter()
        sending = asyncio.Semaphore(SENDING)
        nbytes_taken = 0

        async def give(name: str, part: bytes) -> int:
            async with sending:
                return await network.peer(name).call(TAKE, part)

        batch: list[bytes] = []
        async with asyncio.TaskGroup() as group:
            scored = []
            async with contextlib.aclosing(network.peer("producer").stream(MAKE, nbytes)) as parts:
                async for part in parts:
                    batch.append(part)
                    scored.append(group.create_task(give("reward", part)))
        nbytes_taken += sum(task.result() for task in scored)
        nbytes_taken += sum(await asyncio.gather(*(give("trainer", part) for part in batch)))
        if nbytes_taken != 2 * nbytes:
            raise SystemExit(f"{nbytes_taken} bytes were taken, not {2 * nbytes}")
        return time.perf_counter() - began_s

    async def main() -> float:
        network = RpcNetwork(addresses, secret)
        seconds = [await step(network) for _ in range(STEPS)][1:]
        await network.close()
        return statistics.median(seconds)

    step_s = asyncio.run(main())
    connection.send((step_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def last_parts() -> set[int]:
    """Returns the sizes of the last, smaller part of each size in SIZES."""
    return {size % PART_BYTES for size in SIZES.values()}


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """Tunes processes that start within the block as those of a run are, which makes them
    faster.
    """
    environment = dict(os.environ)
    os.environ["GLIBC_TUNABLES"] = f"glibc.cpu.x86_non_temporal_threshold={STREAMED_BYTES:#x}"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)


def inline_single(nbytes: int, reads: bool = False) -> tuple[float, float]:
    """Returns (seconds of a step, peak resident MiB of the controller)."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="inline-") as folder:
        names = ("producer", "reward", "trainer")
        secret = os.urandom(32)
        addresses = {name: f"unix:{folder}/{name}" for name in names}
        processes = [
            context.Process(target=inline_worker, args=(addresses, secret, name, reads))
            for name in names
        ]
        receiver, sender = context.Pipe()
        processes.append(
            context.Process(target=inline_controller, args=(addresses, secret, nbytes, sender))
        )
        try:
            with tuned():
                for process in processes:
                    process.start()
            sender.close()
            step_s, peak_mib = receiver.recv()
        finally:
            for process in processes:
                process.kill()
                process.join()
    return step_s, peak_mib


def sizes(rounds: int) -> list[Claim]:
    """Measures the same step by ours and by one controller with payload inline, in turns."""
    seconds = defaultdict[str, list[float]](list)
    memory = defaultdict[str, list[float]](list)
    for _, (name, size) in itertools.product(range(rounds), SIZES.items()):
        note(f"a step of {name}")
        metrics = with_payload(2, RECORDS // 4, 4, size // RECORDS)
        measured = {
            "ours": (medians(metrics, "seconds/step"), memory_mib(metrics)),
            "inline": inline_single(size),
        }
        for design, (step_s, peak_mib) in measured.items():
            seconds[f"{design}/{name}"].append(step_s)
            memory[f"{design}/{name}"].append(peak_mib)
        note(
            ", ".join(
                f"{design} {step_s:.2f} s {peak_mib:.0f} MiB"
                for design, (step_s, peak_mib) in measured.items()
            )
        )
    step_s = {name: statistics.median(values) for name, values in seconds.items()}
    peak_mib = {name: statistics.median(values) for name, values in memory.items()}
    growth = peak_mib["ours/2GB"] / peak_mib["ours/0.1GB"]
    return [
        *(
            Claim(
                f"time_{name}_inline_single_over_ours",
                step_s[f"inline/{name}"] / step_s[f"ours/{name}"],
                "ratio",
                10.0 if name == "1GB" else None,
            )
            for name in SIZES
        ),
        Claim("memory_2GB_over_0.1GB", growth, "ratio", 1.05, "<="),
        *(Claim(f"step_s_{name.replace('/', '_')}", value, "s") for name, value in step_s.items()),
        *(
            Claim(f"peak_mib_{name.replace('/', '_')}", value, "MiB, peak resident")
            for name, value in peak_mib.items()
        ),
    ]


def readers(verl_python: Path | None, size: str, rounds: int) -> list[Claim]:
    """Measures a step whose payload reward and trainer open and check, by all designs in turns."""
    nbytes = SIZES[size]

    def ours() -> verl_rival.Measured:
        metrics = with_payload(2, RECORDS // 4, 4, nbytes // RECORDS, reads=True)
        return {"step_s": medians(metrics, "seconds/step"), "memory_mib": memory_mib(metrics)}

    def inline() -> verl_rival.Measured:
        step_s, peak_mib = inline_single(nbytes, reads=True)
        return {"step_s": step_s, "memory_mib": peak_mib}

    sides = {"ours": ours, "inline_single": inline}
    if verl_python is not None:
        sides |= verl_rival.verl_sides(verl_python, nbytes, RECORDS)
    results = verl_rival.measure_readers(sides, rounds, note)
    return verl_rival.readers_claims(results, size)


# -- how many controllers --------------------------------------------------------------------------


def cpu_s(metrics: dict[str, float]) -> float:
    """Returns the processor seconds of all controllers so far."""
    return sum(
        value for name, value in metrics.items() if name.startswith("cpu_seconds/controller.")
    )


def numbers(controllers: list[int], rounds: int) -> list[Claim]:
    """Measures what controllers cost for each number of them.

    Numbers above 16 run in the first round only.
    """
    cpu_us = defaultdict[int, list[float]](list)
    header_s = defaultdict[int, list[float]](list)
    messages = defaultdict[int, list[float]](list)
    seconds = defaultdict[int, list[float]](list)
    records = GROUP * PROMPTS
    for round_number, shards in itertools.product(range(rounds), controllers):
        if round_number and shards > 16:
            continue
        note(f"{shards} controllers")
        with ran(job(shards, PROMPTS, GROUP, ranks=64, replicas=192)) as directory:
            metrics = metrics_of(directory)
            trace = [
                line
                for line in read_trace(directory)
                if isinstance(line, RecordTrace) and line.step
            ]
        cpu_us[shards] += [
            (cpu_s(b) - cpu_s(a)) / records * 1e6 for a, b in itertools.pairwise(metrics[1:])
        ]
        header_s[shards].append(float(np.percentile([r.finished_s - r.sent_s for r in trace], 99)))
        messages[shards].append(medians(metrics, "controller/messages"))
        seconds[shards].append(medians(metrics, "seconds/step"))
        note(
            f"{shards} controllers: {', '.join(f'{value:.0f}' for value in cpu_us[shards])} us a "
            "record"
        )
    cost = {shards: statistics.median(values) for shards, values in cpu_us.items()}
    least = min(controllers)
    return [
        *(
            Claim(f"controller_us_per_record_c{n}", cost[n], "microseconds", 150, "<=")
            for n in controllers
        ),
        *(
            Claim(
                f"controller_us_per_record_c{n}_over_c{least}",
                cost[n] / cost[least],
                "ratio",
                1.2,
                "<=",
            )
            for n in controllers[1:]
        ),
        *_each("controller_messages", messages, "messages a step"),
        *_each("header_ms_p99", header_s, "ms", 1000),
        *_each("step_s", seconds, "s"),
    ]


def _each(
    name: str, values_by_count: dict[int, list[float]], unit: str, scale: float = 1
) -> list[Claim]:
    """Returns a claim with the median for each number of controllers.

    scale: factor from the values' unit to the claim's.
    """
    return [
        Claim(f"{name}_c{n}", scale * statistics.median(values), unit)
        for n, values in values_by_count.items()
    ]


# -- a shard with more to do -----------------------------------------------------------------------


def emulated_s(change: Callable[[dict[str, Any]], None]) -> float:
    """Returns the seconds of a step of the emulated cluster, on virtual time.

    It has 8 shards, 32 ranks, 64 replicas, and answers of about 2,500 tokens.

    change: changes the settings of the data.
    """
    plan = job(SKEWED, 128, GROUP, ranks=32, replicas=64)
    plan["balance"] = {"use": "balance/cost"}
    plan["data"]["config"] = {"kind": "rl16k", "prompt_tokens": [512]}
    plan["rewards"]["judged"]["config"] = {"replicas": 32}
    for role in plan["roles"].values():
        role["config"] = {}
    change(plan["data"]["config"])
    with ran(plan, "sim", "run") as directory:
        return medians(metrics_of(directory), "seconds/step")


def skew() -> list[Claim]:
    """Compares one shard with longer prompts to longer prompts everywhere."""
    note("a shard with longer prompts")
    as_long = (
        SKEWED - 1 + FACTOR
    ) / SKEWED  # what every prompt is made, so that there is as much in all

    def skewed(data: dict[str, Any]) -> None:
        data["skew"] = {"shards": SKEWED, "factor": float(FACTOR)}

    def even(data: dict[str, Any]) -> None:
        data["prompt_tokens"] = [round(512 * as_long)]

    with ThreadPoolExecutor() as pool:  # virtual time: they do not disturb each other
        skewed_s, even_s = pool.map(emulated_s, (skewed, even))
    return [Claim("skewed_shard_time_over_even", skewed_s / even_s, "ratio", 1.1, "<=")]


# -- what one controller can carry -----------------------------------------------------------------


def saturation(short: bool) -> list[Claim]:
    """Measures controllers at the pace of engines; see saturation.py.

    short: whether to measure as little as possible.
    """

    def run(plan: dict[str, Any]) -> Metrics:
        with ran(plan) as directory:
            return metrics_of(directory)

    measures = Saturation(
        job=job,
        run=run,
        inline_s=lambda nbytes: inline_single(nbytes)[0],
        note=note,
        steps=1 if short else 3,
        rounds=1 if short else 2,
        devices=RATES[:1] if short else RATES,
        counts=(2,) if short else (4, 16, 64),
    )
    return measures.claims() + measures.with_2048_each(2 if short else 64)


# -- all -------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--controllers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--verl-python", type=Path, help="an interpreter that has verl")
    parser.add_argument("--read-size", choices=SIZES, default="1GB", help="of the part readers")
    parser.add_argument("--read-rounds", type=int, default=3, help="of the part readers")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--short",
        action="store_true",
        help="saturation with few controllers, slow engines, one step",
    )
    add_options(parser)
    args = parser.parse_args()
    parts: dict[str, Callable[[], list[Claim]]] = {
        "payloads": payloads,
        "sizes": lambda: sizes(args.rounds),
        "readers": lambda: readers(args.verl_python, args.read_size, args.read_rounds),
        "numbers": lambda: numbers(args.controllers, args.rounds),
        "skew": skew,
        "saturation": lambda: saturation(args.short),
    }
    claims = [claim for name in args.parts for claim in parts[name]()]
    # A part that is measured by itself has a result of its own.
    name = f"controllers_{args.parts[0]}" if len(args.parts) == 1 else "controllers"
    return publish(name, claims, args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
