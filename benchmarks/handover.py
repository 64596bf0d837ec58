"""Measures handing 64 MB over: by one copy into a recycled slab, in place, and a small call.

    python benchmarks/handover.py [--json] [--check] [--rounds 31]

The node agent is a process of its own, reached over a unix socket; this process is a producer and
then a reader.

handover_over_memcpy_64MB: ``numpy.copyto`` between two warm buffers over ``StoreWriter.put`` of one
    array of the same size: asking the agent for a slab (one that was freed before, so its pages are
    warm), the table of columns, the copy, its hash, the signature. Every round does both, one after
    the other, with other bytes each time; medians.

What the reader does is apart, since it runs in another process and at another time: opening the
reference, which checks the MAC and the stamp in front of the content (reader_verify_ms); nothing is
copied. Each round compares all bytes.

in_place_notify_ms: asking for room and committing it, for a producer that writes into shared memory
itself and hashes what it makes while it has it at hand; no byte of the payload is touched.
in_place_notify_hashed_ms: the same for one that does not, so that commit reads all of it once more.

rpc_small_call_ms_median: one call after the other to the agent's process, a few bytes each way.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import xxhash
from report import Claim, add_options, publish

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
        self._writer = StoreWriter(site.store, AGENT, site.secret, site.agent, OWNER)
        self._reader = StoreReader(site.store, AGENT, site.secret)
        self._payload, self._other = (np.full(NBYTES, value, np.uint8) for value in (1, 2))
        self._digest = 0
        self._step = 0

    async def begin(self) -> None:
        self._step += 1
        self._payload += np.uint8(1)
        self._digest = xxhash.xxh3_64_intdigest(self._payload.data)
        self._writer.release({0: (0, self._step)})
        await self.call(self._step)

    async def call(self, step: int = 0) -> None:
        await self._site.agent.call(RELEASE, ReleaseRequest(OWNER, {0: (0, step)}))

    async def memcpy(self) -> None:
        np.copyto(self._other, self._payload)

    async def hand_over(self) -> None:
        self._ref = await self._writer.put(self._step, SHARDS, [{"x": self._payload}])

    async def verify(self) -> None:
        self._found = self._reader.open(self._ref)[0]["x"]

    def check(self) -> None:
        if self._found.tobytes() != self._payload.tobytes():
            raise SystemExit("the reader has other bytes than the producer")
        del self._found

    async def in_place(self) -> None:
        (await self._writer.reserve(self._step, SHARDS, NBYTES, ("|u1", (NBYTES,)))).commit(
            self._digest
        )

    async def in_place_hashed(self) -> None:
        (await self._writer.reserve(self._step, SHARDS, NBYTES, ("|u1", (NBYTES,)))).commit()


async def seconds(work: Callable[[], Awaitable[None]]) -> float:
    began_s = time.perf_counter()
    await work()
    return time.perf_counter() - began_s


async def measure(rounds: int) -> dict[str, float]:
    """Median seconds of each part; two rounds warm the pages."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = LocalConfig(store_gib=0.5)
        async with LocalLauncher(config).site([], Service("supervisor"), Path(folder)) as site:
            producer = Producer(site)
            for i in range(rounds + 2):
                for parts in (["memcpy", "hand_over", "verify"], ["in_place"], ["in_place_hashed"]):
                    await producer.begin()
                    for name in parts:
                        taken_s = await seconds(getattr(producer, name))
                        found.setdefault(name, []).extend([taken_s] if i > 1 else [])
                    if "verify" in parts:
                        producer.check()
            found["call"] = [await seconds(producer.call) for _ in range(CALLS)]
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    add_options(parser)
    args = parser.parse_args()
    found = asyncio.run(measure(args.rounds))
    claims = [
        Claim("handover_over_memcpy_64MB", found["memcpy"] / found["hand_over"], "ratio", 0.6),
        Claim("handover_ms", found["hand_over"] * 1000, "ms"),
        Claim("handover_gb_per_second", NBYTES / found["hand_over"] / 1e9, "GB/s"),
        Claim("memcpy_gb_per_second", NBYTES / found["memcpy"] / 1e9, "GB/s"),
        Claim("reader_verify_ms", found["verify"] * 1000, "ms"),
        Claim("in_place_notify_ms", found["in_place"] * 1000, "ms", 1.0, "<="),
        Claim("in_place_notify_hashed_ms", found["in_place_hashed"] * 1000, "ms"),
        Claim("rpc_small_call_ms_median", found["call"] * 1000, "ms", 0.7, "<="),
    ]
    return publish("handover", claims, args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
