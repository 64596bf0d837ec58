"""What users of the Python calls get wrong: cases of ``test_error_messages.py``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import gcore
from gcore.finished import Run

ROWS = [{"prompt": "1+1=", "answer": "2"}]
TREE: dict[str, Any] = {
    "launcher": {"use": "core/inline"},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
}
LOG = open("/dev/null")  # noqa: SIM115


def right(record: Any) -> float:
    return float(record.text == "2")


def compares(record: Any, other: Any) -> float:
    return 0.0


def closure() -> Callable[[Any], float]:
    bonus = 2.0

    def reward(record: Any) -> float:
        LOG.write(record.text)
        return bonus

    return reward


def job(**changes: Any) -> Any:
    given = {"model": None, "reward": right, "data": ROWS, "algorithm": TREE, **changes}
    return gcore.job(**given)


def without_pandas(world: Any) -> None:
    (world.directory / "config.yaml").write_text("run: {}\n")
    with mock.patch.object(importlib, "import_module", side_effect=ImportError):
        Run(world.directory).metrics  # noqa: B018


def without_weights(world: Any) -> None:
    (world.directory / "config.yaml").write_text("run: {}\n")
    Run(world.directory).weights  # noqa: B018


def without_samples(world: Any, *steps: int) -> None:
    (world.directory / "config.yaml").write_text("run: {}\n")
    (world.directory / "samples").mkdir()
    for step in steps:
        (world.directory / f"samples/step_{step:06}.jsonl").write_text('{"text": "2"}\n')
    Run(world.directory).samples(7 if steps else None)


CASES: dict[str, dict[str, Callable[[Any], object]]] = {
    "Python": {
        "a reward that needs what does not travel": lambda w: job(reward=closure()),
        "a lambda": lambda w: job(reward=lambda record: 1.0),
        "a reward that takes too much": lambda w: job(reward=compares),
        "no reward": lambda w: job(reward=3),
        "two rewards of one name": lambda w: job(reward=[right, right]),
        "no rows": lambda w: job(data=[]),
        "a row that is no dict": lambda w: job(data=["1+1="]),
        "a row that is no JSON": lambda w: job(data=[{"prompt": "1+1=", "image": object()}]),
        "an object as model": lambda w: job(model=object()),
        "a key without its section": lambda w: job(steps=3),
        "an unknown key": lambda w: job(run__stepz=3),
        "a value that is no YAML": lambda w: job(run__steps=object()),
        "an unknown algorithm": lambda w: job(algorithm="grppo"),
        "no run to load": lambda w: gcore.load(w.directory),
        "no final weights": without_weights,
        "no evaluated answers": without_samples,
        "no evaluated answers of a step": lambda w: without_samples(w, 0, 10),
        "without pandas": without_pandas,
    }
}
