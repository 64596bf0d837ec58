"""Measures policies that act over turns: what the calculator learns, and what a turn costs.

    python benchmarks/environments.py [--parts NAME ...] [--seeds 0 1 2] [--steps N]
        [--verifiers-python PATH] [--trl-python PATH] [--json]

Part ``learn``, runs of recipes/calculator.yaml:

calculator_success_after_min
                        share of held-out problems that are solved greedily after the run, of the
                        worst seed
calculator_sampled_success_after_min
                        the same of answers that are sampled at temperature 1
calculator_success_before
                        the first before the run, mean over seeds
calculator_seconds      seconds of the whole run, from the start of its first process to the end of
                        its last, its model made before; median over seeds
logprob_gap_max         largest difference of a log-prob between generator and trainer over all
                        turns of the runs, in nats
controller_bytes_per_episode
                        encoded bytes that all controllers sent and received in a step, over its
                        episodes; median over steps. A step with an evaluation has more of them,
                        since evaluated episodes are not counted

Part ``asynchronous``:

async_calculator_success_after_min
                        as calculator_sampled_success_after_min, of recipes/calculator_async.yaml

Part ``long``:

logprob_gap_30_turns_max
                        as logprob_gap_max, of episodes of 30 turns that the calculator's model
                        samples until each turn is cut, in two steps of training

Part ``turns``:

turn_overhead_cpu_ms    processor milliseconds that the generator's process spends on a turn besides
                        the engine: a scripted engine answers at once, and each episode has 30 turns
                        with an environment in a process of its own; median of rounds
endpoint_turn_cpu_ms    the same with a program that asks over HTTP and posts all that was said each
                        time, on one connection an episode

Part ``selfplay`` (selfplay.py): whether recipes/noughts.yaml beats the model that it began as.

Part ``read_again`` (environments_read_again.py):

prompt_tokens_read_again_share
                        share of the tokens of later turns' prompts that had been read or sampled
                        before, and that the torch generator reads nevertheless

Part ``rivals`` (episode_rivals.py):

turns_per_cpu_second_over_verifiers
                        how many times as many turns a processor second of all processes gives as
                        with verifiers 0.4, its train client and its renderer
turns_per_cpu_second_over_trl
                        the same against TRL 1.16's loop of environments
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import quickstart_runs as runs
from environments_read_again import read_again
from episode_rivals import add_rival_options, rivals
from report import Claim, add_options, publish, repeated
from scripted_episodes import ScriptedEpisodes
from selfplay import selfplay

from gcore_core.config.plan import load_plan
from gcore_core.contract.factories import import_file

RECIPES = Path(__file__).parents[1] / "recipes"
RECIPE = RECIPES / "calculator.yaml"
ASYNCHRONOUS = RECIPES / "calculator_async.yaml"
TURNS = 30
#: Tokens of an episode of 30 turns, at most.
CONTEXT = 1024
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
    ran = [_run(RECIPE, seed, args.steps, folder) for seed in args.seeds]
    first, last = ([rows[place]["evaluation"] for rows, _ in ran] for place in (0, -1))
    steps = [[row["metrics"] for row in rows[1:]] for rows, _ in ran]
    return [
        Claim(
            "calculator_success_after_min", min(one["greedy/right"] for one in last), "share", 0.9
        ),
        Claim(
            "calculator_sampled_success_after_min",
            min(one["sampled/right"] for one in last),
            "share",
            0.9,
        ),
        Claim(
            "calculator_success_before",
            statistics.fmean(one["greedy/right"] for one in first),
            "share",
        ),
        repeated("calculator_seconds", [s for _, s in ran], statistics.median, "s", 60.0, "<="),
        Claim("logprob_gap_max", max(_gap(metrics) for metrics in steps), "nats", 1e-3, "<="),
        Claim(
            "controller_bytes_per_episode",
            statistics.median(
                one["controller/bytes_per_record"] for metrics in steps for one in metrics[1:]
            ),
            "bytes",
            1024,
            "<=",
        ),
    ]


def learned_ahead(args: argparse.Namespace, folder: Path) -> list[Claim]:
    """Returns what the calculator's asynchronous runs say."""
    ran = [_run(ASYNCHRONOUS, seed, args.steps, folder) for seed in args.seeds]
    after = min(rows[-1]["evaluation"]["sampled/right"] for rows, _ in ran)
    return [Claim("async_calculator_success_after_min", after, "share", 0.85)]


