"""Measures every figure that README and docs quote, and writes the file of a release.

    python benchmarks/release.py 0.3 [--results FOLDER] [--only NAME ...] [--list]

It runs the commands of ``MEASURED``, each of which writes a result into the folder; one that is
there already is taken as it is, so a second call goes on where the first one stopped. Of the
results it writes the claims that a page quotes into ``benchmarks/releases/0.3.json``, each with
value, unit, interval, commit, date and machine. Figures of which no new result was made are taken
from the release before, with the commit, the date and the machine that they have. The exit code is
1 when a command fails.

Then the pages are brought up to date by hand: it prints each figure that differs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import figures

SCRIPT = "{python} benchmarks/{name}.py --out {out}"
ENGINES = "{python} tests/engines/suites.py --create"
#: Result -> the commands that make it; the last one writes it.
MEASURED = {
    "asynchronous_emulated": (SCRIPT,),
    "asynchronous_quickstart": (SCRIPT,),
    "back_to_work": (SCRIPT,),
    "controllers": (f"{SCRIPT} --parts payloads sizes numbers skew",),
    "controllers_readers": ("{python} -m tox run -e bench-verl -- --out {out} --parts readers",),
    "controllers_saturation": (
        "{python} benchmarks/controllers.py --out {out} --parts saturation",
    ),
    "engine_overhead": (f"{ENGINES} --engines vllm sglang", SCRIPT),
    "engine_pairs": (ENGINES, SCRIPT),
    "environments": ("{python} -m tox run -e bench-trl,bench-verifiers --notest", SCRIPT),
    "gpu": (SCRIPT,),
    "machines": (SCRIPT,),
    "placement_emulated": (SCRIPT,),
    "placement_sim": (SCRIPT,),
    "proved_hashes": ("{python} benchmarks/proved.py --out {out} --parts hashes",),
    "proved_sentinel": (
        f"{ENGINES} --engines vllm",
        "{python} benchmarks/proved.py --out {out} --parts sentinel",
    ),
    "proved_time": ("{python} benchmarks/proved.py --out {out} --parts time",),
    "real_model": (
        "{python} -m tox run -e bench-trl --notest",
        f"{SCRIPT} --parts grpo lora memory start",
    ),
    "quickstart": ("{python} -m tox run -e bench-trl -- --out {out}",),
    "rendering": ("{python} -m tox run -e bench-trl --notest", SCRIPT),
    "weight_push": (SCRIPT,),
}


def figures_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns those claims of a result that a page quotes, as a release has them."""
    quoted = figures.quoted()
    return {name: entry for name, entry in all_figures(result).items() if name in quoted}


def all_figures(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns all claims and details of a result, as a release has them."""
    origin = {
        "commit": result["commit"][:12],
        "date": result["date"],
        "machine": machine(result["machine"]),
    }
    fields = ("value", "unit", "interval")
    return {
        figures.claim_name(result["benchmark"], claim["name"]): {
            key: claim[key] for key in fields if key in claim
        }
        | origin
        for claim in [*result["claims"], *result["details"]]
    }


def keep(name: str, result: dict[str, Any]) -> None:
    """Writes all of a result into the yardstick of this name, beside those of other benchmarks."""
    own = f"{result['benchmark']}."
    known = figures.read_release(name) if figures.has_file(name) else {}
    others = {claim: entry for claim, entry in known.items() if not claim.startswith(own)}
    figures.write_release(name, others | all_figures(result))


def machine(facts: dict[str, Any]) -> str:
    """Returns a machine in words."""
    accelerator = f"one {facts['accelerator']}, " if "accelerator" in facts else ""
    cores = f"{facts['cores']} cores ({facts['processor'].strip()})"
    return f"{accelerator}{cores}, {facts['memory_gib']} GiB"


def measure(name: str, out: Path) -> str:
    """Runs the commands of a result; returns what went wrong, "" for nothing."""
    for command in MEASURED[name]:
        words = [
            word.format(python=sys.executable, name=name, out=out) for word in shlex.split(command)
        ]
        print(f"== {name}: {shlex.join(words)}", flush=True)
        code = subprocess.run(words, cwd=figures.ROOT, check=False).returncode
        if code:
            return f"exit code {code} of: {shlex.join(words)}"
    return "" if out.exists() else "no result was written"


def figures_before(release: str) -> dict[str, dict[str, Any]]:
    """Returns the figures that this release has already, or else those of the newest one."""
    known = figures.releases()
    before = release if release in known else known[-1]
    quoted = figures.quoted()
    return {name: entry for name, entry in figures.read_release(before).items() if name in quoted}


def main() -> int:
    parser = argparse.ArgumentParser(description="The figures of a release.")
    parser.add_argument("release", help="such as 0.3")
    parser.add_argument(
        "--results",
        type=Path,
        default=figures.ROOT / ".cache" / "results",
        help="the folder where results lie (default: .cache/results)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=sorted(MEASURED), default=sorted(MEASURED), metavar="NAME"
    )
    parser.add_argument("--list", action="store_true", help="print the commands; run nothing")
    args = parser.parse_args()
    if args.list:
        for name in args.only:
            print(f"{name}: {'; '.join(MEASURED[name])}")
        return 0
    args.results.mkdir(parents=True, exist_ok=True)
    entries = figures_before(args.release)
    failures = []
    for name in args.only:
        out = args.results.absolute() / f"{name}.json"
        reason = "" if out.exists() else measure(name, out)
        if reason:
            failures.append(f"{name}: {reason}")
        else:
            entries |= figures_of(json.loads(out.read_text()))
    figures.write_release(args.release, entries)
    print("\n".join(["==", *failures, *figures.complaints()]), flush=True)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
