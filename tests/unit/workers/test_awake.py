"""Who is awake is a value with a version: those who are asked later hear of the newest one."""

from __future__ import annotations

from typing import Any

import pytest

from gcore_core.contract.errors import WorkerDied
from gcore_core.controllers.placement.lead import Awake
from gcore_core.runtime.messages import SCORE, ScoreRequest
from gcore_core.wire.retry import insist_with
from gcore_core.workers.role_sampler import RoleSampler


def test_judges_are_all_roles_except_the_generator_of_the_policy() -> None:
    awake = Awake(version=1, replicas={"rollout": [0, 1], "judge": [1]}, in_turns=False)
    assert awake.judges() == {"judge": [1]}


def test_the_set_of_awake_replicas_is_replaced_and_never_mutated() -> None:
    awake = Awake(version=1, replicas={"rollout": [0]}, in_turns=False)
    with pytest.raises(AttributeError):
        awake.replicas = {}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("heard", "asked"),
    [
        ([(1, [0]), (2, [1])], [1]),
        ([(2, [1]), (1, [0])], [1]),  # overtaken by the newer one
        ([(2, [1]), (2, [0])], [0]),  # the same version says the same, whoever tells it
    ],
)
def test_a_scorer_uses_the_awake_replicas_of_the_newest_version(
    heard: list[tuple[int, list[int]]], asked: list[int]
) -> None:
    replicas: list[Any] = [object(), object()]
    sampler = RoleSampler("judge", replicas, lambda: None)
    for version, awake in heard:
        sampler.route({"judge": awake}, version)
        sampler.route({"another": [7]}, version + 1)
    assert sampler._awake == asked


async def test_a_repeated_request_names_the_replicas_awake_at_that_time() -> None:
    versions = iter([3, 4])
    sent: list[int] = []

    class Lossy:
        name = "scorer.0"

        async def call(self, endpoint: object, request: ScoreRequest, **_: object) -> list[object]:
            sent.append(request.awake_version)
            if len(sent) == 1:
                raise WorkerDied("the connection broke")
            return []

    peer: Any = Lossy()
    await insist_with(peer, SCORE, lambda: ScoreRequest("train", [], awake_version=next(versions)))
    assert sent == [3, 4]
