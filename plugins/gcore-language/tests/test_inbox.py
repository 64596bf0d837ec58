"""What a push may and may not do, whichever engine receives it."""

from __future__ import annotations

import numpy as np
import pytest
from gcore_language.inbox import WeightInbox

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.records import TensorSpec, WeightPlan

A = TensorSpec("a", "F32", (2,), 8)
B = TensorSpec("b", "F32", (1,), 4)
SHAPES = {"a": (2,), "b": (1,)}


def arrays(*specs: TensorSpec) -> list[tuple[TensorSpec, np.ndarray]]:
    return [(spec, np.zeros(spec.nbytes, np.uint8)) for spec in specs]


@pytest.fixture
def inbox() -> WeightInbox:
    return WeightInbox("rollout", SHAPES)


def refused(match: str, tensor: str, call: object, *args: object) -> None:
    with pytest.raises(WeightMismatch, match=match) as caught:
        call(*args)  # type: ignore[operator]
    assert caught.value.facts.get("tensor", "") == tensor
    assert caught.value.where == "roles.rollout"


def test_a_whole_push_sets_the_version(inbox: WeightInbox) -> None:
    inbox.check_idle()
    inbox.begin(WeightPlan(3, [A, B]))
    inbox.take(arrays(A))
    inbox.take(arrays(B))
    inbox.complete()
    inbox.commit(3)
    assert inbox.version == 3
    inbox.check_idle()


def test_a_plan_of_another_model_is_refused_by_the_tensors_name(inbox: WeightInbox) -> None:
    refused("lacks tensor b", "b", inbox.begin, WeightPlan(1, [A]))
    refused(
        "has tensor c, which",
        "c",
        inbox.begin,
        WeightPlan(1, [A, B, TensorSpec("c", "F32", (1,), 4)]),
    )
    wide = TensorSpec("a", "F32", (3,), 12)
    refused(
        r"a has shape \(3,\) in the plan and \(2,\) here",
        "a",
        inbox.begin,
        WeightPlan(1, [wide, B]),
    )
    inbox.check_idle()


def test_an_older_version_is_refused_by_a_tensors_name(inbox: WeightInbox) -> None:
    inbox.begin(WeightPlan(3, [A, B]))
    inbox.take(arrays(A, B))
    inbox.complete()
    inbox.commit(3)
    refused("version 2 is older than 3", "a", inbox.begin, WeightPlan(2, [A, B]))


def test_each_tensor_must_come_once_after_its_plan_and_as_planned(inbox: WeightInbox) -> None:
    refused("before their plan", "", inbox.take, arrays(A))
    inbox.begin(WeightPlan(1, [A, B]))
    refused("a is not as planned", "a", inbox.take, [(A, np.zeros(4, np.uint8))])
    inbox.take(arrays(A))
    refused("a is not as planned", "a", inbox.take, arrays(A))
    refused("b has not come", "b", inbox.complete)
    refused("was not committed", "", inbox.check_idle)


def test_a_push_with_a_failed_commit_must_start_again_with_its_plan(inbox: WeightInbox) -> None:
    inbox.begin(WeightPlan(1, [A, B]))
    inbox.take(arrays(A, B))
    inbox.complete()
    refused("before their plan", "", inbox.take, arrays(A))
    refused("was not committed", "", inbox.check_idle)
    inbox.begin(WeightPlan(1, [A, B]))
    inbox.take(arrays(A, B))
    inbox.complete()
    inbox.commit(1)
    assert inbox.version == 1
