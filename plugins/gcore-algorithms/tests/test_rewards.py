"""The penalty of long completions is DAPO's."""

from __future__ import annotations

import numpy as np
import pytest
from gcore_algorithms.config import OverlongConfig
from gcore_algorithms.rewards import Overlong

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import FINISHED, OK, Prompt
from gcore_core.contract.scorer import ScoredRecord


def record_of(actions: int) -> ScoredRecord:
    return ScoredRecord(
        ordinal=0,
        sample=0,
        prompt=Prompt(row=0, text="a question"),
        text="",
        status=FINISHED,
        columns={"logp": np.zeros(actions, np.float32)},
    )


def equation_13(length: int, longest: int, cache: int) -> float:
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "cache"), [(20, 5), (20, 20), (7, 1)])
def test_the_penalty_is_equation_13_of_the_paper(longest: int, cache: int) -> None:
    config = OverlongConfig(max_actions=longest, soft_actions=cache)
    lengths = range(longest + 3)
    scores = Overlong(config, WorkerContext(role="scorer")).score([record_of(n) for n in lengths])
    assert {score.status for score in scores} == {OK}
    assert [score.value for score in scores] == [equation_13(n, longest, cache) for n in lengths]


@pytest.mark.parametrize("soft_actions", [0, -1, 21])
def test_a_slope_longer_than_the_completion_is_refused(soft_actions: int) -> None:
    with pytest.raises(ConfigError, match="is not between 1 and max_actions, 20"):
        OverlongConfig(max_actions=20, soft_actions=soft_actions)
