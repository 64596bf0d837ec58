"""Draws and tabulates what one controller can carry, from the result of controllers.py.

    python benchmarks/saturation_plot.py [--directory docs/figures]

Writes ``controllers_saturation.png`` and prints the tables of docs/explanation/limits.md with their
marks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from matplotlib import pyplot
from saturation import COUNTS, RATES

ROOT = Path(__file__).parents[1]
COMPARED = RATES[-2]
COLUMNS = (
    ("busiest_controller_share", "{:.3f}"),
    ("controller_us_per_record", "{:.0f}"),
    ("controller_messages_per_record", "{:.2f}"),
)


def rows() -> list[str]:
    """Returns what is measured: one controller at each rate, then more at one of them."""
    one = [f"c1_at_{n}_devices" for n in RATES]
    return one + [f"c{c}_at_{COMPARED}_devices" for c in COUNTS]


def table(values: dict[str, float]) -> str:
    """Returns the points as Markdown, each number with its mark."""
    lines = [
        "| controllers, devices | busy share of the busiest | "
        "us per record | messages per record |",
        "|---|---|---|---|",
    ]
    for row in rows():
        controllers, _, devices = row.removeprefix("c").partition("_at_")
        cells = []
        for name, form in COLUMNS:
            claim = f"{name}_{row}"
            mark = f"<!-- result: controllers_saturation.{claim} -->"
            cells.append(form.format(values[claim]) + mark)
        devices = f"{int(devices.removesuffix('_devices')):,}"
        lines.append(f"| {controllers}, {devices} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(values: dict[str, float], path: Path) -> None:
    """Draws the busiest controller's share over the rate, and over the number of controllers."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    rates = [values[f"records_per_second_c1_at_{n}_devices"] for n in RATES]
    left.loglog(
        rates, [values[f"busiest_controller_share_c1_at_{n}_devices"] for n in RATES], marker="o"
    )
    left.axhline(1.0, linestyle="--")
    left.set_xlabel("records a second, one controller")
    left.set_ylabel("busy share of the busiest controller")
    counts = (1, *COUNTS)
    shares = [values[f"busiest_controller_share_c{c}_at_{COMPARED}_devices"] for c in counts]
    right.loglog(counts, shares, marker="o")
    right.set_xlabel(f"controllers, {COMPARED:,} devices")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--result", type=Path, required=True, help="of controllers.py")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    values = {claim["name"]: claim["value"] for claim in (*result["claims"], *result["details"])}
    if f"busiest_controller_share_{rows()[0]}" not in values:
        print(f"{args.result} has no part saturation; run controllers.py first", file=sys.stderr)
        return 1
    draw(values, args.directory / "controllers_saturation.png")
    print(table(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
