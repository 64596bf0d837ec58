"""A generator says of which push the weights are that it holds."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gcore_core.contract.generator import Fingerprints
from gcore_core.contract.step_check import Held
from gcore_core.workers.weights_follower import WeightsFollower


class Holds:
    """A backend with tensors a, b and c, whose digests are the versions that they are of."""

    def __init__(self, version: int, **held: int) -> None:
        self.version = version
        self._held = held

    def fingerprint(self) -> dict[str, int]:
        return self._held


async def now(call: Any, *arguments: Any) -> Any:
    return call(*arguments)


async def held_after(backend: Holds, pushes: range) -> Held:
    assert isinstance(backend, Fingerprints)
    follower = WeightsFollower(
        cast(Any, backend), cast(Any, now), cast(Any, None), asyncio.Lock(), False
    )
    for version in pushes:
        follower._remember(version, {"a": version, "b": version, "c": 0 if version else -5})
    return await follower.held()


@pytest.mark.parametrize("age", [1, 2, 5, 15])
async def test_weights_of_any_of_the_last_pushes_are_named(age: int) -> None:
    held = await held_after(Holds(40, a=40 - age, b=40 - age, c=0), range(1, 41))
    assert held == Held(40, 40, True, ["a", "b"], 3, 2, 40 - age)


async def test_right_weights_differ_from_nothing() -> None:
    held = await held_after(Holds(40, a=40, b=40, c=0), range(1, 41))
    assert held.differ == [] and held.known


async def test_of_weights_of_several_pushes_the_one_with_most_is_named() -> None:
    held = await held_after(Holds(5, a=3, b=2, c=1), range(6))
    assert (held.differ, held.older, held.older_version) == (["a", "b", "c"], 1, 3)


async def test_weights_that_no_push_brought_are_of_none() -> None:
    held = await held_after(Holds(5, a=77, b=5, c=0), range(6))
    assert (held.differ, held.older) == (["a"], 0)


async def test_after_one_push_there_is_no_older_one() -> None:
    first = await held_after(Holds(0, a=1, b=1, c=1), range(1))
    assert (first.older, first.older_version) == (0, -1)
