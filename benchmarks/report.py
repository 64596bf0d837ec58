"""Prints the results of benchmarks: claims, their bars, the machine and the versions."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import operator
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

HOLDS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Claim:
    """One measured number.

    name: the claim's name in results and docs.
    value: the number.
    unit: its unit.
    bar: the value that it is held to; None: it is only printed and cannot be missed.
    op: on which side of the bar it must lie, a key of HOLDS.
    """

    name: str
    value: float
    unit: str
    bar: float | None = None
    op: str = ">="

    @property
    def missed(self) -> bool:
        """Whether the claim has a bar and does not hold it."""
        return self.bar is not None and not HOLDS[self.op](self.value, self.bar)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options ``--json`` and ``--check`` that all benchmarks have."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.add_argument(
        "--check", action="store_true", help="end with exit code 1 when a bar is missed"
    )


def publish(
    benchmark: str, claims: Sequence[Claim], args: argparse.Namespace, distributions: Sequence[str]
) -> int:
    """Prints the claims as a table or as JSON, and returns the exit code.

    The exit code is 1 when ``--check`` is given and a bar is missed.

    benchmark: the benchmark's name.
    args: the arguments that ``add_options`` has added.
    distributions: those whose versions are printed.
    """
    report = {
        "benchmark": benchmark,
        "machine": machine(),
        "versions": versions(distributions),
        "claims": [asdict(claim) for claim in claims],
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        width = max(len(claim.name) for claim in claims)
        for claim in claims:
            bar = (
                ""
                if claim.bar is None
                else f"   {claim.op} {claim.bar:g}{'   MISSED' if claim.missed else ''}"
            )
            print(f"{claim.name:<{width}}  {claim.value:12.4g} {claim.unit:<22}{bar}".rstrip())
    return int(args.check and any(claim.missed for claim in claims))


def machine() -> dict[str, object]:
    """Returns the processor, its cores, the memory in GiB and the load of the last minute."""
    model = next(
        (line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ": unknown"
    )
    return {
        "system": platform.system(),
        "processor": model.partition(": ")[2],
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
    }


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
