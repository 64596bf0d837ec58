"""Measures how long ``g-core check`` takes for each recipe: the first time, and again.

    python tests/check_seconds.py [RECIPE ...] [--json]

A recipe of a real model is checked as ``g-core shrink`` makes it, since its own model and data are
not here; those with models of their own are checked when these have been made. Nothing is kept
before the first time, the second one changes nothing. CPU seconds are those of all processes; on a
machine that does something else, too, they say more than those of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where it is run as a script

from tests.recipes import NAMES, RECIPES, TOYS  # noqa: E402

G_CORE = Path(sys.executable).with_name("g-core")
#: Makes the models of a job that makes them, as a run does before its processes start.
_MAKE = """
import sys
from gcore_core.config.plan import load_plan
from gcore_core.kits.models import make_model, models_cache
for role in load_plan(sys.argv[1]).settings.roles.values():
    if "make" in role.model:
        make_model(role.model["make"], models_cache(), lambda share, text: None)
"""


def measured(name: str, directory: Path) -> dict[str, float | int]:
    """Returns the seconds of both checks of a recipe, and the exit code of the second."""
    environment = {**os.environ, "G_CORE_CACHE": str(directory / "cache"), "OMP_NUM_THREADS": "1"}
    environment.setdefault("HF_HUB_OFFLINE", "1")
    # Else the checkout's modules are compiled each time, which an installed package's are not.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    job = RECIPES / f"{name}.yaml"
    if name in TOYS:
        made = [sys.executable, "-c", _MAKE, str(job)]
        subprocess.run(made, env=environment, check=True, stdout=subprocess.DEVNULL)
    else:
        small = directory / f"{name}.yaml"
        words = [str(G_CORE), "shrink", str(job), "-o", str(small)]
        subprocess.run(words, env=environment, check=True, capture_output=True)
        job = small
    seconds: dict[str, float | int] = {}
    for which in ("first", "again"):
        began_s, cpu_s = time.monotonic(), _cpu_s()
        done = subprocess.run(
            [str(G_CORE), "check", str(job)], env=environment, stdout=subprocess.DEVNULL
        )
        seconds[f"{which}_s"] = round(time.monotonic() - began_s, 2)
        seconds[f"{which}_cpu_s"] = round(_cpu_s() - cpu_s, 2)
        seconds["exit_code"] = done.returncode
    return seconds


def _cpu_s() -> float:
    """Returns the CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description="Time g-core check of each recipe.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="some of them; all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = {}
    for name in args.recipes or (*TOYS, *NAMES):
        with tempfile.TemporaryDirectory() as directory:
            found[name] = measured(name, Path(directory))
        if not args.json:
            shown = "  ".join(f"{key} {value:g}" for key, value in found[name].items())
            print(f"{name:22} {shown}", flush=True)
    if args.json:
        print(json.dumps(found, indent=2))
    return max(int(seconds["exit_code"]) for seconds in found.values())


if __name__ == "__main__":
    sys.exit(main())
