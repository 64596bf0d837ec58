"""Measures a generator's tokens per second over those of the bare engine's own loop.

The difference is what the plugin, the worker's shell and RPC add.

    python benchmarks/engine_overhead.py [--engines torch vllm sglang] [--rounds 7] [--json]
    [--check]

Both sides sample the same prompts from the same random model, with log-probs of the sampled tokens,
one engine process with one thread each, turn by turn in one run; medians. Ours is a real worker
behind a unix socket, from the request to the last header. transformers' generate is the bare engine
of gcore-torch, whose own decoder it does not use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from engine_pairs import interpreter
from report import Claim, add_options, interval, median_ratio, publish

from gcore_core.contract.launching import Peer
from gcore_core.contract.records import Lease
from gcore_core.node.launchers import LocalLauncher
from gcore_core.run.jobs import worker_specs
from gcore_core.run.restart_supervisor import Start
from gcore_core.run.start import prepare
from gcore_core.runtime.messages import (
    FAILED,
    GENERATE,
    HELLO,
    SPAWN,
    TRAIN,
    GenerateRequest,
    Hello,
    Nothing,
    SpawnRequest,
)
from gcore_core.wire.service import Call, RemoteFailure, Service

#: engine -> (prompts, actions of each, bar of ours over bare)
SIZES = {"torch": (64, 64, 1.2), "vllm": (64, 64, 0.95), "sglang": (64, 64, 0.95)}
CLAIMS = {
    "torch": "torch_tokens_per_second_over_transformers",
    "vllm": "vllm_tokens_per_second_over_bare",
    "sglang": "sglang_tokens_per_second_over_bare",
}


def prompts(count: int) -> list[str]:
    """Returns ``count`` prompts of one length."""
    return [f"{i % 10}+{i * 7 % 10}+{i * 3 % 10}=" * 4 for i in range(count)]


class Bare:
    """The bare engine in a process of its own, asked line by line."""

    def __init__(self, engine: str, model: Path) -> None:
        count, actions, _ = SIZES[engine]
        python = sys.executable if engine == "torch" else interpreter(engine)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BARE_ENGINE": engine}
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("bare_engines.py")), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._ask(json.dumps({"model": str(model), "prompts": prompts(count), "actions": actions}))

    def _ask(self, line: str) -> dict[str, Any]:
        """Sends a line and returns the answer. Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the bare engine ended with {self._process.wait()}")
        return dict(json.loads(answer))

    def round(self) -> float:
        """Samples the batch once and returns the tokens per second."""
        answer = self._ask("go")
        return float(answer["tokens"] / answer["seconds"])

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()


@asynccontextmanager
async def worker(engine: str, model: Path, folder: Path) -> AsyncIterator[Peer]:
    """Yields a generator worker with the prompts as its data, alone at a site of its own."""
    count, actions, _ = SIZES[engine]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in prompts(count))
    )
    job_file = folder / "job.yaml"
    job_file.write_text(
        json.dumps(
            {
                "run": {"name": "overhead", "steps": 1, "dir": str(folder / "run")},
                "data": {"use": "core/jsonl", "config": {"path": str(folder / "rows.jsonl")}},
                "advantage": {"use": "algorithms/grpo", "config": {"group_size": 2}},
                "objective": {"use": "algorithms/ppo_clip"},
                "roles": {
                    "policy": {"use": "torch", "model": {"path": str(model)}},
                    "rollout": {
                        "use": engine,
                        "follows": "policy",
                        "config": {"max_new_tokens": actions}
                        | ({"kv_cache_gib": 0.5} if engine == "vllm" else {}),
                    }
                    | ({} if engine == "torch" else {"python": f"venv:{engine}"}),
                },
                "rewards": {
                    "length": {"use": "core/function", "config": {"path": __file__, "name": "zero"}}
                },
            }
        )
    )
    has_started = asyncio.Event()
    failures = []

    async def hello(request: Hello, call: Call) -> Nothing:
        has_started.set()
        return Nothing()

    async def failed(request: RemoteFailure, call: Call) -> Nothing:
        failures.append(request)
        has_started.set()
        return Nothing()

    service = Service("supervisor")
    service.add(HELLO, hello)
    service.add(FAILED, failed)
    with ExitStack() as until_end:
        job, _ = prepare(Start(file=job_file), lambda steps: _Silent(), until_end=until_end)
        async with LocalLauncher().site(job.where(), service, job.directory / "logs") as site:
            spec = next(spec for spec in worker_specs(job, site) if spec.name == "rollout.0")
            await site.home_node.agent.call(SPAWN, SpawnRequest([spec]))
            await has_started.wait()
            if failures:
                raise RuntimeError(f"{engine}: {failures[0]}")
            yield site.network.peer("rollout.0")


class _Silent:
    """A display that shows nothing."""

    def phase(self, *_: Any) -> None: ...

    def note(self, *_: Any) -> None: ...


def zero(record: Any) -> float:
    """Rewards every record with 0."""
    return 0.0


async def round_of(peer: Peer, engine: str, step: int) -> float:
    """Returns the tokens per second of one batch, from the request to the last header."""
    count, actions, _ = SIZES[engine]
    leases = [Lease(step * count + i, i, 0, (0,)) for i in range(count)]
    request = GenerateRequest(step, 0, 0, TRAIN, leases, least=0)
    tokens = 0
    records = 0
    began_s = time.perf_counter()
    async for headers in peer.stream(GENERATE, request, deadline_s=600.0):
        records += len(headers)
        tokens += sum(header.n_actions for header in headers)
    seconds = time.perf_counter() - began_s
    if records != count or tokens < count * actions * 0.8:
        raise RuntimeError(f"{engine}: {records} records, {tokens} tokens")
    return tokens / seconds


async def measure(engine: str, rounds: int, model: Path, folder: Path) -> list[tuple[float, float]]:
    """Returns the tokens per second (ours, bare) of each round but the first, which warms up."""
    bare = Bare(engine, model)
    try:
        async with worker(engine, model, folder) as peer:
            rates = [
                (await round_of(peer, engine, round_number), bare.round())
                for round_number in range(rounds + 1)
            ]
    finally:
        bare.close()
    return rates[1:]


def claims_of(engine: str, rates: list[tuple[float, float]]) -> list[Claim]:
    """Returns the claims of an engine from its rounds' tokens per second (ours, bare)."""
    claims = [
        Claim(
            CLAIMS[engine],
            median_ratio(rates),
            "ratio",
            SIZES[engine][2],
            interval=interval(rates, median_ratio),
        )
    ]
    for name, rates_of_one in zip(("", "_bare"), zip(*rates, strict=True), strict=True):
        claims.append(
            Claim(
                f"{engine}_tokens_per_second{name}",
                statistics.median(rates_of_one),
                "tokens/s, one thread",
                interval=interval(rates_of_one, statistics.median),
            )
        )
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(description="What the plugin and RPC add to a generator.")
    parser.add_argument("--engines", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    add_options(parser)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from gcore_language.tiny import save_untrained

    claims = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_untrained(model)
        for engine in args.engines:
            engine_folder = Path(folder) / engine
            engine_folder.mkdir()
            rates = asyncio.run(measure(engine, args.rounds, model, engine_folder))
            claims += claims_of(engine, rates)
    return publish(
        "engine_overhead", claims, args, ["gcore-core", "gcore-torch", "torch", "transformers"]
    )


if __name__ == "__main__":
    sys.exit(main())