def long_episodes(args: argparse.Namespace, folder: Path) -> list[Claim]:
    """Returns how far generator and trainer are apart over long episodes."""
    (folder / "counting.py").write_text(COUNTING)
    gaps = []
    for seed in args.seeds:
        rows, _ = _run(
            RECIPE,
            seed,
            2,
            folder,
            f"roles.policy.model={{path: {_with_long_context(seed, folder)}}}",
            f"roles.rollout.config.max_new_tokens={CONTEXT - 64}",
            f"environment.config.environment={folder / 'counting.py'}:Counting",
            f"environment.config.config={{turns: {TURNS}}}",
            f"environment.config.turns={TURNS}",
            "controller.config={prompts: 4, minibatches: 1, epochs: 1}",
            "evaluation.every=1000",
            "rewards={turns: {use: environments, config: {name: turns}}}",
        )
        gaps.append(_gap([row["metrics"] for row in rows[1:]]))
    return [Claim("logprob_gap_30_turns_max", max(gaps), "nats", 1e-4, "<=")]


def _run(
    recipe: Path, seed: int, steps: int, folder: Path, *overrides: str
) -> tuple[list[dict[str, Any]], float]:
    """Runs a recipe, its model made before; returns the metrics of its steps, and seconds.

    steps: 0 for the recipe's own.
    """
    name = f"{recipe.stem}-{seed}{'-changed' if overrides else ''}"
    words = [*runs.overrides_of(seed, folder / name)]
    if overrides:
        words = [word for word in words if ".make." not in word] + list(overrides)
    if steps:
        words.append(f"run.steps={steps}")
    plan = load_plan(recipe, words)
    if not overrides:
        runs.make_policy(plan.config, folder)
    command = ["run", str(recipe), *words]
    log = folder / f"{name}.log"
    began_s = time.perf_counter()
    runs.require_success(runs.start(command, folder, log), command, log)
    seconds = time.perf_counter() - began_s
    print(f"{name}: {seconds:.1f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return runs.finished_rows(folder / name, plan.at("run.steps")), seconds


def _gap(metrics: Sequence[dict[str, float]]) -> float:
    """Returns the largest difference of a log-prob between generator and trainer."""
    return max(one["logprob_gap_max"] for one in metrics)


def _with_long_context(seed: int, folder: Path) -> Path:
    """Returns a copy of the calculator's model that takes long texts."""
    plan = load_plan(RECIPE, runs.overrides_of(seed, folder / "none"))
    copy = folder / f"long-{seed}"
    shutil.copytree(runs.make_policy(plan.config, folder), copy)
    for file, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        settings = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps(settings | {key: CONTEXT}))
    return copy


def overhead(args: argparse.Namespace, folder: Path) -> list[Claim]:
    """Returns what a turn costs besides the engine, through both doors."""
    doors = {
        "turn_overhead_cpu_ms": (0.3, "Counting", COUNTING),
        "endpoint_turn_cpu_ms": (1.0, "Posting", POSTING),
    }
    return [
        repeated(
            name,
            [_turn_ms(args.episodes, folder, *door) for _ in range(args.rounds)],
            statistics.median,
            "ms",
            most,
            "<=",
        )
        for name, (most, *door) in doors.items()
    ]


def _turn_ms(episodes: int, folder: Path, name: str, source: str) -> float:
    """Plays episodes with an engine that answers at once; returns processor ms a turn."""
    file = folder / f"{name.lower()}.py"
    file.write_text(source)
    with contextlib.closing(
        ScriptedEpisodes(
            f"{file}:{name}",
            _tokenizer(),
            lambda text: "25",
            turns=TURNS,
            prompt="1+1=",
            config={"turns": TURNS},
        )
    ) as scripted:
        seconds, _ = scripted.play(episodes)
    return 1e3 * seconds / (episodes * TURNS)


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    arithmetic = import_file(RECIPES / "quickstart" / "arithmetic.py")
    return PreTrainedTokenizerFast(
        tokenizer_object=arithmetic._tokenizer(),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


#: Name -> what measures it.
PARTS: dict[str, Callable[[argparse.Namespace, Path], list[Claim]]] = {
    "learn": learned,
    "asynchronous": learned_ahead,
    "long": long_episodes,
    "turns": overhead,
    "read_again": lambda args, folder: read_again(folder),
    "rivals": rivals,
    "selfplay": selfplay,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="of a run; 0: the recipe's own")
    parser.add_argument("--episodes", type=int, default=16, help="at a time, of a turn's cost")
    parser.add_argument("--rounds", type=int, default=5, help="of what a turn costs")
    add_rival_options(parser)
    add_options(parser)
    args = parser.parse_args()
    claims = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        for part in args.parts:
            claims += PARTS[part](args, Path(folder))
    packages = ("gcore-core", "gcore-environments", "torch", "transformers")
    return publish("environments", claims, args, packages)


if __name__ == "__main__":
    sys.exit(main())
