"""The advantage of turns: what it is, and that its gradient is unbiased with an early exit."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from gcore_environments import conformance
from gcore_environments.advantages import TurnAdvantage, TurnsConfig
from gcore_language.action_advantages import ComparesRecords, per_action

from gcore_core.contract.algorithms import ActionAdvantage, ActionScalars
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.trainer import TrainRecord


class OneRank:
    """Adds up what one rank has."""

    def add_up(self, terms: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
        return {name: tuple(map(sum, zip(*rows, strict=True))) for name, rows in terms.items()}


class OneOfTwoRanks(OneRank):
    """Adds what another rank has told before; without it, keeps what this rank tells."""

    def __init__(self, others: dict[str, list[tuple[float, float]]] | None = None) -> None:
        self.others = others or {}
        self.told: dict[str, list[tuple[float, float]]] = {}

    def add_up(self, terms: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
        if not terms:  # the statistics, of which there are none
            return {}
        self.told = terms
        names = {*terms, *self.others}
        return super().add_up(
            {name: [*terms.get(name, []), *self.others.get(name, [])] for name in names}
        )


def record(
    turns: list[tuple[float, int]],
    *,
    sample: int = 0,
    observations: list[int] | None = None,
    sequences: list[tuple[int, int, int]] | None = None,
    ordinal: int = 0,
) -> TrainRecord:
    """Makes a record whose turns are two sampled ids, with one given id between them.

    turns: (reward, player) of each.
    observations: the given id before each turn but the first, and one more behind the last.
    """
    given = observations or [7] * len(turns)
    ids, mask, rewards, spans = [], [], [], []
    for (reward, player), seen in zip(turns, given, strict=True):
        spans.append((len(ids), len(ids) + 2, 0, player))
        ids += [1, 2, seen]
        mask += [1, 1, 0]
        rewards += [0.0, reward, 0.0]
    columns = {
        "prompt_ids": np.array([5, 6, 5, 6, 5], np.int32),
        "action_ids": np.array(ids, np.int32),
        "action_mask": np.array(mask, np.uint8),
        "logp": np.zeros(len(ids), np.float32),
        "turn_reward": np.array(rewards, np.float32),
        "turns": np.array(spans, np.int32).reshape(-1, 4),
        "sequences": np.array(sequences or [(0, -1, 5)], np.int32),
    }
    return TrainRecord(ordinal=ordinal, sample=sample, minibatch=0, columns=columns)


def of_turns(records: list[TrainRecord], rewards: list[float] | None = None, **config: Any) -> Any:
    """Returns the advantage of each turn of each record, as one rank computes it."""
    advantage = TurnAdvantage(TurnsConfig(**config))
    numbers = rewards or [float(r.columns["turn_reward"].sum()) for r in records]
    computed = per_action(advantage, records, np.array(numbers), OneRank())
    return [
        own[r.columns["turns"][:, 0]].tolist()
        for own, r in zip(computed.advantages, records, strict=True)
    ]


class TestCompared(conformance.TestTurns):
    pass


class TestComparedWithoutTheRest(conformance.TestTurns):
    config: ClassVar[dict[str, Any]] = {"rest": False}


def test_a_trainer_that_compares_no_records_is_refused():
    """Without a baseline every turn of a good episode would be praised, and nobody would know."""
    scalars = ActionScalars(
        reward=1.0,
        mask=np.ones(1, bool),
        truncated=False,
        columns={"turn_reward": np.ones(1), "logp": np.zeros(1)},
    )
    with pytest.raises(ContractError, match=r"by itself(.|\n)*no baseline(.|\n)*take a trainer"):
        TurnAdvantage(TurnsConfig()).per_action(scalars)


def test_it_is_an_advantage_of_actions_that_compares_records():
    advantage = TurnAdvantage(TurnsConfig())
    assert isinstance(advantage, ActionAdvantage) and isinstance(advantage, ComparesRecords)


def test_a_turn_has_what_follows_it_less_the_mean_episode_of_the_others():
    records = [
        record([(1.0, 0), (0.0, 0), (2.0, 0)]),
        record([(0.5, 0)], sample=1),
        record([(0.0, 0), (0.0, 0)], sample=2),
    ]
    assert of_turns(records) == [
        [3.0 - 0.25, 2.0 - 0.25, 2.0 - 0.25],
        [0.5 - 1.5],
        [0.0 - 1.75, 0.0 - 1.75],
    ]


def test_all_actions_of_a_turn_have_its_advantage_and_given_ones_have_none():
    records = [record([(1.0, 0), (2.0, 0)]), record([(0.0, 0)], sample=1)]
    advantage = TurnAdvantage(TurnsConfig())
    computed = per_action(advantage, records, np.array([3.0, 0.0]), OneRank())
    assert computed.advantages[0].tolist() == [3.0, 3.0, 0.0, 2.0, 2.0, 0.0]
    assert computed.returns[0].tolist() == [3.0, 3.0, 0.0, 2.0, 2.0, 0.0]


def test_groups_are_not_mixed():
    records = [record([(float(n), 0)], ordinal=n // 2, sample=n % 2) for n in range(4)]
    assert of_turns(records) == [[-1.0], [1.0], [-1.0], [1.0]]


def test_a_record_that_is_alone_in_its_group_teaches_nothing():
    assert of_turns([record([(1.0, 0), (3.0, 0)])]) == [[0.0, 0.0]]


def test_equal_episodes_of_one_turn_teach_nothing_but_for_no_rounding():
    records = [record([(0.1, 0)], sample=n) for n in range(7)]
    assert of_turns(records) == [[0.0]] * 7


def test_the_rest_of_a_reward_counts_after_each_turn():
    """A judge's reward comes when all turns are over."""
    records = [record([(1.0, 0), (1.0, 0)]), record([(0.0, 0)], sample=1)]
    assert of_turns(records, [2.5, 0.0]) == [[2.5, 1.5], [-2.5]]
    assert of_turns(records, [2.5, 0.0], rest=False) == [[2.0, 1.0], [-2.0]]


