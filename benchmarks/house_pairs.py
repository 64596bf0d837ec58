"""Counts which features of a job exclude each other: the pairs that ``g-core check`` refuses.

Each feature is a key at another value than its default, with what that value needs. Check accepts
the base job with any of them alone. A feature that it does not accept alone, since a later version
has no such key, is left out and named.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore_core import cli

ROOT = Path(__file__).resolve().parents[1]
TASK = ROOT / "recipes" / "quickstart"
#: A launcher that finds two machines and starts nothing.
MACHINES = """
from gcore_core import hookimpl
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.placement import Device
from gcore_core.contract.providers import LauncherProvider
from gcore_nodes.machines_config import MachinesConfig


class TwoMachines:
    def __init__(self, config):
        self._private = bool(config.private)

    async def nodes(self, devices):
        return [
            NodeFacts(
                name=f"agent.{number}",
                devices=tuple(
                    Device(index=index, kind="cpu", node=f"agent.{number}") for index in range(8)
                ),
                host=f"host{number}",
                is_private=self._private,
            )
            for number in range(2)
        ]


@hookimpl
def gcore_launchers():
    yield LauncherProvider(
        name="two", summary="two machines", factory="machines:TwoMachines", config=MachinesConfig
    )
"""


def _model(file: str) -> dict[str, Any]:
    return {"make": {"path": str(file), "name": "teach", "config": {"seed": 0}}}


#: Two controllers, two generators, and devices for whatever a feature adds.
BASE: dict[str, Any] = {
    "run": {"name": "pairs", "steps": 3},
    "cluster": {"devices": 16},
    "controller": {"shards": 2, "config": {"prompts": 8}},
    "data": {"use": "core/jsonl", "config": {"path": str(TASK / "train.jsonl")}},
    "advantage": {"use": "algorithms/grpo", "config": {"group_size": 4}},
    "objective": {"use": "algorithms/ppo_clip"},
    "roles": {
        "policy": {"use": "torch", "model": _model(f"{TASK}/arithmetic.py")},
        "rollout": {
            "use": "torch",
            "slots": 2,
            "follows": "policy",
            "config": {"max_new_tokens": 14},
        },
    },
    "rewards": {
        "exact": {
            "use": "core/function",
            "config": {"path": f"{TASK}/arithmetic.py", "name": "exact"},
        }
    },
    "plugins": ["critic"],
    "local": ["machines.py"],
}


@dataclass(frozen=True)
class Feature:
    """A key of the job at another value than its default.

    needs: other keys that the value needs, and their values.
    """

    key: str
    value: Any
    needs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How results call it, such as ``controller.config.ahead=2``."""
        return f"{self.key}={self.value}" if isinstance(self.value, str | int) else self.key


_ASYNC = {"controller.use": "async"}
FEATURES = (
    Feature("run.deterministic", True),
    Feature("launcher.use", "machines/two"),
    Feature("launcher.config.private", ["10.0.0.0/8"], {"launcher.use": "machines/two"}),
    Feature("controller.use", "async"),
    Feature("controller.config.ahead", 2, _ASYNC),
    Feature("controller.config.midway", "recompute", _ASYNC),
    Feature(
        "controller.config.unfinished", "keep", _ASYNC | {"controller.config.midway": "recompute"}
    ),
    Feature("controller.replicas", "owned"),
    Feature("controller.config.surplus", "keep"),
    Feature("controller.config.truncated", "mask"),
    Feature("controller.config.push_delta", "always"),
    Feature("filter.use", "core/varied"),
    Feature(
        "environment",
        {
            "use": "environments",
            "config": {"environment": f"{TASK.with_name('calculator')}/calculator.py:Calculator"},
        },
    ),
    Feature("placement.use", "placement"),
    Feature("placement.sleep_in_training", "always"),
    Feature("placement.sleep_in_rollout", "always"),
    Feature("roles.rollout.lent", 1, _ASYNC),
    Feature("roles.policy.slots", 2),
    Feature("roles.policy.config.lora", {"rank": 8}),
    Feature("roles.critic.use", "torch", {"advantage.use": "algorithms/gae"}),
    Feature(
        "rewards.judged",
        {
            "use": "genrm",
            "role": "judge",
            "config": {
                "form": "text",
                "template": "{completion}*{prompt}",
                "parser": {"pattern": "(?P<score>[yn])$", "choices": {"y": 1, "n": 0}},
            },
        },
        {
            "roles.judge": {
                "use": "torch",
                "slots": 2,
                "model": _model(f"{TASK.with_name('judge')}/judge.py"),
                "config": {"max_new_tokens": 14},
            }
        },
    ),
    Feature("sentinel.config.keep", True, {"sentinel.use": "sentinel"}),
    Feature("checkpoint.every", 1),
    Feature(
        "evaluation.every",
        1,
        {
            "evaluation.data": {
                "use": "core/jsonl",
                "config": {"path": str(TASK / "heldout.jsonl")},
            }
        },
    ),
)


@dataclass(frozen=True)
class Pairs:
    """Says what check refuses.

    gone: feature -> why it is not accepted alone.
    present: the others.
    refused: pairs of these that are not accepted -> why.
    """

    gone: Mapping[str, str]
    present: tuple[str, ...]
    refused: Mapping[tuple[str, str], str]

    @property
    def n_pairs(self) -> int:
        """How many pairs were looked at."""
        return len(self.present) * (len(self.present) - 1) // 2


def job_with(base: Mapping[str, Any], *features: Feature) -> dict[str, Any]:
    """Returns the base job with features; their keys win over what others need."""
    job: dict[str, Any] = json.loads(json.dumps(base))
    needs = {key: value for feature in features for key, value in feature.needs.items()}
    for key, value in (needs | {feature.key: feature.value for feature in features}).items():
        *path, last = key.split(".")
        section = job
        for word in path:
            section = section.setdefault(word, {})
        section[last] = value
    return job


def count_pairs(features: tuple[Feature, ...], refusal: Callable[..., str]) -> Pairs:
    """Asks about each feature alone, then about each pair of those that are accepted.

    refusal: says why a job with these features is refused; "": it is not.
    """
    alone = [(feature, refusal(feature)) for feature in features]
    present = [feature for feature, why in alone if not why]
    refused = {
        (one.name, other.name): why
        for one, other in itertools.combinations(present, 2)
        if (why := refusal(one, other))
    }
    return Pairs(
        gone={feature.name: why for feature, why in alone if why},
        present=tuple(feature.name for feature in present),
        refused=refused,
    )


class Check:
    """Runs ``g-core check`` in this process, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "job.yaml"
        (folder / "machines.py").write_text(MACHINES)

    def __call__(self, *features: Feature) -> str:
        """Returns why the base job with these features is refused; "": it is not."""
        self._file.write_text(json.dumps(job_with(BASE, *features)))  # JSON is YAML
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = cli.main(["check", str(self._file)])
        return " ".join(printed.getvalue().split()) or f"exit code {code}" if code else ""


def measure_pairs() -> Pairs:
    """Returns what check refuses of all features; raises RuntimeError where it refuses the base."""
    with tempfile.TemporaryDirectory() as folder:
        check = Check(Path(folder))
        if why := check():
            raise RuntimeError(f"the base job is refused: {why}")
        pairs = count_pairs(FEATURES, check)
    for name, why in pairs.gone.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    for (one, other), why in pairs.refused.items():
        print(f"refused: {one} with {other}: {why}", file=sys.stderr)
    return pairs
