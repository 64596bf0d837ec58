"""The judge's recipe: what the judge is taught, that its YAML is a valid job, and how good the
taught judge is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gcore_core.config.plan import Plan, load_plan
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.factories import build, import_file
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord

RECIPES = Path(__file__).parents[2] / "recipes"
FILE = RECIPES / "judge" / "judge.py"


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    return import_file(FILE)


@pytest.fixture(scope="module")
def plan() -> Plan:
    for plugin in ("gcore_torch", "gcore_algorithms", "gcore_report", "gcore_rewards.genrm"):
        pytest.importorskip(plugin)
    return load_plan(RECIPES / "judge.yaml")


class LocalRole:
    """A generator role inside this process, for one reward that asks it."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        return [[answer] for answer in self.answers(questions)]

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        requests = [
            SampleRequest(ordinal=i, sample=0, seed=q.seed, prompt=q.prompt, greedy=q.greedy)
            for i, q in enumerate(questions)
        ]
        self._generator.submit(requests)
        found: dict[int, Answer] = {}
        while len(found) < len(requests):
            for done in self._generator.step():
                text = done.columns["text"].tobytes().decode() if done.columns else ""
                found[done.request.ordinal] = Answer(
                    text=text, status=done.status, reason=done.reason
                )
        return [found[i] for i in range(len(requests))]


def make_role(plan: Plan, role: str, directory: Path) -> LocalRole:
    return LocalRole(
        build(
            plan.factory(f"roles.{role}"), WorkerContext(role=role, model={"path": str(directory)})
        )
    )


def make_reward(plan: Plan, name: str, **context: Any) -> Any:
    return build(
        plan.factory(f"rewards.{name}"),
        WorkerContext(role="scorer", seed=plan.at("run.seed"), **context),
    )


def record(row: int, prompt: Prompt, answer: Answer) -> ScoredRecord:
    return ScoredRecord(
        ordinal=row, sample=0, prompt=prompt, text=answer.text, status=answer.status, columns={}
    )


# -- texts that teach ------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [False, True])
def test_teaching_texts_of_the_judge_are_true(judge: ModuleType, held_out: bool) -> None:
    pytest.importorskip("tokenizers")
    task = judge.arithmetic
    tokenizer = task._tokenizer()
    verdicts = []
    for ids in next(judge.texts(seed=3, steps=1, size=1000, held_out=held_out)).tolist():
        assert ids[0] == task.BOS and ids[-1] == task.EOS
        question, _, said = tokenizer.decode(ids).partition(":")
        answer, _, problem = question.partition("*")
        operands = [int(digit) for digit in problem[:-1].split("+")]
        assert said[:-1] == "".join(f"{sum(operands[: count + 1]):02d}" for count in range(5))
        assert said[-1] == ("y" if int(answer) == sum(operands) else "n")
        assert task.is_held_out(int("".join(map(str, operands)))) == held_out
        verdicts.append(said[-1])
        assert abs(int(answer) - sum(operands)) <= 20
    assert verdicts.count("y") / 1000 == pytest.approx(0.5, abs=0.07)  # 4 standard deviations


def test_teaching_texts_include_errors_of_whole_tens(judge: ModuleType) -> None:
    """Else a judge need not look at the first digit."""
    pytest.importorskip("numpy")
    ids = next(judge.texts(seed=0, steps=1, size=2000))
    totals = ids[:, judge.VERDICT - 2 : judge.VERDICT]
    assert ((ids[:, 2] == totals[:, 1]) & (ids[:, 1] != totals[:, 0])).sum() > 20


# -- the job ---------------------------------------------------------------------------------------


def test_the_job_equals_the_quickstart_except_for_the_rewards(plan: Plan) -> None:
    quickstart = load_plan(RECIPES / "quickstart.yaml")
    for key in (
        "controller",
        "data",
        "evaluation",
        "advantage",
        "objective",
        "roles.policy",
        "roles.rollout.config",
    ):
        assert plan.at(key) == quickstart.at(key), key
    assert plan.at("rewards.exact.weight") == 0
    assert plan.at("rewards.judged.role") == "judge"
    assert plan.at("roles.judge.follows") is None


