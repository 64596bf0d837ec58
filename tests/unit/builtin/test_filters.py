from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gcore_core.builtin.config import VariedConfig
from gcore_core.builtin.filters import KeepAll, Varied
from gcore_core.config.plan import load_plan
from gcore_core.contract.algorithms import Filter, GroupScalars
from gcore_core.contract.errors import ConfigError
from tests.support import runs


def group(*rewards: float) -> GroupScalars:
    return GroupScalars(
        rewards=np.array(rewards, dtype=np.float64), lengths=np.ones(len(rewards), dtype=np.int64)
    )


@pytest.mark.parametrize("filter_", [KeepAll(None), Varied(None), KeepAll(), Varied()])
def test_filters_follow_the_protocol(filter_: Filter) -> None:
    assert isinstance(filter_, Filter)


def test_keep_all_keeps_a_group_that_teaches_nothing() -> None:
    assert KeepAll(None).keep(group(1, 1)) == (True, "")


@pytest.mark.parametrize("rewards", [(0, 0, 0), (1, 1), (0.5,), ()])
def test_equal_rewards_do_not_teach(rewards: tuple[float, ...]) -> None:
    assert Varied(None).keep(group(*rewards)) == (False, "equal_rewards")


def test_rewards_that_differ_by_rounding_do_not_teach() -> None:
    assert Varied(None).keep(group(0.1 + 0.2, 0.3, 0.3)) == (False, "equal_rewards")


def test_one_different_reward_teaches() -> None:
    assert Varied(None).keep(group(0, 0, 1e-9)) == (True, "")


def named(**rewards: list[float]) -> GroupScalars:
    columns = {name: np.array(values, np.float64) for name, values in rewards.items()}
    total = np.sum([np.nan_to_num(values) for values in columns.values()], axis=0)
    return GroupScalars(
        rewards=total,
        lengths=np.ones(len(total), np.int64),
        named=columns,
        weights=dict.fromkeys(columns, 1.0),
    )


@pytest.mark.parametrize(
    ("exact", "teaches"),
    [([1.0, 1.0, 1.0], False), ([1.0, 0.0, 1.0], True), ([1.0, np.nan, 1.0], False)],
)
def test_a_filter_of_one_reward_does_not_look_at_the_others(
    exact: list[float], teaches: bool
) -> None:
    group = named(exact=exact, overlong=[0.0, -0.5, -1.0])
    reason = "" if teaches else "equal_rewards"
    assert Varied(VariedConfig(reward="exact")).keep(group) == (teaches, reason)
    assert Varied(VariedConfig()).keep(group) == (True, "")


def test_a_filter_of_a_reward_that_the_job_lacks_is_refused(tmp_path: Path) -> None:
    whole = runs.job(filter={"use": "core/varied", "config": {"reward": "exact"}})
    whole["local"] = [str(runs.FAKE), "trouble.py"]
    (tmp_path / "trouble.py").write_text(runs.TROUBLE)
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(whole))
    with pytest.raises(ConfigError) as caught:
        load_plan(file)
    assert caught.value.facts["problems"] == [
        "filter: reads the reward 'exact', which the job does not have (it has: letters)."
    ]
    load_plan(file, ["filter.config.reward=letters"])
