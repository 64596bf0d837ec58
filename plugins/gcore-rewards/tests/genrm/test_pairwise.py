"""Comparisons: a preference for a place cancels, and strengths depend on the opponents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from gcore_rewards.genrm.config import PairwiseConfig
from gcore_rewards.genrm.pairwise import PairwiseJudge, strengths, tournament
from hypothesis import given
from hypothesis import strategies as st

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import Prompt, Ref
from gcore_core.contract.scorer import ScoredRecord


class Judge:
    """Says ``say(first, second)`` of two completions."""

    def __init__(self, say: Callable[[str, str], str]) -> None:
        self.say, self.questions = say, []  # type: ignore[var-annotated]

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        self.questions += questions
        asked = [question.prompt.messages[0]["content"].split("|") for question in questions]
        return [[Answer(text=self.say(*pair), status="finished")] for pair in asked]


def by_number(first: str, second: str) -> str:
    """The larger number is better."""
    return f"Better: {'A' if int(first) > int(second) else 'B'}"


def make(say: Callable[[str, str], str], **config: Any) -> tuple[PairwiseJudge, Judge]:
    judge = Judge(say)
    settings = PairwiseConfig(**{"template": "{first}|{second}", **config})
    return PairwiseJudge(settings, WorkerContext(role="scorer", sampler=judge)), judge


def group(*texts: str, ordinal: int = 0) -> list[ScoredRecord]:
    prompt = Prompt(row=ordinal, text="?")
    return [
        ScoredRecord(
            ordinal=ordinal, sample=i, prompt=prompt, text=text, status="finished", columns={}
        )
        for i, text in enumerate(texts)
    ]


async def values(scorer: PairwiseJudge, records: list[ScoredRecord]) -> list[float | None]:
    return [score.value for score in await scorer.score(records)]


async def test_a_win_rate_is_the_share_of_comparisons_won() -> None:
    scorer, judge = make(by_number)
    assert await values(scorer, group("2", "9", "4")) == [0.0, 1.0, 0.5]
    assert len(judge.questions) == 6
    assert len({question.seed for question in judge.questions}) == 6


async def test_every_pair_is_asked_in_both_orders() -> None:
    scorer, judge = make(by_number)
    await scorer.score(group("1", "2", "3"))
    asked = Counter(question.prompt.messages[0]["content"] for question in judge.questions)
    assert asked == Counter({f"{a}|{b}": 1 for a in "123" for b in "123" if a != b})


@pytest.mark.parametrize("place", ["A", "B"])
async def test_a_judge_that_prefers_a_place_scores_all_alike(place: str) -> None:
    scorer, _ = make(lambda *_: f"Better: {place}")
    assert await values(scorer, group("2", "9", "4")) == [0.5, 0.5, 0.5]
    scorer, _ = make(lambda *_: f"Better: {place}", method="bradley_terry")
    assert await values(scorer, group("2", "9", "4")) == pytest.approx([0, 0, 0], abs=1e-12)


async def test_groups_of_one_call_do_not_meet() -> None:
    scorer, judge = make(by_number)
    assert await values(scorer, [*group("1", "2"), *group("8", "7", ordinal=1)]) == [
        0.0,
        1.0,
        1.0,
        0.0,
    ]
    assert len(judge.questions) == 4
    assert [question.about for question in judge.questions] == [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_equal_texts_are_a_tie_without_a_question() -> None:
    scorer, judge = make(by_number)
    assert await values(scorer, group("2", "2", "1")) == [0.75, 0.75, 0.0]
    assert len(judge.questions) == 4


class Looks:
    """Prefers the image whose reference has the higher digest, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, ...]] = []

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        asked = [tuple(ref.digest for ref in question.images) for question in questions]
        self.shown += asked
        return [
            [Answer(text=f"Better: {'A' if first > second else 'B'}", status="finished")]
            for first, second in asked
        ]


async def test_images_are_compared_in_both_orders_and_the_same_one_is_a_tie() -> None:
    judge = Looks()
    config = PairwiseConfig(images=["image"], template="{first_image} or {second_image}?")
    scorer = PairwiseJudge(config, WorkerContext(role="scorer", sampler=judge))
    picture = np.zeros((4, 4, 1), np.uint8)
    refs = [Ref("agent.0", "slab", digest, 16, digest, b"") for digest in (2, 2, 1)]
    records = [
        replace(r, media={"image": picture}, refs={"image": ref})
        for r, ref in zip(group(*"aaa"), refs, strict=True)
    ]
    assert await values(scorer, records) == [0.75, 0.75, 0.0]
    assert sorted(judge.shown) == [(1, 2), (1, 2), (2, 1), (2, 1)]


async def test_one_completion_alone_is_a_failure() -> None:
    scorer, _ = make(by_number)
    (score,) = await scorer.score(group("1"))
    assert (score.value, score.reason) == (
        None,
        "a prompt with one completion has nothing to compare",
    )


async def test_a_pair_without_a_decision_in_both_orders_does_not_count() -> None:
    """Of 1 against 3 one order cannot be parsed; the other is left out too, or the place would
    count.
    """
    scorer, _ = make(lambda a, b: "?" if (a, b) == ("3", "1") else by_number(a, b), retries=0)
    assert await values(scorer, group("1", "2", "3")) == [0.0, 0.5, 1.0]


