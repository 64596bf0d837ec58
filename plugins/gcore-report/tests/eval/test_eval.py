"""``g-core eval`` with a small model, and tasks in files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from gcore_report.eval.commands import evaluate
from inspect_ai.log import read_eval_log
from transformers import AutoModelForCausalLM, AutoTokenizer

from gcore_core.contract.errors import ConfigError, DataError
from tests.support import language_models

pytestmark = pytest.mark.rest

QUESTIONS = ("1+2=", "17*3=", "9")
MAX_TOKENS = 6
TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Score, accuracy, mean, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash

@scorer(metrics=[accuracy()])
def same():
    async def score(state, target):
        return Score(value="C" if state.output.completion == target.text else "I")
    return score

@task
def known():
    pairs = {pairs!r}
    return Task(dataset=[Sample(input=q, target=a) for q, a in pairs], solver=generate(),
                scorer=same())

@scorer(metrics=[mean()])
def ended():
    async def score(state, target):
        output = state.output
        assert output.usage.total_tokens == output.usage.input_tokens + output.usage.output_tokens
        rest = output.choices[0].stop_reason == "stop" or output.usage.output_tokens == {most}
        return Score(value=float(rest and output.usage.output_tokens > 0))
    return score

@task
def lengths():
    pairs = {pairs!r}
    return Task(dataset=[Sample(input=q, target=a) for q, a in pairs], solver=generate(),
                scorer=ended())

@task
def tooled():
    return Task(dataset=[Sample(input="?")], solver=[use_tools([bash()]), generate()],
                scorer=same())

@task
def own_settings():
    return Task(dataset=[Sample(input="1+1=")], solver=generate(), scorer=same(),
                config=GenerateConfig(temperature=0.7, max_tokens=4096, seed=5))

@task
def unheard():
    return Task(dataset=[Sample(input="1+1=")], solver=generate(), scorer=same(),
                config=GenerateConfig(top_p=0.5))

@task
def hotter():
    return Task(dataset=[Sample(input="1+1=")], solver=generate(temperature=3.0), scorer=same())

@task
def broken():
    return Task(dataset=[Sample(input="?")], solver=generate(), scorer=missing())
"""


def greedy(folder: Path, question: str) -> str:
    """What the model answers by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        ids = model.generate(asked, max_new_tokens=MAX_TOKENS, do_sample=False)
    text = tokenizer.decode(ids[0, asked.shape[1] :], skip_special_tokens=True)
    return str(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, with tasks whose answers are those of its policy but for the last."""
    run = tmp_path_factory.mktemp("runs") / "001"
    language_models.save_model(run / "weights", "qwen2")
    (run / "config.yaml").write_text("run: {name: small}\n")
    pairs = [(question, greedy(run / "weights", question)) for question in QUESTIONS]
    pairs[-1] = (pairs[-1][0], "something else")
    (run / "tasks.py").write_text(TASKS.format(pairs=pairs, most=MAX_TOKENS))
    return run


def test_answers_are_those_that_the_policy_gives_by_transformers_alone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run), "--task", f"{run}/tasks.py@known", "--max-tokens", str(MAX_TOKENS)]
    assert evaluate(words) == 0
    printed = capsys.readouterr().out
    assert "same/accuracy" in printed and "0.667" in printed
    lines = map(json.loads, (run / "evals" / "evals.jsonl").read_text().splitlines())
    line = next(line for line in lines if line["task"] == "known")
    assert (line["samples"], line["path"]) == (3, str(run / "weights"))
    assert line["value"] == pytest.approx(2 / 3)
    assert list((run / "evals").glob("*.eval"))


