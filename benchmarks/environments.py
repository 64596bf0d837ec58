"""Measures policies that act over turns: what the calculator learns, and what a turn costs.

    python benchmarks/environments.py [--seeds 0 1 2] [--steps N] [--episodes 16] [--json]

calculator_success_after_min
                        share of held-out problems that are solved greedily after the run of
                        recipes/calculator.yaml, of the worst seed
calculator_success_before
                        the same before the run, mean over seeds
calculator_seconds      seconds of the whole run, from the start of its first process to the end of
                        its last, its model made before; median over seeds
logprob_gap_max         largest difference of a log-prob between generator and trainer over all
                        turns of the runs, in nats
turn_overhead_cpu_ms    processor milliseconds that the generator's process spends on a turn besides
                        the engine: a scripted engine answers at once, and each episode has 30 turns
                        with an environment in a process of its own; median of rounds
endpoint_turn_cpu_ms    the same with a program that asks over HTTP and posts all that was said each
                        time, on one connection an episode
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import quickstart_runs as runs
from report import Claim, add_options, publish, repeated

from gcore_core.config.plan import load_plan
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import import_file
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt

RECIPE = Path(__file__).parents[1] / "recipes/calculator.yaml"
TURNS = 30
ROUNDS = 5
#: An environment that asks again and again.
COUNTING = """
from gcore_environments import Observation


class Counting:
    def __init__(self, turns):
        self.left = turns

    async def reset(self, row, seed):
        return Observation(messages=[{"role": "user", "content": row["prompt"]}])

    async def step(self, reply):
        self.left -= 1
        if not self.left:
            return Observation(rewards={"turns": 1.0}, done=True)
        return Observation(messages=[{"role": "user", "content": "+1="}], rewards={"turns": 1.0})

    async def close(self):
        pass
"""

#: A program that does the same over HTTP. It blocks, so each has a thread.
POSTING = """
import asyncio
import http.client
import json


class Posting:
    def __init__(self, turns):
        self.turns = turns

    async def run(self, row, seed, endpoint):
        return await asyncio.to_thread(self.play, row, endpoint)

    def play(self, row, endpoint):
        connection = http.client.HTTPConnection(endpoint.base_url.split("/")[2])
        messages = [{"role": "user", "content": row["prompt"]}]
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        for _ in range(self.turns):
            body = json.dumps({"model": endpoint.model, "messages": messages})
            connection.request("POST", "/v1/chat/completions", body, headers)
            answer = json.loads(connection.getresponse().read())
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": "+1="})
        connection.close()
        return {"turns": float(self.turns)}
"""


def learned(args: argparse.Namespace, folder: Path) -> list[Claim]:
    """Returns what the calculator's runs say."""
    after, before, seconds, gaps = [], [], [], []
    for seed in args.seeds:
        directory = folder / f"run-{seed}"
        overrides = runs.overrides_of(seed, directory)
        if args.steps:
            overrides.append(f"run.steps={args.steps}")
        plan = load_plan(RECIPE, overrides)
        runs.make_policy(plan.config, folder)
        words = ["run", str(RECIPE), *overrides]
        log = folder / f"run-{seed}.log"
        began_s = time.perf_counter()
        runs.require_success(runs.start(words, folder, log), words, log)
        seconds.append(time.perf_counter() - began_s)
        rows = runs.finished_rows(directory, plan.at("run.steps"))
        before.append(rows[0]["evaluation"]["greedy/right"])
        after.append(rows[-1]["evaluation"]["greedy/right"])
        gaps.append(max(row["metrics"]["logprob_gap_max"] for row in rows[1:]))
        print(
            f"seed {seed}: {before[-1]:.3f} -> {after[-1]:.3f} in {seconds[-1]:.1f} s, "
            f"load {os.getloadavg()[0]:.1f}",
            file=sys.stderr,
        )
    return [
        Claim("calculator_success_after_min", min(after), "share", 0.9),
        Claim("calculator_success_before", statistics.fmean(before), "share"),
        repeated("calculator_seconds", seconds, statistics.median, "s"),
        Claim("logprob_gap_max", max(gaps), "nats", 1e-3, "<="),
    ]


def overhead(args: argparse.Namespace, folder: Path) -> list[Claim]:
    """Returns what a turn costs besides the engine, through both doors."""
    doors = {
        "turn_overhead_cpu_ms": (0.3, "Counting", COUNTING),
        "endpoint_turn_cpu_ms": (1.0, "Posting", POSTING),
    }
    return [
        repeated(
            name,
            [_round(args.episodes, folder, *door) for _ in range(ROUNDS)],
            statistics.median,
            "ms",
            most,
            "<=",
        )
        for name, (most, *door) in doors.items()
    ]


def _round(episodes: int, folder: Path, name: str, source: str) -> float:
    """Plays episodes with an engine that answers at once; returns processor ms a turn."""
    from gcore_environments.draws import EpisodeDraws
    from gcore_environments.scripted import ScriptedEngine
    from gcore_environments.settings import EnvironmentConfig

    file = folder / f"{name.lower()}.py"
    file.write_text(source)
    config = EnvironmentConfig(
        environment=f"{file}:{name}", config={"turns": TURNS}, turns=TURNS, turn_s=60.0
    )
    engine = ScriptedEngine(_tokenizer(), lambda text: "25")
    draws = EpisodeDraws(config, WorkerContext(role="rollout"), engine)
    try:
        _play(draws, 1)  # until the environment's imports are over
        engine_s = 0.0
        step = engine.step

        def timed() -> Any:
            nonlocal engine_s
            began_s = time.thread_time()  # the endpoint has threads of its own
            finished = step()
            engine_s += time.thread_time() - began_s
            return finished

        engine.step = timed  # type: ignore[method-assign]
        began_s = time.process_time()
        _play(draws, episodes)
        cpu_s = time.process_time() - began_s - engine_s
    finally:
        draws.close()
    return 1e3 * cpu_s / (episodes * TURNS)


def _play(draws: Any, episodes: int) -> None:
    draws.submit(
        [
            SampleRequest(ordinal=number, sample=0, seed=number, prompt=Prompt(row=0, text="1+1="))
            for number in range(episodes)
        ]
    )
    ended = 0
    while ended < episodes:
        for record in draws.step():
            ended += 1
            if record.status != "finished":
                sys.exit(f"an episode has {record.status}: {record.reason}")


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    arithmetic = import_file(RECIPE.parent / "quickstart" / "arithmetic.py")
    return PreTrainedTokenizerFast(
        tokenizer_object=arithmetic._tokenizer(),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="of a run; 0: the recipe's own")
    parser.add_argument("--episodes", type=int, default=16, help="at a time, of a turn's cost")
    add_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as room:
        claims = overhead(args, Path(room))
        if args.seeds:
            claims = [*learned(args, Path(room)), *claims]
    packages = ("gcore-core", "gcore-environments", "torch", "transformers")
    return publish("environments", claims, args, packages)


if __name__ == "__main__":
    sys.exit(main())
