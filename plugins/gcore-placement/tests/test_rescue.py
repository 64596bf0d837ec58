"""A judge whose replicas are gone for good gets cells of the policy: on virtual time, through the
real controllers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_placement.config import SplitConfig
from gcore_placement.fixed import FixedSplit
from gcore_testing.faults import Faults, MortalService
from gcore_testing.simulation import Outcome, SimulatedJob, run_virtual, simulate, violations

from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.placement import Device, Need, Window

pytestmark = pytest.mark.rest

SPLIT = FactorySpec(
    "gcore_placement.fixed:FixedSplit", "gcore_placement.config:SplitConfig", {"cells": 1}
)
JOB = SimulatedJob(
    shards=3,
    scorers=1,
    steps=4,
    prompts=4,
    samples=2,
    evaluate_prompts=0,
    filter="gcore_core.builtin.filters:Varied",
)


class Ending(Faults):
    """At its ``ask``-th question, one process is gone and never comes back; nothing else goes
    wrong.
    """

    def __init__(self, name: str, ask: int) -> None:
        super().__init__(0, rate=0.0, kills=0.0)
        self._name, self._left = name, ask
        self.after: set[tuple[str, str]] = set()  # (process, method) of what was asked afterwards

    async def travel(self, source: str, target: str, method: str) -> int:
        if target == self._name and method == "ask":
            self._left -= 1
            if not self._left and isinstance(
                service := self._network.services.pop(self._name), MortalService
            ):
                service.life.end()
        if self._left <= 0:
            self.after.add((target, method))
        return await super().travel(source, target, method)


def run(directory: Path, cells: int, weather: Faults | None, rests: bool = False) -> Outcome:
    changes = {"replicas": cells, "judges": cells, "placement": SPLIT, "rests": rests}
    job = SimulatedJob(**{**vars(JOB), **changes})
    return run_virtual(simulate(job, directory / "store", weather))


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("ask", [1, 4, 9])
@pytest.mark.parametrize("cells", [2, 3, 4])
def test_losing_the_only_judge_does_not_change_the_consumed_records(
    cells: int, ask: int, rests: bool, tmp_path: Path
) -> None:
    weather = Ending(f"judge.{cells - 1}", ask)
    found = run(tmp_path / "found", cells, weather, rests)
    calm = run(tmp_path / "calm", cells, None)
    assert violations(found, calm, weather, JOB) == []
    others = {
        name for name, method in weather.after if method == "ask" and name != f"judge.{cells - 1}"
    }
    assert others, "no other judge was asked: this tests nothing"
    assert ("rollout.0", "generate") in weather.after


def window(**told: object) -> Window:
    devices = tuple(Device(index=i, kind="cuda") for i in range(4))
    needs = {"rollout": Need(kind="generator", follows="policy"), "judge": Need(kind="generator")}
    return Window(devices=devices, slots={"rollout": 4, "judge": 4}, needs=needs, **told)  # type: ignore[arg-type]


def cells_of(lost: dict[str, list[int]], awake: int = 1) -> tuple[str, dict[str, list[int]]] | None:
    policy = FixedSplit(SplitConfig(cells=awake))
    found = policy.rescue(
        policy.revise(None, window()).partition, window(starving="judge", lost=lost)
    )
    if found is None:
        return None
    cells = {
        role: [cell.devices[0].index for cell in own] for role, own in found.partition.cells.items()
    }
    return found.mode, cells


def test_a_lost_judge_gets_usable_cells_that_the_policy_can_give_up() -> None:
    assert cells_of({"judge": [3]}) == ("split", {"rollout": [0], "judge": [1, 2]})
    assert cells_of({"judge": [2, 3]}) == ("split", {"rollout": [2], "judge": [0, 1]}), (
        "its engine on 2 is gone"
    )
    assert cells_of({"judge": [3], "rollout": [0]}) == ("split", {"rollout": [0, 1], "judge": [2]})
    assert cells_of({"judge": [1, 2, 3]}, awake=3) == ("colocated", {"rollout": [0], "judge": [0]})
    assert cells_of({"judge": [0, 1, 2, 3]}) is None
