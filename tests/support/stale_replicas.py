"""Runs asynchronous jobs one of whose replicas keeps old weights, as a faulty engine would."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tests.support import runs

#: The version that one replica does not take into use.
WRONG = 3

KEEPS = f'''
"""A generator one of whose replicas keeps old weights at version {WRONG}: all, half or none."""
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake


@dataclass(frozen=True, kw_only=True)
class KeepsConfig(fake.FakeGeneratorConfig):
    replica: int = 0
    kept: str = "all"

    def traits(self):
        return Traits(receives_weights=True, midway_weights=True, abort=True, scores_logprobs=True)


class Keeps(fake.FakeGenerator):
    fingerprint = None  # it cannot say what it holds

    def __init__(self, config, context):
        super().__init__(config, context)
        self._kept = config.kept if context.rank == config.replica else ""

    def commit_weights(self, plan):
        old = self._logits.copy()
        super().commit_weights(plan)
        if plan.version >= {WRONG}:
            kept = {{"": 0, "half": len(old) // 2, "all": len(old)}}[self._kept]
            self._logits[:kept] = old[:kept]


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(
        name="any",
        summary="-",
        factory="keeps:Keeps",
        config=KeepsConfig,
    )
'''


def finished(
    directory: Path,
    kept: str,
    replica: int,
    midway: str,
    *,
    seed: int = 3,
    every: int = 1,
    **more: Any,
) -> tuple[int, runs.Run]:
    """Runs four steps in which a replica keeps old weights; returns exit code and run.

    directory: of the job's files.
    kept: what it keeps: "all" of them, "half" of them, or "" for nothing.
    replica: which of the two it is.
    midway: what a push does with samples that run.
    every: steps between two checkpoints; 0: none.
    more: sections of the job.
    """
    bounds = {"prompts": 6, "ahead": 1, "age": 4, "midway": midway}
    job = runs.job(
        run={"steps": 4, "seed": seed},
        controller={"use": "async", "shards": 1, "config": bounds},
        objective={"use": "algorithms/ppo_clip"},
        checkpoint={"every": every, "restarts": 0},
        roles={
            "policy": {"use": "fake"},
            "rollout": {
                "use": "keeps/any",
                "slots": 2,
                "config": {"kept": kept, "replica": replica},
            },
        },
        cluster={"devices": 4},
        launcher={"use": "core/inline"},
        **more,
    )
    job["local"].append("keeps.py")
    directory.mkdir(exist_ok=True)
    (directory / "keeps.py").write_text(KEEPS)
    return runs.finish(directory, job)


def named(output: str, replica: int) -> bool:
    """Returns whether a run's output names the replica, in the step at which it kept weights."""
    told = f"step {WRONG}: rollout.{replica} and the trainer disagree about log-probs since"
    return f"{told} step {WRONG}" in output


#: (kept, replica, midway) of all that is planted.
CASES = tuple(itertools.product(("all", "half"), (0, 1), ("wait", "recompute")))
