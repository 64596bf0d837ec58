"""Runs every recipe of a real model, made small, from its start to its end.

    python tests/recipes.py [RECIPE ...] [--fresh] [--list] [--result FILE]
    python tests/recipes.py --one RECIPE

`tox run -e recipes` runs it, two steps of each; it goes on where it stopped (parts.py). What the
recipe needs that is not here (weights, data sets, engines, devices) has twins (g-core shrink).
Which devices a recipe is for, its page says; ``tests/unit/project/test_recipes.py`` plans it on
those.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where it is run as a script

from tests import parts  # noqa: E402
from tests.parts import CODE, Part  # noqa: E402

RECIPES = ROOT / "recipes"
STEPS = 2
#: Recipes with small models of their own, which `tox run -e nightly` trains to their ends.
TOYS = (
    "agent",
    "calculator",
    "calculator_async",
    "digits",
    "judge",
    "noughts",
    "quickstart",
    "reasoning",
    "refine",
)
NAMES = tuple(sorted(file.stem for file in RECIPES.glob("*.yaml") if file.stem not in TOYS))
PARTS = tuple(
    Part(
        name=f"recipe-{name}",
        budget_min=1.25,
        command=f"{{python}} tests/recipes.py --one {name}",
        runs=(*CODE, "tests/recipes.py"),
    )
    for name in NAMES
)


def run_one(name: str, directory: Path) -> None:
    """Makes a recipe small, runs it in a directory, and holds its run to have done its steps."""
    small = directory / f"{name}.yaml"
    command = [sys.executable, "-m", "gcore_core"]
    made = [*command, "shrink", str(RECIPES / f"{name}.yaml"), "-o", str(small)]
    subprocess.run([*made, "--steps", str(STEPS)], cwd=directory, check=True)
    subprocess.run([*command, "run", str(small)], cwd=directory, check=True)
    run = directory / "runs" / name / "001"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert STEPS in steps, f"{name} made steps {steps}"
    assert list((run / "weights").glob("*.safetensors")), f"{name} left no weights in {run}"


def main() -> int:
    if sys.argv[1:2] != ["--one"]:
        return parts.main(PARTS, "Run every recipe, made small.")
    with tempfile.TemporaryDirectory() as directory:
        run_one(sys.argv[2], Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
