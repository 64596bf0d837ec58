"""Jobs without generation on the quickstart's model, for the benchmarks that measure them."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from quickstart_runs import environment, make_policy, require_success, start

from gcore_core.config.plan import load_plan

ROOT = Path(__file__).parents[1]


def answers() -> ModuleType:
    """Returns the module that makes right and wrong answers to the quickstart's problems."""
    spec = importlib.util.spec_from_file_location("answers", ROOT / "recipes/chain/answers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job(
    folder: Path,
    name: str,
    program: str,
    rows: Sequence[dict[str, Any]],
    *,
    seed: int,
    steps: int,
    prompts: int = 64,
    minibatches: int = 2,
) -> dict[str, Any]:
    """Writes the rows and returns a job without an objective.

    program: of ``offline``: "sft", "pairs" or "scores".
    """
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = "chat" if program == "sft" else program
    make = {"path": str(ROOT / "recipes/quickstart/arithmetic.py"), "name": "teach"}
    return {
        "run": {"name": name, "steps": steps, "seed": seed, "dir": str(folder / name)},
        "controller": {
            "use": f"offline/{program}",
            "config": {"prompts": prompts, "minibatches": minibatches},
        },
        "data": {"use": f"offline/{dataset}", "config": {"path": str(data)}},
        "roles": {
            "policy": {"use": "torch", "model": {"make": {**make, "config": {"seed": seed}}}},
            "rollout": {"use": "offline"},
        },
    }


def train(folder: Path, settings: dict[str, Any]) -> tuple[Path, Path]:
    """Runs a job; returns its directory and that of the model that it began with."""
    directory = Path(settings["run"]["dir"])
    file = directory.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings))
    model = make_policy(load_plan(file, []).config, folder)
    log = directory.with_suffix(".log")
    arguments = ["run", str(file)]
    process = start(arguments, folder, log)
    process.wait()
    require_success(process, arguments, log)
    return directory, model


def environment_of(folder: Path) -> dict[str, str]:
    """Returns the environment of processes besides ``g-core``'s: one thread, nothing fetched."""
    return {**os.environ, **environment(folder)}
