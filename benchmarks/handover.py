"""Measures handing 64 MB over by one copy into a recycled slab, in place, and a small call.

    python benchmarks/handover.py [--json] [--check] [--rounds 31]

The node agent is a process of its own, reached over a unix socket. This process is a producer and
then a reader.

handover_over_memcpy_64MB: ``numpy.copyto`` between two warm buffers, over ``StoreWriter.put`` of
    one array of the same size. The latter asks the agent for a slab (one that was freed before, so
    its pages are warm), writes the table of columns, copies, hashes and signs. Every round does
    both, one after the other, with other bytes each time. The claim is a ratio of medians.

reader_verify_ms: opening the reference, which checks the MAC and the stamp in front of the content.
    It is not part of the hand-over, since it runs in another process and at another time. Nothing
    is copied. Each round compares all bytes.

in_place_notify_ms: asking for room and committing it, for a producer that writes into shared memory
    itself and hashes what it makes while it has it at hand. No byte of the payload is touched.

in_place_notify_hashed_ms: the same for a producer without a hash, so that commit reads all of the
    payload once more.

rpc_small_call_ms_median: one call after the other to the agent's process, a few bytes each way.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from report import add_options, median_ratio, publish, repeated

from gcore_core.contract.launching import Site
from gcore_core.runtime.messages import RELEASE, ReleaseRequest
from gcore_core.runtime.process.config import LocalConfig
from gcore_core.runtime.process.launchers import AGENT, LocalLauncher
from gcore_core.runtime.rpc.service import Service
from gcore_core.runtime.store.client import StoreReader, StoreWriter

NBYTES = 64_000_000
CALLS = 2000
SHARDS = frozenset({0})
OWNER = "producer"
DISTRIBUTIONS = ["gcore-core", "msgspec", "numpy", "xxhash"]


class Producer:
    """Writes one array a step; a step's slab is free again before the next begins."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._writer = StoreWriter(
            site.home_node.store, AGENT, site.secret, site.home_node.agent, OWNER
        )
        self._reader = StoreReader(site.home_node.store, AGENT, site.secret)
        self._payload, self._copy = (np.full(NBYTES, value, np.uint8) for value in (1, 2))
        self._digest = 0
        self._step = 0

    async def begin(self) -> None:
        """Begins a step: changes the payload and frees the slab of the step before."""
        self._step += 1
        self._payload += np.uint8(1)
        self._digest = xxhash.xxh3_64_intdigest(self._payload.data)
        self._writer.release({0: (0, self._step)})
        await self.call(self._step)

    async def call(self, step: int = 0) -> None:
        """Makes one small call to the agent."""
        await self._site.home_node.agent.call(RELEASE, ReleaseRequest(OWNER, {0: (0, step)}))

    async def memcpy(self) -> None:
        """Copies the payload between two warm buffers."""
        np.copyto(self._copy, self._payload)

    async def hand_over(self) -> None:
        """Puts the payload into the store."""
        self._ref = await self._writer.put(self._step, SHARDS, [{"x": self._payload}])

    async def verify(self) -> None:
        """Opens what was put, which checks its MAC and stamp."""
        self._opened = self._reader.open(self._ref)[0]["x"]

    def check(self) -> None:
        """Ends the benchmark when the reader has other bytes than the producer."""
        if self._opened.tobytes() != self._payload.tobytes():
            raise SystemExit("the reader has other bytes than the producer")
        del self._opened

    async def in_place(self) -> None:
        """Reserves room and commits it with a known hash."""
        (await self._writer.reserve(self._step, SHARDS, NBYTES, ("|u1", (NBYTES,)))).commit(
            self._digest
        )

    async def in_place_hashed(self) -> None:
        """Reserves room and commits it without a hash, so that commit reads it all."""
        (await self._writer.reserve(self._step, SHARDS, NBYTES, ("|u1", (NBYTES,)))).commit()


async def seconds(work: Callable[[], Awaitable[None]]) -> float:
    """Awaits ``work`` and returns the seconds it took."""
    began_s = time.perf_counter()
    await work()
    return time.perf_counter() - began_s


async def measure(rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each part, round by round; two before only warm the pages."""
    seconds_of_part: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = LocalConfig(store_gib=0.5)
        async with LocalLauncher(config).site({}, Service("supervisor"), Path(folder)) as site:
            producer = Producer(site)
            for i in range(rounds + 2):
                for parts in (["memcpy", "hand_over", "verify"], ["in_place"], ["in_place_hashed"]):
                    await producer.begin()
                    for name in parts:
                        taken_s = await seconds(getattr(producer, name))
                        seconds_of_part.setdefault(name, []).extend([taken_s] if i > 1 else [])
                    if "verify" in parts:
                        producer.check()
            seconds_of_part["call"] = [await seconds(producer.call) for _ in range(CALLS)]
    return seconds_of_part


def median_ms(taken_s: Sequence[float]) -> float:
    """Returns the median in milliseconds."""
    return statistics.median(taken_s) * 1000


def gb_per_second(taken_s: Sequence[float]) -> float:
    """Returns the rate of the payload at the median."""
    return NBYTES / statistics.median(taken_s) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    add_options(parser)
    args = parser.parse_args()
    seconds_of_part = asyncio.run(measure(args.rounds))
    pairs = list(zip(seconds_of_part["memcpy"], seconds_of_part["hand_over"], strict=True))
    claims = [
        repeated("handover_over_memcpy_64MB", pairs, median_ratio, "ratio", 0.6),
        repeated("handover_ms", seconds_of_part["hand_over"], median_ms, "ms"),
        repeated("handover_gb_per_second", seconds_of_part["hand_over"], gb_per_second, "GB/s"),
        repeated("memcpy_gb_per_second", seconds_of_part["memcpy"], gb_per_second, "GB/s"),
        repeated("reader_verify_ms", seconds_of_part["verify"], median_ms, "ms"),
        repeated("in_place_notify_ms", seconds_of_part["in_place"], median_ms, "ms", 1.0, "<="),
        repeated("in_place_notify_hashed_ms", seconds_of_part["in_place_hashed"], median_ms, "ms"),
        repeated("rpc_small_call_ms_median", seconds_of_part["call"], median_ms, "ms", 0.7, "<="),
    ]
    return publish("handover", claims, args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