class Told:
    """Notes what it is asked and says one thing."""

    def __init__(self, says: str) -> None:
        self.says, self.questions = says, []  # type: ignore[var-annotated]

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        self.questions += questions
        return [[Answer(text=self.says, status="finished")] for _ in questions]


@pytest.mark.parametrize(
    ("says", "value"), [(":0710182325y", 1.0), (":0710182325n", 0.0), (":07", None)]
)
async def test_questions_to_the_judge_have_the_form_of_its_teaching_texts(
    plan: Plan, says: str, value: float | None
) -> None:
    role = Told(says)
    reward = make_reward(plan, "judged", sampler=role)
    prompt = Prompt(row=0, text="7+3+8+5+2=", fields={"answer": "25"})
    texts = [("?25", "finished"), ("5", "finished"), ("?25", "truncated")]
    scores = await reward.score(
        [record(0, prompt, Answer(text=text, status=status)) for text, status in texts]
    )
    assert [score.value for score in scores] == [value, 0.0, 0.0]
    assert {question.prompt.text for question in role.questions} == {"25*7+3+8+5+2="}


# -- the judge -------------------------------------------------------------------------------------


async def test_a_parser_that_does_not_fit_the_judge_stops_the_run(
    judge: ModuleType, plan: Plan, tmp_path: Path
) -> None:
    """The judge answers through the real generator; its first answers are shown."""
    judge.teach(tmp_path, {"steps": 1}, lambda share, message: None)
    other = load_plan(
        RECIPES / "judge.yaml", [r"rewards.judged.config.parser.pattern='Score (?P<score>\d)'"]
    )
    reward = make_reward(other, "judged", sampler=make_role(plan, "judge", tmp_path))
    prompt = Prompt(row=0, text="7+3+8+5+2=")
    with pytest.raises(
        ConfigError, match="none of the first 32 answers of the judge could be parsed"
    ) as caught:
        await reward.score(
            [record(i, prompt, Answer(text="?25", status="finished")) for i in range(32)]
        )
    assert len(caught.value.facts["answers"]) == 3


def test_an_unknown_setting_is_refused(judge: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="teach knows seed, threads and steps, not sead"):
        judge.teach(tmp_path, {"sead": 1}, lambda share, message: None)


@pytest.mark.slow
async def test_the_taught_judge_agrees_with_the_sum_on_policy_answers(
    judge: ModuleType, plan: Plan, tmp_path: Path
) -> None:
    """On balanced answers to held-out problems, and on samples of the policy before it learns; both
    at least 0.98.
    """
    policy, judged = tmp_path / "policy", tmp_path / "judge"
    judge.arithmetic.teach(policy, {"seed": 0}, lambda share, message: None)
    judge.teach(judged, {"seed": 0}, lambda share, message: None)
    assert judge.measure(judged, next(judge.texts(1, 1, 2048, held_out=True)))["agreement"] >= 0.98

    prompts = list(build(plan.factory("evaluation.data")))
    questions = [Question(prompt=prompt, seed=i) for i, prompt in enumerate(prompts)]
    answers = make_role(plan, "rollout", policy).answers(questions)
    records = [
        record(i, prompt, answer)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    scores = await make_reward(plan, "judged", sampler=make_role(plan, "judge", judged)).score(
        records
    )
    truth = make_reward(plan, "exact").score(records)
    assert all(score.status == "ok" for score in scores)
    agree = [said.value == true.value for said, true in zip(scores, truth, strict=True)]
    assert sum(agree) / len(agree) >= 0.98
    assert (
        0.2 < sum(score.value for score in truth) / len(truth) < 0.6
    )  # there is something to tell apart
