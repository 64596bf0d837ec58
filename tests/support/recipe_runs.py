"""Runs a recipe for ten steps, as a person starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[2] / "recipes"


def ten_steps(name: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Returns the lines of the run's metrics; it is evaluated before the first and after the last.

    name: of the recipe's file.
    folder: gets the folder ``run`` and the caches.
    """
    fixed = ["run.steps=10", "evaluation.every=10", "run.dir=run", "plugins=[]"]
    recipe = str(RECIPES / f"{name}.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "gcore_core", "run", recipe, *fixed, *overrides],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
