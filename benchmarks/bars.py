"""Runs every benchmark that holds a bar, each in a quick size, and says which bars are missed.

    python benchmarks/bars.py [NAME ...] [--json] [--list] [--keep FOLDER]

`tox run -e bars` runs it: 45 minutes on two quiet cores. Times are measured, so nothing else should
run; each benchmark is alone. Nothing that it measures is committed. The exit code is 1 when a
benchmark fails, takes twice its minutes, or misses a bar that is not known to be missed (``KNOWN``,
``TOO_SMALL``). A bar that is known to be missed, and is held, is told: its line can go.

engine_pairs makes the engines' venvs, and quickstart TRL's, where they are not there yet; this is
not in their minutes. machines needs root, iproute2 and util-linux. real_model makes its model once.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures
from report import HOLDS

ENGINES = "{python} tests/engines/suites.py --create --engines vllm sglang megatron deepspeed"
TRL = "{python} -m tox run -e bench-trl --notest"
#: The minutes of all bars together, on two quiet cores.
BUDGET_MIN = 45.0


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A benchmark that holds bars, in a quick size.

    name: of the script.
    words: what makes it quick.
    minutes: what it takes on two quiet cores.
    before: a command that makes what it needs; what it makes is kept.
    """

    name: str
    words: str = ""
    minutes: float
    before: str = ""

    def command(self, out: Path) -> list[str]:
        """Returns the words of the command that measures, and writes the result to a file."""
        return [
            sys.executable,
            f"benchmarks/{self.name}.py",
            *self.words.split(),
            "--out",
            str(out),
        ]


BARS = (
    Bar(name="house", words="--parts style types kernel ideas", minutes=1),
    Bar(name="startup", minutes=1),
    Bar(name="rewards", minutes=1.5),
    Bar(name="weight_push", minutes=1),
    Bar(name="protocol_sim", words="--seeds 0:2000", minutes=5),
    Bar(name="protocol_async", words="--seeds 0:2000", minutes=4),
    Bar(name="placement_sim", words="--seeds 100:102 --devices 512 --second=", minutes=3),
    Bar(name="asynchronous_emulated", words="--seeds 0", minutes=6),
    Bar(
        name="controllers",
        words="--parts payloads sizes numbers skew --controllers 1 16 --rounds 1",
        minutes=3,
    ),
    Bar(name="back_to_work", words="--faults 2 --kills 2", minutes=3.5),
    Bar(name="machines", words="--parts start calls push quickstart faults", minutes=5),
    Bar(
        name="engine_pairs",
        words="--pairs vllm:megatron-tp2 sglang:deepspeed-zero3",
        minutes=2,
        before=ENGINES,
    ),
    Bar(
        name="quickstart",
        words="--parts quickstart --seeds 0:1",
        minutes=3,
        before=TRL,
    ),
    Bar(
        name="real_model",
        words="--parts sft decode --rounds 1 --steps 1",
        minutes=5,
        before=TRL,
    ),
)
#: Bars that release 0.3 misses, by what pages quote them as.
KNOWN = frozenset(
    {
        "controllers.controller_us_per_record_c16_over_c1",
        "house.modules_touched_by_canaries",
        "house.modules_touched_by_leaving",
        "house.modules_touched_by_lent",
        "house.modules_touched_by_unfinished_samples",
        "house.nodes_per_line",
        "quickstart.samples_per_cpu_second_over_trl",
        "weight_push.gb_per_second_over_memcpy_100mb",
    }
)
#: Bars on how much is measured, for which a quick size is too small.
TOO_SMALL = frozenset(
    {"protocol_sim.seeds", "protocol_sim.pairs_share", "protocol_async.async_seeds"}
)


@dataclass
class Outcome:
    """What came of a bar.

    minutes: what it took.
    held, missed: the bars that hold, and those that do not.
    loose: claims that have neither a bar nor a place in a page.
    failure: why nothing was measured; "": it was.
    """

    minutes: float = 0.0
    held: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def passes(self) -> bool:
        """Whether it was measured and misses nothing but what is known."""
        return not self.failure and not set(self.missed) - KNOWN - TOO_SMALL

    def line(self, bar: Bar) -> str:
        """Returns the outcome in words."""
        verdict = "passed" if self.passes else "FAILED"
        words = [f"{bar.name}: {verdict}, {self.minutes:.1f} of {bar.minutes:g} min"]
        if self.failure:
            words.append(self.failure)
        for name in self.missed:
            if name in KNOWN:
                words.append(f"{name} is missed, as is known")
            elif name not in TOO_SMALL:
                words.append(f"{name} is MISSED")
        words += [f"{name} is held, and is in KNOWN" for name in self.held if name in KNOWN]
        return "; ".join(words)


def judge(result: dict[str, Any]) -> Outcome:
    """Returns which bars of a result are held."""
    outcome = Outcome()
    for claim in result["claims"]:
        name = figures.claim_name(result["benchmark"], claim["name"])
        if claim["bar"] is None:
            if name not in figures.quoted():
                outcome.loose.append(name)
        elif HOLDS[claim["op"]](claim["value"], claim["bar"]):
            outcome.held.append(name)
        else:
            outcome.missed.append(name)
    return outcome


def run(bar: Bar, folder: Path) -> Outcome:
    """Runs a benchmark and returns its outcome; its result stays in the folder."""
    out = folder / f"{bar.name}.json"
    out.unlink(missing_ok=True)
    before = [word.format(python=sys.executable) for word in shlex.split(bar.before)]
    if before and subprocess.run(before, cwd=figures.ROOT, check=False).returncode:
        return Outcome(failure=f"failed: {shlex.join(before)}")
    command = bar.command(out)
    print(f"== {shlex.join(command)}", file=sys.stderr, flush=True)
    began_s = time.monotonic()
    failure = ""
    try:
        done = subprocess.run(
            command, cwd=figures.ROOT, check=False, timeout=2 * 60 * bar.minutes, stdout=2
        )
        failure = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = "took twice its minutes"
    outcome = Outcome() if failure else judge(json.loads(out.read_text()))
    outcome.failure = failure
    outcome.minutes = (time.monotonic() - began_s) / 60
    return outcome


def as_json(outcomes: Sequence[tuple[Bar, Outcome]]) -> str:
    """Returns all outcomes as one JSON object."""
    told = {
        "minutes": sum(outcome.minutes for _, outcome in outcomes),
        "claims_without_bar_or_place": sum(len(outcome.loose) for _, outcome in outcomes),
        "bars": {
            bar.name: {"passes": outcome.passes, **vars(outcome)} for bar, outcome in outcomes
        },
    }
    return json.dumps(told, indent=2)


def main() -> int:
    names = [bar.name for bar in BARS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="print the commands; run nothing")
    parser.add_argument("--keep", type=Path, help="a folder in which the results stay")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(names)):
        parser.error(f"no bar {unknown[0]!r}; there are {', '.join(names)}")
    chosen = [bar for bar in BARS if not args.names or bar.name in args.names]
    if args.list:
        for bar in chosen:
            print(f"{bar.name}: {bar.minutes:g} min: benchmarks/{bar.name}.py {bar.words}".rstrip())
        print(f"{sum(bar.minutes for bar in chosen):g} min together")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = []
        for bar in chosen:
            outcomes.append((bar, run(bar, folder)))
            print(outcomes[-1][1].line(bar), file=sys.stderr, flush=True)
    if args.json:
        print(as_json(outcomes))
    else:
        print("\n".join(["==", *(outcome.line(bar) for bar, outcome in outcomes)]))
    return int(not all(outcome.passes for _, outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
