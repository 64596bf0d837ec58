"""The plugin holds the contracts of the kit, and its program keeps what its page says."""

from __future__ import annotations

import numpy as np
import pytest
from gcore_tree.config import TreeConfig
from gcore_tree.search import TreeSearch

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.sampling import DrawnSoFar
from gcore_core.testing.conformance import contracts_of
from gcore_core.testing.contracts.sampler import SamplerContract


class TestTree(SamplerContract):
    provider = "tree"
    group_sizes = (12,)


globals().update(
    {name: value for name, value in contracts_of("tree").items() if "Sampler" not in name}
)


def drawn(rewards: list[float], still_open: list[int], **named: list[float]) -> DrawnSoFar:
    """Rewards so far; ``still_open`` has 1 for a record that can be continued."""
    return DrawnSoFar(
        rewards=np.array(rewards),
        named={name: np.array(values) for name, values in named.items()},
        drafts=np.full(len(rewards), -1),
        open=np.array(still_open, np.bool_),
    )


@pytest.mark.parametrize(
    ("rewards", "still_open", "expected"),
    [
        ([0.1, 0.9, 0.5, 0.9], [1, 1, 1, 1], [1, 3, 1, 3]),  # the best two, in turn
        ([0.1, 0.9, 0.5, 0.9], [1, 0, 1, 0], [2, 0, 2, 0]),  # what has ended is not continued
        ([0.1, 0.9, 0.5, 0.9], [0, 0, 1, 0], [2, 2, 2, 2]),  # fewer than there are beams
        ([0.1, 0.9, 0.5, 0.9], [0, 0, 0, 0], [-1] * 4),  # drawn anew
        ([9, 9, 9, 9, 0.1, 0.2, 0.3, 0.4], [1] * 8, [7, 6, 7, 6]),  # of the latest wave
        ([9, 8, 7, 6, 0.1, 0.2, 0.3, 0.4], [1] * 4 + [0] * 4, [0, 1, 0, 1]),  # which has ended
    ],
)
def test_the_best_open_beginnings_of_the_latest_wave_are_continued(
    rewards: list[float], still_open: list[int], expected: list[int]
) -> None:
    program = TreeSearch(TreeConfig(actions=4))
    assert list(program.drafts(drawn(rewards, still_open), 4)) == expected


def test_every_beginning_that_is_kept_has_the_width_at_least() -> None:
    """So that no continuation is compared with itself alone."""
    chance = np.random.default_rng(0)
    program = TreeSearch(TreeConfig(beams=3, width=2, actions=1, steps=2))
    for _ in range(200):
        group = drawn(chance.random(6).tolist(), chance.integers(0, 2, 6).tolist())
        drafts = list(program.drafts(group, 6))
        assert min(drafts.count(draft) for draft in drafts) >= 2


def test_a_named_reward_chooses_and_a_beginning_without_it_comes_last() -> None:
    program = TreeSearch(TreeConfig(actions=4, reward="steps"))
    group = drawn([9.0, 0.0, 5.0, 7.0], [1] * 4, steps=[-3.0, float("nan"), -1.0, -2.0])
    assert list(program.drafts(group, 4)) == [2, 3, 2, 3]
    assert TreeConfig(actions=4, reward="steps").reads_rewards() == {"steps"}
    assert TreeConfig(actions=4).reads_rewards() == frozenset()


def test_steps_have_the_length_that_was_set_and_the_last_one_none() -> None:
    program = TreeSearch(TreeConfig(actions=4, end="\n"))
    assert program.waves(12) == [4, 4, 4]
    assert [program.piece(sample) for sample in range(12)] == [(4, "\n")] * 8 + [(0, "")] * 4


def test_the_first_step_may_draw_more_beginnings_than_others_draw_continuations() -> None:
    program = TreeSearch(TreeConfig(actions=1, first=7))
    assert program.waves(15) == [7, 4, 4]
    assert [program.piece(sample)[0] for sample in range(15)] == [1] * 11 + [0] * 4
    rewards = [0.0] * 6 + [1.0] + [0.5, 0.2, 0.9, 0.1]
    assert list(program.drafts(drawn(rewards[:7], [1] * 7), 4)) == [6, 0, 6, 0]
    assert list(program.drafts(drawn(rewards, [1] * 11), 4)) == [9, 7, 9, 7]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"actions": 4, "steps": 1}, "1 is less than 2"),
        ({"actions": 4, "beams": 0}, "0 is less than 1"),
        ({"actions": 4, "width": 1}, "1 is less than 2"),
        ({"actions": 4, "first": 1}, "1 is less than 2"),
        ({"actions": -1}, "-1 is less than 0"),
        ({"end": ""}, "nothing ends a step"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TreeConfig(**fields)
    assert problem in str(caught.value)


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="a tree has 12 records, and a group has 8"):
        TreeSearch(TreeConfig(actions=4)).waves(8)