def test_players_are_compared_with_themselves():
    """In a game of zero sum each player's turns have that player's return alone."""
    records = [
        record([(0.0, 0), (0.0, 1), (1.0, 0), (-1.0, 1)]),
        record([(0.0, 0), (0.0, 1), (-1.0, 0), (1.0, 1)], sample=1),
    ]
    assert of_turns(records) == [[2.0, -2.0, 2.0, -2.0], [-2.0, 2.0, -2.0, 2.0]]


def test_a_player_that_no_other_episode_has_teaches_nothing():
    records = [record([(1.0, 0), (5.0, 1)]), record([(0.0, 0)], sample=1)]
    assert of_turns(records, [1.0, 0.0], rest=False) == [[1.0, 0.0], [-1.0]]


def test_rewards_of_another_sequence_are_not_taken_for_earned_before():
    """A second answer from the first turn's prompt: it was not behind that turn's reward."""
    forked = record([(1.0, 0), (2.0, 0)], sequences=[(0, -1, 5), (3, 0, 5)])
    behind = record([(1.0, 0), (2.0, 0)], sample=1, sequences=[(0, -1, 5), (3, 0, 8)])
    assert of_turns([forked, behind]) == [[0.0, 0.0], [0.0, -1.0]]


def test_anchors_compare_turns_that_read_the_same_observation():
    """The given id before the second turn is 8 in two records, and 9 in one."""
    records = [
        record([(0.0, 0), (1.0, 0)], observations=[8, 7]),
        record([(0.0, 0), (3.0, 0)], observations=[8, 7], sample=1),
        record([(0.0, 0), (8.0, 0)], observations=[9, 7], sample=2),
    ]
    assert of_turns(records, anchors=True) == [
        [1.0 - 5.5, 1.0 - 3.0],
        [3.0 - 4.5, 3.0 - 1.0],
        [8.0 - 2.0, 8.0 - 2.0],  # nobody else read 9: the others' episodes
    ]


def test_an_anchor_that_only_the_own_record_meets_again_is_no_comparison():
    records = [
        record([(0.0, 0), (1.0, 0), (5.0, 0)], observations=[8, 8, 7]),
        record([(2.0, 0)], sample=1),
    ]
    assert of_turns(records, anchors=True)[0] == [4.0, 4.0, 3.0]


def test_an_observation_is_read_across_the_begin_of_a_sequence():
    """A fork right behind the given id of its parent has that id as observation."""
    forked = record([(0.0, 0), (1.0, 0)], observations=[8, 7], sequences=[(0, -1, 5), (3, 0, 8)])
    plain = record([(0.0, 0), (3.0, 0)], observations=[8, 7], sample=1)
    assert of_turns([forked, plain], anchors=True) == [[-2.0, -2.0], [2.0, 2.0]]


@pytest.mark.parametrize("anchors", [False, True])
def test_a_group_that_lies_on_two_ranks_has_the_same_advantages(anchors):
    draw = np.random.default_rng(0)
    records = [
        record(
            [(float(draw.integers(5)), int(draw.integers(2))) for _ in range(draw.integers(1, 5))],
            ordinal=n // 4,
            sample=n % 4,
        )
        for n in range(12)
    ]
    rewards = np.array([float(r.columns["turn_reward"].sum()) for r in records])
    advantage = TurnAdvantage(TurnsConfig(anchors=anchors))
    whole = per_action(advantage, records, rewards, OneRank()).advantages
    own = [n % 3 == 0 for n in range(12)]
    parts = [[n for n in range(12) if own[n] is here] for here in (True, False)]
    told = []
    for part in parts:
        ranks = OneOfTwoRanks()
        per_action(advantage, [records[n] for n in part], rewards[part], ranks)
        told.append(ranks.told)
    for part, others in zip(parts, reversed(told), strict=True):
        ranks = OneOfTwoRanks(others)
        split = per_action(advantage, [records[n] for n in part], rewards[part], ranks)
        for n, advantages in zip(part, split.advantages, strict=True):
            np.testing.assert_allclose(advantages, whole[n], rtol=0, atol=1e-12)