def test_what_others_log_is_heard_after_an_evaluation(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [str(run), "--task", f"{run}/tasks.py@known", "--max-tokens", str(MAX_TOKENS)]
    assert evaluate([*words, "--to", str(tmp_path)]) == 0
    logging.getLogger("of.somebody.else").warning("still heard")
    assert "still heard" in caplog.text


def test_each_answer_says_why_it_ended_and_how_many_tokens_it_has(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run), "--task", f"{run}/tasks.py@lengths", "--max-tokens", str(MAX_TOKENS)]
    assert evaluate([*words, "--batch", "2"]) == 0
    assert "ended/mean" in (printed := capsys.readouterr().out) and "1.000" in printed


def test_the_command_s_settings_count_where_a_task_has_its_own(run: Path, tmp_path: Path) -> None:
    words = [str(run), "--task", f"{run}/tasks.py@own_settings", "--max-tokens", "6"]
    assert evaluate([*words, "--to", str(tmp_path)]) == 0
    (log,) = tmp_path.glob("*.eval")
    (sample,) = read_eval_log(str(log)).samples or ()
    assert sample.output.completion == greedy(run / "weights", "1+1=")


def test_drawn_answers_are_those_of_the_seed_alone(run: Path, tmp_path: Path) -> None:
    def drawn(seed: str, place: str) -> list[str]:
        words = [str(run), "--task", f"{run}/tasks.py@known", "--max-tokens", "6"]
        more = ["--temperature", "1.5", "--seed", seed, "--to", str(tmp_path / place)]
        assert evaluate([*words, *more]) == 0
        (log,) = (tmp_path / place).glob("*.eval")
        return [str(sample.output.completion) for sample in read_eval_log(str(log)).samples or ()]

    assert drawn("3", "a") == drawn("3", "b") != drawn("4", "c")


def test_models_stand_beside_each_other_and_a_limit_takes_the_first_samples(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    language_models.save_model(other, "qwen2", seed=1)
    task = f"{run}/tasks.py@known"
    words = [str(other), str(run), "--task", task, "--limit", "2", "--max-tokens", "6"]
    assert evaluate([*words, "--to", str(tmp_path / "evals")]) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["task", "metric", "samples", str(other), str(run)]
    assert row.split()[:3] == ["known", "same/accuracy", "2"] and row.split()[-1] == "1.000"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["runs/x/001", "--task", "a"], ConfigError, "neither a run nor a model"),
        (["{run}", "--task", "none.py@a"], ConfigError, "none.py: no such file"),
        (["{run}", "--task", "{run}/tasks.py@lost"], ConfigError, "Task named 'lost' not found"),
        (["{run}", "--task", "nobody/gsm8k"], ConfigError, "nobody/gsm8k"),
        (["{run}", "--task", "{run}/tasks.py@broken"], DataError, "missing"),
        (["{run}", "--task", "{run}/tasks.py@tooled"], DataError, "calls no tools"),
        (["{run}", "--task", "{run}/tasks.py@unheard"], DataError, "the task sets top_p"),
        (["{run}", "--task", "{run}/tasks.py@hotter"], DataError, "temperature=3.0"),
        (["{run}", "--task", "a", "--limit", "0"], ConfigError, "--limit"),
        (["{run}", "--task", "a", "--device", "gpu0"], ConfigError, "--device"),
        (["{run}", "--task", "a", "--temperature", "-1"], ConfigError, "--temperature"),
        (["{run}", "--task", "a", "--step", "3"], ConfigError, "step 3 cannot be had"),
        (["{run}/weights", "--task", "a"], ConfigError, "no place for results"),
        (["{run}/../002", "--task", "a"], ConfigError, "no final weights"),
    ],
)
def test_what_cannot_be_asked_is_said_before_it_is_asked(
    words: list[str], error: type[Exception], message: str, run: Path
) -> None:
    unfinished = run.parent / "002"
    unfinished.mkdir(exist_ok=True)
    (unfinished / "config.yaml").write_text("run: {name: small}\n")
    with pytest.raises(error) as caught:
        evaluate([word.replace("{run}", str(run)) for word in words])
    assert message in str(caught.value)
