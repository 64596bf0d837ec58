"""Prints the results of benchmarks: claims, their bars, the machine and the versions.

A claim is a number that has a bar, or that a page quotes (figures.py). What else a script has
measured is printed behind the claims, as details.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import operator
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from figures import claim_name, quoted

HOLDS = {">=": operator.ge, "<=": operator.le}
#: How often repetitions are drawn anew for an interval.
DRAWS = 2000

Round = TypeVar("Round")


@dataclass(frozen=True)
class Claim:
    """One measured number.

    name: its name in results and docs.
    value: the number.
    unit: its unit.
    bar: the value that it is held to; None: it cannot be missed, and is a detail unless a page
        quotes it.
    op: on which side of the bar it must lie, a key of HOLDS.
    interval: where 95% of bootstrap draws of the repetitions lie; None: it was measured once.
    """

    name: str
    value: float
    unit: str
    bar: float | None = None
    op: str = ">="
    interval: tuple[float, float] | None = None

    @property
    def missed(self) -> bool:
        """Whether the claim has a bar and does not hold it."""
        return self.bar is not None and not HOLDS[self.op](self.value, self.bar)

    def as_json(self) -> dict[str, Any]:
        """Returns the claim as a result holds it: without an interval where there is none."""
        fields = asdict(self)
        if self.interval is None:
            del fields["interval"]
        return fields


def interval(
    rounds: Sequence[Round],
    statistic: Callable[[Sequence[Round]], float],
    *,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Returns the 95% bootstrap interval of a statistic over repetitions.

    None where there are fewer than three, which say nothing about how they scatter.

    rounds: the repetitions; what was measured in one, of both sides, is one of them.
    statistic: from repetitions to the number that is claimed.
    """
    if len(rounds) < 3:
        return None
    chance = random.Random(seed)
    values = sorted(statistic(chance.choices(rounds, k=len(rounds))) for _ in range(DRAWS))
    return values[int(DRAWS * 0.025)], values[int(DRAWS * 0.975)]


def repeated(
    name: str,
    rounds: Sequence[Round],
    statistic: Callable[[Sequence[Round]], float],
    unit: str,
    bar: float | None = None,
    op: str = ">=",
) -> Claim:
    """Returns the claim of a statistic over repetitions, with its interval.

    Not for an extreme: what is drawn anew from the repetitions never lies beyond them.
    """
    value = statistic(rounds)
    return Claim(name, value, unit, bar, op, interval=interval(rounds, statistic))


def median_ratio(rounds: Sequence[tuple[float, float]]) -> float:
    """Returns the median of the first numbers over the median of the second ones."""
    return statistics.median(a for a, _ in rounds) / statistics.median(b for _, b in rounds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options ``--json``, ``--out`` and ``--check`` that all benchmarks have.

    Raises ValueError for a page with a wrong mark of a figure, before anything is measured.
    """
    quoted()
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.add_argument("--out", type=Path, help="write the JSON object to this file too")
    parser.add_argument(
        "--check", action="store_true", help="end with exit code 1 when a bar is missed"
    )


def publish(
    benchmark: str, claims: Sequence[Claim], args: argparse.Namespace, distributions: Sequence[str]
) -> int:
    """Prints claims and details as a table or as JSON, and returns the exit code.

    The exit code is 1 when ``--check`` is given and a bar is missed.

    benchmark: the benchmark's name.
    claims: all that was measured.
    args: the arguments that ``add_options`` has added.
    distributions: those whose versions are printed.
    """
    report = report_of(benchmark, claims, distributions)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        width = max((len(claim.name) for claim in claims), default=0)
        known = [claim for claim in claims if is_claim(benchmark, claim)]
        for claim in (*known, *(claim for claim in claims if claim not in known)):
            bar = (
                ""
                if claim.bar is None
                else f"   {claim.op} {claim.bar:g}{'   MISSED' if claim.missed else ''}"
            )
            spread = "" if claim.interval is None else "   {:.4g} to {:.4g}".format(*claim.interval)
            print(
                f"{claim.name:<{width}}  {claim.value:12.4g} {claim.unit:<22}{spread}{bar}".rstrip()
            )
    return int(args.check and any(claim.missed for claim in claims))


def report_of(
    benchmark: str, claims: Sequence[Claim], distributions: Sequence[str]
) -> dict[str, Any]:
    """Returns what a result file holds; arguments as in ``publish``."""
    known = [claim for claim in claims if is_claim(benchmark, claim)]
    return {
        "benchmark": benchmark,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(distributions),
        "claims": [claim.as_json() for claim in known],
        "details": [claim.as_json() for claim in claims if claim not in known],
    }


def is_claim(benchmark: str, claim: Claim) -> bool:
    """Whether a number of a benchmark has a bar or a place in a page."""
    return claim.bar is not None or claim_name(benchmark, claim.name) in quoted()


def commit() -> str:
    """Returns the commit that is checked out; "" outside a checkout."""
    process = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout.strip()


def machine() -> dict[str, object]:
    """Returns the processor, its cores, the memory in GiB and the load of the last minute.

    loop_ms: milliseconds of a fixed loop of Python, the best of nine. Processors of one name differ
    by a factor of two in clocks and in what their neighbours take; figures in seconds go by this.
    """
    model = next(
        (line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ": unknown"
    )
    return {
        "system": platform.system(),
        "processor": model.partition(": ")[2],
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "loop_ms": round(1000 * min(_loop_s() for _ in range(9)), 2),
        **_accelerator(),
    }


def _accelerator() -> dict[str, str]:
    """Returns the name of the first GPU; nothing where there is none, or where none was used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"accelerator": torch.cuda.get_device_name(0)}


def _loop_s() -> float:
    """Returns the seconds of a loop that only computes."""
    began_s = time.perf_counter()
    total = 0
    for number in range(200_000):
        total += number * number
    return time.perf_counter() - began_s


def versions(distributions: Sequence[str]) -> dict[str, str]:
    """Returns the versions of Python and of those ``distributions`` that are installed."""
    versions_by_name = {"python": platform.python_version()}
    for name in distributions:
        try:
            versions_by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions_by_name


def _lines(path: str) -> list[str]:
    """Returns the lines of a file; none where there is no such file."""
    return Path(path).read_text().splitlines() if Path(path).exists() else []
