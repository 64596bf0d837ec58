"""Measures how light the core is: two commands against a bare Python, and a controller's memory.

The commands are ``g-core --help`` and ``g-core plugins list``.

    python benchmarks/startup.py [--json] [--check] [--rounds 15] [--runs 5]

Each round starts the three commands one after the other, so that a busy machine slows all of them;
the claims are ratios of medians. Memory is the peak resident set of a controller's process in a
short run of real processes; the median of some runs.
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

import gcore_testing.fake
from report import Claim, add_options, median_ratio, publish, repeated

BARE = [sys.executable, "-c", "import argparse, importlib.metadata"]
HELP = [sys.executable, "-m", "gcore_core", "--help"]
PLUGINS = [sys.executable, "-m", "gcore_core", "plugins", "list"]

JOB = f"""
run: {{name: startup, steps: 5}}
controller: {{shards: 2, config: {{prompts: 8}}}}
data: {{use: fake}}
advantage: {{use: fake}}
objective: {{use: fake}}
roles: {{policy: {{use: fake}}, rollout: {{use: fake}}}}
rewards: {{letters: {{use: fake}}}}
local: [{gcore_testing.fake.__file__}]
"""


def seconds(command: list[str]) -> float:
    """Runs a command and returns the seconds it took."""
    began_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began_s


def measure(rounds: int) -> list[tuple[float, ...]]:
    """Returns the seconds of each command, round by round, after one that warms the cache."""
    commands = (BARE, HELP, PLUGINS)
    return [tuple(seconds(command) for command in commands) for _ in range(rounds + 1)][1:]


def ratio(name: str, rounds: list[tuple[float, ...]], column: int, bar: float) -> Claim:
    """Returns the claim of a command's median seconds over those of bare Python."""
    pairs = [(seconds_of[column], seconds_of[0]) for seconds_of in rounds]
    return repeated(name, pairs, median_ratio, "ratio", bar, "<=")


def milliseconds(name: str, rounds: list[tuple[float, ...]], column: int) -> Claim:
    """Returns the claim of a command's median milliseconds."""
    values = [seconds_of[column] * 1000 for seconds_of in rounds]
    return repeated(name, values, statistics.median, "ms")


def controller_memory_mib() -> float:
    """Returns the peak resident MiB of the larger of two controllers, after five steps."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        directory = Path(folder) / "run"
        job.write_text(JOB)
        command = [sys.executable, "-m", "gcore_core", "run", str(job), f"run.dir={directory}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    return max(last[f"memory_mib/controller.{shard}"] for shard in range(2))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=int, default=5, help="in which memory is measured")
    add_options(parser)
    args = parser.parse_args()
    rounds = measure(args.rounds)
    memory_mib = [controller_memory_mib() for _ in range(args.runs)]
    claims = [
        ratio("help_over_bare_python", rounds, 1, 1.5),
        ratio("plugins_list_over_bare_python", rounds, 2, 2.0),
        repeated(
            "controller_memory_mib", memory_mib, statistics.median, "MiB, peak resident", 80, "<="
        ),
        milliseconds("bare_python_ms", rounds, 0),
        milliseconds("help_ms", rounds, 1),
        milliseconds("plugins_list_ms", rounds, 2),
    ]
    return publish(
        "startup", claims, args, ["gcore-core", "msgspec", "numpy", "omegaconf", "pluggy"]
    )


if __name__ == "__main__":
    sys.exit(main())
