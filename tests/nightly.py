"""What runs every night: what takes too long for each change.

    python tests/nightly.py [PART ...] [--fresh] [--list] [--state FILE]

`tox run -e nightly` runs it: learning of every recipe over three seeds, kills, resuming with other
layouts, all nine pairs of trainer and generator, ten minutes of fuzz. A part that is over is
written to a state file, with the commit that it ran at. A second call at the same commit goes on
with what has not passed; ``--fresh`` runs everything. A part that fails, or takes twice its budget,
does not end the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where it is run as a script

from tests.stages import PATIENCE, minutes, run_command  # noqa: E402

STATE = ROOT / ".cache" / "nightly.json"
RECIPES = ("quickstart", "judge", "digits")
SEEDS = (0, 1, 2)
FAULTS = (
    "tests/integration/test_faults.py::"
    "test_random_kills_and_stops_do_not_change_the_result_of_a_run"
)
STOPS = "tests/integration/test_resume.py::test_a_run_stopped_repeatedly_gives_the_same_weights"
PAIRS = (
    "torch:torch",
    "torch:deepspeed-zero3",
    "vllm:torch",
    "vllm:deepspeed-zero3",
    "sglang:torch",
    "sglang:deepspeed-zero3",
    "torch:megatron-dp2",
    "vllm:megatron-tp2",
    "sglang:megatron-pp2",
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command, and the minutes that it takes on two quiet cores.

    ``{python}`` in the command is this interpreter.
    """

    name: str
    budget_min: float
    command: str

    def words(self) -> list[str]:
        """Returns the command as its program and arguments."""
        return [word.format(python=sys.executable) for word in shlex.split(self.command)]


PARTS = (
    *(
        Part(
            name=f"learns-{recipe}-{seed}",
            budget_min=5,
            command=f"{{python}} tests/learning.py {recipe} --seed {seed}",
        )
        for recipe in RECIPES
        for seed in SEEDS
    ),
    Part(
        name="kills-fakes",
        budget_min=10,
        command=f"{{python}} -m pytest -q '{FAULTS}[30 of fakes]'",
    ),
    Part(
        name="kills-quickstart",
        budget_min=15,
        command=f"{{python}} -m pytest -q '{FAULTS}[30 of the quickstart]'",
    ),
    Part(name="stops", budget_min=10, command=f"{{python}} -m pytest -q {STOPS}"),
    Part(
        name="engines",
        budget_min=15,
        command="{python} tests/engines/suites.py --create",
    ),
    Part(
        name="elastic",
        budget_min=10,
        command="{python} -m pytest -q tests/integration/test_elastic.py",
    ),
    *(
        Part(
            name=f"elastic-{engine}",
            budget_min=60,
            command=f"{{python}} tests/engines/suites.py --engines {engine} --slow"
            " --select elastic",
        )
        for engine in ("megatron", "deepspeed")
    ),
    *(
        Part(
            name=f"pair-{pair.replace(':', '-')}",
            budget_min=3,
            command=f"{{python}} benchmarks/engine_pairs.py --check --pairs {pair}",
        )
        for pair in PAIRS
    ),
    Part(
        name="fuzz",
        budget_min=12,
        command="env FUZZ_SECONDS=600 {python} -m pytest -q tests/fuzz",
    ),
)


def read_state(path: Path, commit: str) -> dict[str, Any]:
    """Returns what is known of parts at a commit: name -> "outcome" and "seconds"."""
    if not path.exists():
        return {}
    state = json.loads(path.read_text())
    return dict(state["parts"]) if state["commit"] == commit else {}


def write_state(path: Path, commit: str, parts: Mapping[str, Any]) -> None:
    """Writes what is known of parts, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps({"commit": commit, "parts": parts}, indent=2) + "\n")
    os.replace(beside, path)


def run_part(part: Part) -> str:
    """Runs a part and returns its outcome: "passed", or what went wrong."""
    print(f"== {part.name}: {part.command}", flush=True)
    limit_s = part.budget_min * 60 * PATIENCE
    try:
        code = run_command(part.words(), limit_s)
    except subprocess.TimeoutExpired:
        return f"took {PATIENCE} times its budget of {minutes(part.budget_min * 60)}"
    return "passed" if code == 0 else f"exit code {code}"


def run_parts(parts: Sequence[Part], path: Path, commit: str, *, fresh: bool) -> int:
    """Runs the parts that have not passed at this commit; returns 1 when one of all fails.

    path: of the state file; it is written after each part.
    """
    state = read_state(path, commit)
    for part in parts:
        if not fresh and state.get(part.name, {}).get("outcome") == "passed":
            continue
        began_s = time.time()
        outcome = run_part(part)
        seconds = round(time.time() - began_s)
        state[part.name] = {"outcome": outcome, "seconds": seconds}
        write_state(path, commit, state)
    print("==", flush=True)
    for part in parts:
        print(line_of(part, state), flush=True)
    return int(any(state[part.name]["outcome"] != "passed" for part in parts))


def line_of(part: Part, state: Mapping[str, Any]) -> str:
    """Returns what is known of a part, in one line."""
    budget = minutes(part.budget_min * 60)
    if part.name not in state:
        return f"{part.name}: not run, budget {budget}"
    known = state[part.name]
    return f"{part.name}: {known['outcome']}, {minutes(known['seconds'])} of {budget}"


def head_commit() -> str:
    """Returns the commit that is checked out, with a mark where files differ from it."""
    words = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="What runs every night, part by part.")
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--fresh", action="store_true", help="run what has passed, too")
    parser.add_argument("--list", action="store_true", help="print the parts; run nothing")
    parser.add_argument("--state", type=Path, default=STATE)
    args = parser.parse_args()
    names = [part.name for part in PARTS]
    for name in args.parts:
        if name not in names:
            parser.error(f"no part {name!r}; there are {', '.join(names)}")
    chosen = [part for part in PARTS if not args.parts or part.name in args.parts]
    commit = head_commit()
    if args.list:
        state = read_state(args.state, commit)
        print("\n".join(line_of(part, state) for part in chosen))
        return 0
    return run_parts(chosen, args.state, commit, fresh=args.fresh)


if __name__ == "__main__":
    sys.exit(main())