async def test_a_record_with_most_comparisons_undecided_is_a_failure() -> None:
    scorer, _ = make(lambda a, b: "a tough one" if "5" in (a, b) else by_number(a, b), retries=0)
    *good, bad = await scorer.score(group("1", "2", "3", "5"))
    assert [score.value for score in good] == [0.0, 0.5, 1.0]
    assert (bad.value, bad.status, bad.reason) == (None, "failed", "unparsable: 'a tough one'")


async def test_only_the_last_match_of_a_pattern_is_compared() -> None:
    scorer, _ = make(by_number, completion_pattern=r"\d+$")
    assert await values(scorer, group("so 2", "7, no: 1")) == [1.0, 0.0]


async def test_a_row_without_the_field_fails_its_group_alone() -> None:
    scorer, _ = make(by_number, template="{first}|{second}{fields[x]}")
    rich = group("1", "2")
    rich = [
        ScoredRecord(
            ordinal=1,
            sample=r.sample,
            prompt=Prompt(row=1, text="?", fields={"x": ""}),
            text=r.text,
            status=r.status,
            columns={},
        )
        for r in rich
    ]
    scores = await scorer.score([*group("1", "2"), *rich])
    assert [score.value for score in scores] == [None, None, 0.0, 1.0]
    assert scores[0].reason == "row 0: no field 'x'; the row has: none"


# -- who meets whom --------------------------------------------------------------------------------


@given(players=st.integers(2, 17), opponents=st.integers(1, 17), seed=st.integers(0, 2**63 - 1))
def test_all_meet_enough_others_and_nobody_twice(players: int, opponents: int, seed: int) -> None:
    pairs = list(tournament(players, opponents, seed))
    assert len({*pairs}) == len(pairs) and all(0 <= a < b < players for a, b in pairs)
    met = Counter(player for pair in pairs for player in pair)
    wanted = min(opponents, players - 1)
    wanted += wanted * players % 2  # nobody can be left over
    assert [met[player] for player in range(players)] == [wanted] * players
    assert pairs == list(tournament(players, opponents, seed))


def test_without_a_number_everybody_meets_everybody() -> None:
    assert list(tournament(4, None, 0)) == list(combinations(range(4), 2))


@pytest.mark.parametrize(("players", "opponents"), [(9, 2), (16, 3), (16, 4)])
def test_a_sparse_tournament_connects_all_and_depends_on_the_seed(
    players: int, opponents: int
) -> None:
    pairs = list(tournament(players, opponents, 1))
    reached = {0}
    for _ in range(players):
        reached |= {player for pair in pairs if reached & {*pair} for player in pair}
    assert len(reached) == players
    assert pairs != list(tournament(players, opponents, 2))


async def test_a_sparse_tournament_asks_less() -> None:
    scorer, judge = make(by_number, opponents=2)
    await scorer.score(group(*map(str, range(8))))
    assert len(judge.questions) == 2 * 8


# -- strengths -------------------------------------------------------------------------------------


def shares(count: int, won: dict[tuple[int, int], float]) -> np.ndarray:
    matrix = np.full((count, count), np.nan)
    for (i, j), share in won.items():
        matrix[i, j] = share
        matrix[j, i] = 1 - share
    return matrix


def test_strengths_of_two_are_the_log_odds_when_the_prior_vanishes() -> None:
    theta = strengths(shares(2, {(0, 1): 0.8}), 1e-9)
    assert theta[0] - theta[1] == pytest.approx(np.log(0.8 / 0.2), abs=1e-6)


def test_strengths_recover_those_that_made_the_comparisons() -> None:
    """Every share is the model's own probability, so the strengths are exact but for the prior."""
    true = np.array([-1.5, -0.2, 0.3, 1.4])
    odds = {(i, j): 1 / (1 + np.exp(true[j] - true[i])) for i, j in combinations(range(4), 2)}
    assert strengths(shares(4, odds), 1e-9) == pytest.approx(true - true.mean(), abs=1e-6)


def test_strengths_allow_for_who_the_opponents_were() -> None:
    """1 and 2 both won one of two, but 1 won against 4, to which 2 lost."""
    won = {(0, 1): 1.0, (1, 4): 1.0, (2, 4): 0.0, (2, 3): 1.0, (0, 4): 1.0, (3, 4): 0.0}
    theta = strengths(shares(5, won), 1.0)
    assert theta[1] > theta[2] + 0.1


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 9))
def test_strengths_are_finite_and_at_the_maximum(seed: int, count: int) -> None:
    """There the gradient of the log-posterior is zero. Wins of 0 and 1 are what has no maximum
    without a prior.
    """
    draw = np.random.default_rng(seed)
    pairs = {
        pair: float(draw.integers(0, 3) / 2)
        for pair in combinations(range(count), 2)
        if draw.random() < 0.7
    }
    won, prior = shares(count, pairs), 0.3
    theta = strengths(won, prior)
    expected = 1 / (1 + np.exp(theta[None] - theta[:, None]))
    gradient = np.where(np.isnan(won), 0, won - expected).sum(1) - prior * theta
    assert np.abs(gradient).max() < 1e-7
    assert abs(theta.sum()) < 1e-9


async def test_strengths_order_a_group_as_the_judge_does() -> None:
    scorer, _ = make(by_number, method="bradley_terry")
    scores = await values(scorer, group(*map(str, [5, 1, 9, 3, 7, 2])))
    assert np.argsort(scores).tolist() == np.argsort([5, 1, 9, 3, 7, 2]).tolist()
