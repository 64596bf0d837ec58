"""Trainer and generator of one policy have one dtype, which is checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from gcore_torch import gcore_check


def plan(policy: dict[str, Any], rollout: dict[str, Any], use: str = "torch") -> dict[str, Any]:
    roles = {
        "policy": {"use": "any", "config": policy},
        "rollout": {"use": use, "config": rollout},
        "judge": {"use": "torch", "config": {"dtype": "float16"}, "follows": None},
    }
    return {"roles": roles}


def test_two_dtypes_are_refused_with_the_key_to_set() -> None:
    assert list(gcore_check(plan({"dtype": "bfloat16"}, {"dtype": "float32"}))) == [
        "roles.rollout.config.dtype: the policy pushes bfloat16 weights, and this generator would "
        "hold float32; set it to bfloat16."
    ]


@pytest.mark.parametrize(
    "fits",
    [
        plan({"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        plan({}, {"dtype": "float32"}),
        plan({"dtype": "bfloat16"}, {"dtype": "float32"}, use="another"),
        {"roles": {"rollout": {"use": "torch", "config": {"dtype": "float32"}}}},
    ],
    ids=["one", "unknown", "of-another-plugin", "no-policy"],
)
def test_what_may_fit_passes(fits: dict[str, Any]) -> None:
    assert list(gcore_check(fits)) == []
