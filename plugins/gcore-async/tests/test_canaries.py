"""A replica that keeps old weights, all or half of them, is found by canaries within one step.

No record of an asynchronous step is fresh, so nothing else would compare log-probs. The generators
here cannot hash what they hold, as some engines cannot.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

WRONG = 3  # the version that one replica does not take into use

KEEPS = f'''
"""A generator one of whose replicas keeps old weights at version {WRONG}: all, half or none."""
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.testing import fake


@dataclass(frozen=True, kw_only=True)
class KeepsConfig(fake.FakeGeneratorConfig):
    replica: int = 0
    kept: str = "all"


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
        capabilities=frozenset({{"weights.push", "weights.midway", "abort", "logprobs"}}),
    )
'''


def finished(directory: Path, kept: str, replica: int, midway: str, **more: Any) -> Any:
    bounds = {"prompts": 6, "ahead": 1, "age": 4, "midway": midway}
    job = runs.job(
        run={"steps": 4},
        controller={"use": "async", "shards": 1, "config": bounds},
        objective={"use": "algorithms/ppo_clip"},
        checkpoint={"every": 1, "restarts": 0},
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
    (directory / "keeps.py").write_text(KEEPS)
    return runs.finish(directory, job)


QUICK = [("all", 1, "wait"), ("half", 0, "recompute")]
OTHERS = sorted({*itertools.product(("all", "half"), (0, 1), ("wait", "recompute"))} - set(QUICK))


@pytest.mark.parametrize(
    ("kept", "replica", "midway"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_a_replica_that_keeps_weights_is_named_within_one_step(
    kept: str, replica: int, midway: str, tmp_path: Path
) -> None:
    code, run = finished(tmp_path, kept, replica, midway)
    assert code == 6, run.output
    told = f"step {WRONG}: rollout.{replica} and the trainer disagree about log-probs since"
    assert f"{told} step {WRONG}" in run.output
    # Nothing that was trained on such samples is saved.
    saved = sorted(path.name for path in (run.path / "checkpoints").glob("step-??????"))
    assert saved[-1:] == [f"step-00000{WRONG - 1}"], saved


def test_replicas_that_hold_what_was_pushed_give_no_alarm(tmp_path: Path) -> None:
    code, run = finished(tmp_path, "", 0, "wait")
    assert code == 0, run.output
    seen = [row.get("sentinel/canary_actions", 0) for row in run.metrics()[1:]]
    assert min(seen[1:]) > 0, "a step compared nothing"
    # The gaps are those of the canaries, in steps that had nothing else to compare.
    assert all("logprob_gap_max" in row for row in run.metrics()[1:])


@pytest.mark.slow
def test_without_canaries_nobody_sees_it(tmp_path: Path) -> None:
    """Guards the tests above: it is the canaries that find it."""
    code, run = finished(tmp_path, "half", 0, "wait", sentinel={"canaries": 0})
    assert code == 0, run.output
    # A step that compared nothing does not say that both sides agreed.
    late = run.metrics()[2:]
    assert late and not any("logprob_gap_max" in row for row in late)