def test_a_masked_record_gets_nothing_and_still_counts_for_the_others():
    cut, other = record([(4.0, 0)]), record([(1.0, 0)], sample=1)
    cut.columns["action_mask"][:] = 0
    assert of_turns([cut, other]) == [[0.0], [-3.0]]


def test_a_record_that_was_not_drawn_in_an_environment_is_refused():
    plain = record([(1.0, 0)])
    del plain.columns["turns"]
    with pytest.raises(ContractError, match=r"lacks turns, (.|\n)*not drawn in an env"):
        of_turns([plain], [1.0])


def test_a_group_of_one_is_refused():
    with pytest.raises(ConfigError, match="a group of 1 has no baseline"):
        TurnsConfig(group_size=1)


# -- a bandit with an exit -------------------------------------------------------------------------

GROUP = 4
EPISODES = 100_000
#: What the policy may do: leave at once, or stay and then pull one of two arms.
OUTCOMES = ("leave", "left arm", "right arm")
#: Rewards of the first turn and of the second one, by outcome.
REWARDS = {"leave": (0.4,), "left arm": (0.1, 1.0), "right arm": (0.1, -0.5)}
STAY, LEFT = 0.6, 0.3  # probabilities
#: Gradients of log-probs by the two logits, of both turns of each outcome.
SCORES = {
    "leave": [(-STAY, 0.0)],
    "left arm": [(1 - STAY, 0.0), (0.0, 1 - LEFT)],
    "right arm": [(1 - STAY, 0.0), (0.0, -LEFT)],
}
PROBABILITY = {"leave": 1 - STAY, "left arm": STAY * LEFT, "right arm": STAY * (1 - LEFT)}


def true_gradient() -> np.ndarray:
    """Returns the derivative of the mean return by both logits, in closed form."""
    of_arms = LEFT * REWARDS["left arm"][1] + (1 - LEFT) * REWARDS["right arm"][1]
    by_stay = STAY * (1 - STAY) * (REWARDS["left arm"][0] + of_arms - REWARDS["leave"][0])
    by_left = STAY * LEFT * (1 - LEFT) * (REWARDS["left arm"][1] - REWARDS["right arm"][1])
    return np.array([by_stay, by_left])


def turn_advantages(group: tuple[str, ...]) -> list[list[float]]:
    records = [
        record([(reward, 0) for reward in REWARDS[outcome]], sample=n)
        for n, outcome in enumerate(group)
    ]
    return of_turns(records, group_size=GROUP)


def index_advantages(group: tuple[str, ...]) -> list[list[float]]:
    """Returns-to-go less their mean over all the group's turns of the same index.

    They are multiplied by S / (S - 1), which makes the first turn's unbiased.
    """
    to_go = [np.cumsum(REWARDS[outcome][::-1])[::-1] for outcome in group]
    means = [
        np.mean([own[index] for own in to_go if len(own) > index] or [0.0]) for index in (0, 1)
    ]
    scale = GROUP / (GROUP - 1)
    return [[(value - means[t]) * scale for t, value in enumerate(own)] for own in to_go]


def gradients_of(advantages_of: Any) -> np.ndarray:
    """Returns the estimated gradient of each of 1e5 / 4 groups, float64[groups, 2]."""
    draw = np.random.default_rng(7)
    drawn = draw.choice(3, size=(EPISODES // GROUP, GROUP), p=[PROBABILITY[o] for o in OUTCOMES])
    estimate = {}
    for numbers in itertools.product(range(3), repeat=GROUP):
        group = tuple(OUTCOMES[n] for n in numbers)
        terms = [
            advantage * np.array(score)
            for outcome, own in zip(group, advantages_of(group), strict=True)
            for advantage, score in zip(own, SCORES[outcome], strict=True)
        ]
        estimate[numbers] = np.sum(terms, axis=0) / GROUP
    return np.array([estimate[tuple(numbers)] for numbers in drawn.tolist()])


def standard_errors_off(advantages_of: Any) -> np.ndarray:
    """Returns by how many standard errors the mean estimate is off, for both logits."""
    gradients = gradients_of(advantages_of)
    error = gradients.std(axis=0, ddof=1) / np.sqrt(len(gradients))
    return np.abs(gradients.mean(axis=0) - true_gradient()) / error


def test_on_a_two_turn_bandit_with_an_exit_the_turn_advantages_gradient_is_unbiased():
    assert (standard_errors_off(turn_advantages) <= 3).all()


def test_the_mean_by_turn_index_fails_the_same_test_at_the_second_turn():
    first, second = standard_errors_off(index_advantages)
    assert first <= 3 and second > 10
