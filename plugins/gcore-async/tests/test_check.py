"""What is advised before a run starts names settings that the job's objective has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gcore_async import gcore_check
from gcore_async.config import AsyncConfig

from gcore_core.contract.traits import Traits


class Corrects:
    def traits(self) -> Traits:
        return Traits(takes_stale=True)


@pytest.mark.parametrize(
    ("settings", "is_advised"),
    [
        ({"old_logprobs": "recompute", "correction": {"kind": "none"}}, True),
        ({"old_logprobs": "recompute", "correction": {"kind": "truncate"}}, False),
        ({"old_logprobs": "rollout", "correction": {"kind": "none"}}, False),
        ({"old_logprobs": "recompute", "teacher_weight": 1.0}, False),
        ({}, False),
    ],
    ids=["none", "corrected", "rollout", "a teacher's", "nothing"],
)
def test_a_correction_is_advised_for_objectives_that_have_one(
    settings: dict[str, Any], is_advised: bool
) -> None:
    plan = {
        "run": {"deterministic": False},
        "controller": {"use": "async", "config": {}},
        "placement": {
            "use": "core/even",
            "sleep_in_training": "auto",
            "sleep_in_rollout": "never",
        },
        "objective": {"use": "any", "config": settings},
    }
    job: Any = SimpleNamespace(objects={"controller": AsyncConfig(), "objective": Corrects()})
    problems = list(gcore_check(plan, job))
    assert ["objective.config.correction.kind" in problem for problem in problems] == (
        [True] if is_advised else []
    )
