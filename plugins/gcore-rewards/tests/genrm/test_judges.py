"""Judges: votes, retries, seeds, and failures that are never a number."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gcore_rewards.genrm.config import Criterion, PointwiseConfig, RubricConfig
from gcore_rewards.genrm.judges import PointwiseJudge, RubricJudge
from gcore_rewards.genrm.panel import combined, question_seed
from gcore_rewards.genrm.parser_config import ParserConfig

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import Prompt, Ref
from gcore_core.contract.scorer import ScoredRecord

Say = Callable[[str, Question], "str | Answer"]


class Judge:
    """A sampler that answers by ``say(asked, question)``, and remembers what it was asked, call by
    call.
    """

    def __init__(self, say: Say) -> None:
        self.say, self.calls = say, []  # type: ignore[var-annotated]

    @property
    def questions(self) -> list[Question]:
        return [question for call in self.calls for question in call]

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        self.calls.append(list(questions))
        return [[self._answer(question)] * question.samples for question in questions]

    def _answer(self, question: Question) -> Answer:
        prompt = question.prompt
        said = self.say(
            prompt.messages[-1]["content"] if prompt.messages else prompt.text or "", question
        )
        return Answer(text=said, status="finished") if isinstance(said, str) else said


def record(
    text: str, ordinal: int = 0, sample: int = 0, status: str = "finished", **fields: Any
) -> ScoredRecord:
    prompt = Prompt(row=ordinal, text="2+2?", fields=fields)
    return ScoredRecord(
        ordinal=ordinal, sample=sample, prompt=prompt, text=text, status=status, columns={}
    )


def judge(say: Say, **config: Any) -> tuple[PointwiseJudge, Judge]:
    sampler = Judge(say)
    settings = {"template": "{completion}", **config}
    return PointwiseJudge(
        PointwiseConfig(**settings), WorkerContext(role="scorer", seed=5, sampler=sampler)
    ), sampler


def echo(asked: str, _: Question) -> str:
    """Says the completion as it is."""
    return asked


def turns(*said: str) -> Say:
    """Says one after the other, whatever is asked."""
    rest = iter(said)
    return lambda *_: next(rest)


async def one(scorer: Any, *records: ScoredRecord) -> Any:
    (score,) = await scorer.score(records or [record("x")])
    return score


# -- one score -------------------------------------------------------------------------------------


async def test_a_score_is_what_the_judge_wrote_on_the_scale() -> None:
    scorer, _ = judge(echo)
    scores = await scorer.score([record("Score: 7"), record("Score: 0", 1), record("Score: 10", 2)])
    assert [score.value for score in scores] == [0.7, 0.0, 1.0]


async def test_the_judge_is_asked_by_the_template_about_the_record() -> None:
    scorer, sampler = judge(
        lambda *_: "Score: 1", template="{prompt}|{completion}|{fields[answer]}", system="be strict"
    )
    await scorer.score([record("five", 3, 2, answer=4)])
    (question,) = sampler.questions
    assert question.prompt.messages == [
        {"role": "system", "content": "be strict"},
        {"role": "user", "content": "2+2?|five|4"},
    ]
    assert (question.about, question.samples, question.greedy) == ((3, 2), 1, False)


async def test_a_row_without_the_field_fails_alone() -> None:
    scorer, sampler = judge(lambda *_: "Score: 5", template="{completion} {fields[answer]}")
    bad, good = await scorer.score([record("x", 7), record("x", 8, answer="4")])
    assert (bad.value, bad.status, bad.reason) == (
        None,
        "failed",
        "row 7: no field 'answer'; the row has: none",
    )
    assert good.value == 0.5
    assert len(sampler.questions) == 1


async def test_only_the_last_match_of_a_pattern_is_judged() -> None:
    scorer, sampler = judge(lambda *_: "Score: 5", completion_pattern=r"</think>(.*)")
    await scorer.score([record("<think>a</think>b</think>c"), record("nothing", 1)])
    assert [question.prompt.messages[0]["content"] for question in sampler.questions] == [
        "b</think>c",
        "nothing",
    ]


SLOW = "(?:a|aa)+$"  # backtracks for ever on many a's before another letter
ENDLESS = "a" * 64 + "b"


async def test_a_completion_pattern_that_backtracks_without_end_times_out_one_record() -> None:
    scorer, sampler = judge(lambda *_: "Score: 5", completion_pattern=SLOW)
    slow, quick = await scorer.score([record(ENDLESS), record("so a", 1)])
    assert (slow.value, slow.status) == (None, "timeout")
    assert slow.reason == f"completion_pattern took longer than 0.1 s: '{SLOW}'"
    assert quick.value == 0.5
    assert len(sampler.questions) == 1


async def test_a_parser_pattern_that_backtracks_without_end_fails_and_is_asked_again() -> None:
    parser = ParserConfig(pattern=f"(?P<score>[0-9])|{SLOW}")
    scorer, sampler = judge(turns(ENDLESS, "7"), parser=parser)
    assert (await one(scorer, record("x"))).value == 0.7
    assert len(sampler.questions) == 2
    scorer, sampler = judge(turns(*[ENDLESS] * 3), parser=parser)
    score = await one(scorer, record("x"))
    assert (score.value, score.status) == (None, "failed")
    assert score.reason.startswith("unparsable: parser.pattern took longer than 0.1 s: '(?P<score>")


async def test_an_unfit_completion_gets_its_score_without_asking() -> None:
    scorer, sampler = judge(lambda *_: "Score: 10", completion_pattern=r"\d\d$", unfit_score=-1.0)
    records = [record("=25"), record("=2", 1), record("=25", 2, status="truncated")]
    assert [score.value for score in await scorer.score(records)] == [1.0, -1.0, -1.0]
    assert len(sampler.questions) == 1


async def test_without_records_nothing_is_asked() -> None:
    scorer, sampler = judge(echo)
    assert await scorer.score([]) == []
    assert sampler.questions == []


async def test_a_reward_without_a_role_to_ask_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="role: the reward asks a judge, but names no role that is one"
    ):
        PointwiseJudge(PointwiseConfig(), WorkerContext(role="scorer"))


async def test_a_sampler_that_gives_too_few_answers_breaks_its_contract() -> None:
    class Lazy:
        async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
            return [[]] * len(questions)

    scorer = PointwiseJudge(PointwiseConfig(), WorkerContext(role="scorer", sampler=Lazy()))
    with pytest.raises(ContractError, match="the judge gave 0 answers to 1 questions"):
        await scorer.score([record("x")])


# -- what cannot be parsed -------------------------------------------------------------------------


async def test_a_vote_that_cannot_be_parsed_is_asked_for_again_with_another_seed() -> None:
    scorer, sampler = judge(turns("hm", "well", "Score: 3"))
    assert (await one(scorer)).value == 0.3
    seeds = [question.seed for question in sampler.questions]
    assert seeds == [question_seed(5, 0, 0, 0, attempt) for attempt in range(3)]
    assert len({*seeds}) == 3


async def test_only_missing_votes_are_asked_for_again() -> None:
    said = {"a": ["Score: 1"], "b": ["?", "Score: 2"], "c": ["Score: 3"]}
    scorer, sampler = judge(lambda asked, _: said[asked].pop(0))
    scores = await scorer.score([record("a"), record("b", 1), record("c", 2)])
    assert [score.value for score in scores] == [0.1, 0.2, 0.3]
    assert [len(call) for call in sampler.calls] == [3, 1]


async def test_a_failure_shows_the_answer_that_cannot_be_parsed() -> None:
    scorer, sampler = judge(lambda *_: "I would\nrather not.", retries=1)
    score = await one(scorer)
    assert (score.value, score.status, score.reason) == (
        None,
        "failed",
        r"unparsable: 'I would\nrather not.'",
    )
    assert len(sampler.questions) == 2


async def test_a_score_off_the_scale_cannot_be_parsed_unless_it_is_clipped() -> None:
    scorer, _ = judge(lambda *_: "Score: 85", retries=0)
    assert (await one(scorer)).reason == "unparsable: 'Score: 85'"
    scorer, _ = judge(lambda *_: "Score: 85", outside="clip")
    assert (await one(scorer)).value == 1.0


async def test_an_answer_that_was_cut_off_is_not_parsed_unless_accepted() -> None:
    cut = Answer(text="Score: 3\nThat is low, but", status="truncated", n_actions=9)
    scorer, _ = judge(lambda *_: cut, retries=0)
    assert (
        await one(scorer)
    ).reason == r"unparsable: (cut off after 9 tokens) 'Score: 3\nThat is low, but'"
    scorer, _ = judge(lambda *_: cut, accept_truncated=True)
    assert (await one(scorer)).value == 0.3


async def test_a_judge_that_fails_is_not_asked_again() -> None:
    failed = Answer(text="", status="failed", reason="prompt_too_long")
    scorer, sampler = judge(lambda *_: failed)
    assert (await one(scorer)).reason == "the judge failed: prompt_too_long"
    assert len(sampler.questions) == 1


async def test_a_greedy_judge_samples_when_it_is_asked_again() -> None:
    scorer, sampler = judge(turns("?", "?", "Score: 3"), greedy=True)
    assert (await one(scorer)).value == 0.3
    assert [question.greedy for question in sampler.questions] == [True, False, False]


# -- a parser that never matches -------------------------------------------------------------------


async def test_a_parser_that_never_matches_stops_the_run_and_shows_answers() -> None:
    scorer, _ = judge(lambda asked, _: f"I give {asked} points", retries=0)
    for i in range(7):
        assert (await one(scorer, record(str(i)))).status == "failed"
    with pytest.raises(ConfigError) as caught:
        await scorer.score([record("7")])
    assert str(caught.value).splitlines() == [
        "parser: none of the first 8 answers of the judge could be parsed; the first are:",
        "  'I give 0 points'",
        "  'I give 1 points'",
        "  'I give 2 points'",
        "  Change the parser, or ask for another form in the template.",
    ]


async def test_after_one_parsed_answer_the_run_is_not_stopped() -> None:
    scorer, _ = judge(echo, retries=0, stop_after=3)
    await scorer.score([record("Score: 1")])
    scores = await scorer.score([record("hm", i) for i in range(50)])
    assert {score.status for score in scores} == {"failed"}


async def test_a_failed_judge_does_not_count_as_unparsable() -> None:
    scorer, _ = judge(lambda *_: Answer(text="", status="failed", reason="gone"), stop_after=1)
    assert (await one(scorer)).status == "failed"


async def test_stop_after_0_never_stops_the_run() -> None:
    scorer, _ = judge(lambda *_: "hm", stop_after=0)
    scores = await scorer.score([record("hm", i) for i in range(50)])
    assert {score.status for score in scores} == {"failed"}


# -- votes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("combine", "value"), [("mean", 0.38), ("median", 0.2), ("majority", 0.1)])
async def test_votes_are_combined(combine: str, value: float) -> None:
    scorer, sampler = judge(
        turns(*(f"Score: {n}" for n in (1, 9, 1, 6, 2))), votes=5, combine=combine
    )
    assert (await one(scorer)).value == pytest.approx(value)
    assert [len(call) for call in sampler.calls] == [5]


def test_equally_frequent_votes_are_averaged() -> None:
    assert combined([1.0, 1.0, 0.0, 0.0, 0.5], "majority") == 0.5


async def test_every_vote_has_a_seed_of_its_own_that_depends_on_the_record_alone() -> None:
    async def seeds(*records: ScoredRecord) -> list[int]:
        scorer, sampler = judge(lambda *_: "Score: 1", votes=3)
        await scorer.score(records)
        return [question.seed for question in sampler.questions]

    first, second = await seeds(record("a", 4, 0)), await seeds(record("a", 4, 1))
    assert len({*first, *second}) == 6
    assert await seeds(record("a", 4, 0), record("b", 4, 1)) == first + second
    assert all(0 <= seed < 2**63 for seed in first)


async def test_min_parsed_votes_make_a_score_and_fewer_a_failure() -> None:
    def say(_: str, question: Question) -> str:
        return "Score: 4" if question.seed in good else "?"

    good = {question_seed(5, 0, 0, vote, 0) for vote in (0, 2)}
    scorer, _ = judge(say, votes=3, retries=1)
    assert (await one(scorer)).value == 0.4
    scorer, _ = judge(say, votes=3, retries=1, min_parsed=3)
    assert (await one(scorer)).reason == "2 of 3 votes; unparsable: '?'"


async def test_calls_overlap_and_keep_their_answers_apart() -> None:
    """The second call is asked and answered while the first one waits."""
    first_waits, go = asyncio.Event(), asyncio.Event()

    class Slow(Judge):
        async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
            if questions[0].prompt.messages[0]["content"].endswith("1"):
                first_waits.set()
                await go.wait()
            return await super().sample(questions)

    scorer = PointwiseJudge(
        PointwiseConfig(template="{completion}"), WorkerContext(role="scorer", sampler=Slow(echo))
    )
    waiting = asyncio.ensure_future(scorer.score([record("Score: 1"), record("Score: 2", 1)]))
    await first_waits.wait()
    assert [score.value for score in await scorer.score([record("Score: 8", 2)])] == [0.8]
    assert not waiting.done()
    go.set()
    assert [score.value for score in await waiting] == [0.1, 0.2]


# -- rubrics ---------------------------------------------------------------------------------------

CRITERIA = [
    {"name": "clear", "description": "easy to read", "weight": 1.0},
    {"name": "right", "weight": 3.0},
]


def rubric(say: Say, **config: Any) -> tuple[RubricJudge, Judge]:
    import msgspec

    sampler = Judge(say)
    settings = msgspec.convert({"criteria": CRITERIA, **config}, RubricConfig)
    return RubricJudge(settings, WorkerContext(role="scorer", sampler=sampler)), sampler


async def test_a_rubric_is_the_weighted_mean_of_its_criteria() -> None:
    scorer, sampler = rubric(lambda *_: 'so: {"clear": 10, "Right": 2}')
    assert (await one(scorer)).value == pytest.approx((1 * 1.0 + 3 * 0.2) / 4)
    (question,) = sampler.questions
    assert "- clear: easy to read\n- right\n" in question.prompt.messages[0]["content"]


async def test_a_rubric_may_ask_for_each_criterion_by_itself() -> None:
    scorer, sampler = rubric(
        lambda asked, _: "Score: 10" if "alone: clear. easy" in asked else "Score: 2",
        together=False,
    )
    scores = await scorer.score([record("x", 4), record("y", 5)])
    assert [score.value for score in scores] == pytest.approx([0.4, 0.4])
    assert len({question.seed for question in sampler.questions}) == 4
    assert [question.about for question in sampler.questions] == [(4, 0), (4, 0), (5, 0), (5, 0)]


async def test_votes_on_a_rubric_are_combined_by_criterion() -> None:
    said = [f'{{"clear": {c}, "right": {r}}}' for c, r in ((1, 9), (5, 1), (9, 5))]
    scorer, _ = rubric(turns(*said), votes=3, combine="median")
    assert (await one(scorer)).value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("together", "reason"),
    [
        (True, """unparsable: '{"clear": 9} Score: 99'"""),
        (False, """clear: unparsable: '{"clear": 9} Score: 99'"""),
    ],
)
async def test_a_criterion_that_cannot_be_parsed_fails_the_record(
    together: bool, reason: str
) -> None:
    scorer, _ = rubric(lambda *_: '{"clear": 9} Score: 99', together=together)
    score = await one(scorer)
    assert (score.value, score.status, score.reason) == (None, "failed", reason)


async def test_a_criterion_off_the_scale_cannot_be_parsed() -> None:
    scorer, _ = rubric(lambda *_: '{"clear": 9, "right": 11}')
    assert (await one(scorer)).status == "failed"


# -- images ----------------------------------------------------------------------------------------


def drawing(sample: int = 0, **media: np.ndarray) -> ScoredRecord:
    """A record without a text; the references of its media are what a store would give."""
    refs = {
        name: Ref("agent.0", name, sample, array.nbytes, sample, b"")
        for name, array in media.items()
    }
    return dataclasses.replace(record("", 3, sample), media=media, refs=refs)


PICTURE = np.zeros((8, 8, 3), np.uint8)


async def test_a_judge_is_shown_the_record_s_images_by_reference_in_the_order_of_the_template() -> (
    None
):
    scorer, sampler = judge(
        lambda *_: "Score: 7", images=["image", "mask"], template="{mask}{prompt}{image}", votes=2
    )
    drawn = drawing(1, image=PICTURE, mask=PICTURE[..., :1])
    assert (await one(scorer, drawn)).value == 0.7
    assert [question.images for question in sampler.questions] == [
        [drawn.refs["mask"], drawn.refs["image"]]
    ] * 2
    (turn,) = sampler.questions[0].prompt.messages or []
    assert turn["content"] == [
        {"type": "image"},
        {"type": "text", "text": "2+2?"},
        {"type": "image"},
    ]


async def test_a_rubric_of_single_criteria_shows_the_image_with_each() -> None:
    sampler = Judge(lambda *_: "Score: 5")
    config = RubricConfig(
        images=["image"], criteria=[Criterion(name="clear"), Criterion(name="red")], together=False
    )
    scorer = RubricJudge(config, WorkerContext(role="scorer", sampler=sampler))
    drawn = drawing(image=PICTURE)
    assert (await one(scorer, drawn)).value == 0.5
    assert [question.images for question in sampler.questions] == [[drawn.refs["image"]]] * 2


async def test_a_medium_that_the_records_do_not_have_ends_the_run_and_is_named() -> None:
    scorer, _ = judge(lambda *_: "Score: 7", images=["picture"], template="{picture}")
    with pytest.raises(
        ConfigError, match=r"images: the records have no medium 'picture'\.\n.*They have: image\."
    ):
        await scorer.score([drawing(image=PICTURE)])
    with pytest.raises(ConfigError, match="They have: none"):
        await scorer.score([record("text alone")])


@pytest.mark.parametrize(
    "array", [PICTURE.astype(np.float32), PICTURE[0], np.zeros((8, 8, 4), np.uint8)]
)
async def test_a_medium_that_is_no_image_ends_the_run_and_is_named(array: np.ndarray) -> None:
    scorer, _ = judge(lambda *_: "Score: 7", images=["x"], template="{x}")
    with pytest.raises(
        ConfigError,
        match=r"images: the medium 'x' is no image: it is (float32|uint8)\[.*, not uint8\[",
    ):
        await scorer.score([drawing(x=array)])
