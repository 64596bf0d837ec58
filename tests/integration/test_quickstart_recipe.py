"""The quickstart recipe: its data, its rewards, the model it starts from, and that its YAML is a
valid job.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gcore_core.builtin.config import FunctionRewardConfig, JsonLinesConfig
from gcore_core.builtin.function_reward import FunctionScorer
from gcore_core.builtin.json_lines import JsonLines
from gcore_core.config.plan import load_plan
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import import_file
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord
from gcore_core.run.make_model import make_model

RECIPES = Path(__file__).parents[2] / "recipes"
FILE = RECIPES / "quickstart" / "arithmetic.py"


@pytest.fixture(scope="module")
def task() -> ModuleType:
    return import_file(FILE)


def prompts(name: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in (FILE.parent / name).read_text().splitlines()]


# -- data ------------------------------------------------------------------------------------------


def test_the_committed_files_are_what_the_script_writes(task: ModuleType, tmp_path: Path) -> None:
    task.write(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (FILE.parent / name).read_bytes()


def test_the_script_imports_only_the_standard_library() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import arithmetic\n"
        "print({'torch', 'numpy', 'transformers', 'gcore_core'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, FILE.parent], capture_output=True)
    assert done.stdout == b"set()\n"


def test_train_and_heldout_are_disjoint_and_complete() -> None:
    train, heldout = prompts("train.jsonl"), prompts("heldout.jsonl")
    assert (len(train), len(heldout)) == (4096, 512)
    assert len({*train, *heldout}) == 4096 + 512


def test_every_answer_is_the_sum_in_two_digits(tmp_path: Path) -> None:
    for name in ("train.jsonl", "heldout.jsonl"):
        rows = JsonLines(JsonLinesConfig(path=str(FILE.parent / name), index_dir=str(tmp_path)))
        for row in rows:
            assert row.text is not None and row.text.endswith("=")
            assert row.fields == {"answer": f"{sum(map(int, row.text[:-1].split('+'))):02d}"}


# -- texts that teach ------------------------------------------------------------------------------


def test_teaching_texts_are_correct_and_hold_no_held_out_problem(task: ModuleType) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = task._tokenizer()
    heldout = {
        task.prompt_of(problem) for problem in range(task.PROBLEMS) if task.is_held_out(problem)
    }
    assert set(prompts("heldout.jsonl")) <= heldout
    worked_texts = texts = 0
    for batch in task._batches(seed=3, steps=20):
        for ids in batch.tolist():
            assert ids[0] == task.BOS and ids.count(task.EOS) == 1
            prompt, _, completion = tokenizer.decode(ids).partition("=")
            operands = [int(digit) for digit in prompt.split("+")]
            assert len(operands) == 5 and f"{prompt}=" not in heldout
            texts += 1
            if completion[0] == ":":
                worked_texts += 1
                totals = [sum(operands[: count + 1]) for count in range(5)]
                assert completion == ":" + "".join(f"{total:02d}" for total in totals)
            else:
                assert completion[0] == "?" and len(completion) == 3
                assert abs(int(completion[1:]) - sum(operands)) <= 6
    assert texts == 1280
    assert worked_texts / texts == pytest.approx(0.3, abs=0.05)  # 4 standard deviations


def test_teaching_texts_repeat_with_the_seed(task: ModuleType) -> None:
    first, again, other = (next(task._batches(seed, 1)).tolist() for seed in (1, 1, 2))
    assert first == again != other


# -- rewards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status", "exact", "worked"),
    [
        ("?25", "finished", 1, 0),
        (":0710182325", "finished", 1, 1),
        ("?0710182325", "finished", 1, 1),
        (":0710182324", "finished", 0, 1),
        (":0710182325", "truncated", 0, 1),
        ("5", "finished", 0, 0),
        ("", "finished", 0, 0),
    ],
)
def test_rewards_require_the_sum_at_the_end(
    text: str, status: str, exact: float, worked: float
) -> None:
    prompt = Prompt(row=0, text="7+3+8+5+2=", fields={"answer": "25"})
    record = ScoredRecord(ordinal=0, sample=0, prompt=prompt, text=text, status=status, columns={})
    values = []
    for name in ("exact", "shows_work"):
        scorer = FunctionScorer(
            FunctionRewardConfig(path=str(FILE), name=name), WorkerContext(role="scorer")
        )
        values.append(scorer.score([record])[0].value)
    assert values == [exact, worked]


# -- the job ---------------------------------------------------------------------------------------


def test_the_yaml_is_a_valid_job_that_sees_fewer_prompts_than_there_are() -> None:
    for plugin in ("gcore_torch", "gcore_algorithms", "gcore_report"):
        pytest.importorskip(plugin)
    plan = load_plan(RECIPES / "quickstart.yaml")
    assert plan.at("run.steps") * plan.at("controller.config.prompts") <= 4096
    assert plan.at("roles.policy.model.make.path") == str(FILE)
    assert plan.at("rewards.worked.weight") == 0
    longest = 1 + 2 * 5 + 1  # ':', the totals, the end
    assert plan.at("roles.rollout.config.max_new_tokens") >= longest


# -- the model -------------------------------------------------------------------------------------


def taught(tmp_path: Path, **settings: Any) -> Path:
    pytest.importorskip("torch")
    make = {"path": str(FILE), "name": "teach", "config": settings}
    return make_model(make, tmp_path, lambda share, message: None)


def test_the_model_loads_from_its_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = taught(tmp_path, steps=2)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer("7+3=").input_ids
    assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.decode(ids) == "<bos>7+3="
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "7+3="
    assert tokenizer("7 3").input_ids.count(tokenizer.unk_token_id) == 1
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        model.config.eos_token_id,
        model.config.pad_token_id,
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_208
    assert model.config.head_dim == 32
    assert len(tokenizer) == model.config.vocab_size


def test_an_unknown_setting_is_refused(task: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="teach knows seed, threads and steps, not sead"):
        task.teach(tmp_path, {"sead": 1}, lambda share, message: None)


@pytest.mark.slow
def test_the_taught_model_mostly_guesses_but_can_calculate(tmp_path: Path) -> None:
    """Greedy answers are guesses; three sampled answers in ten are worked, and those are right nine
    times in ten.
    """
    directory = taught(tmp_path, seed=0)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    rows = [json.loads(line) for line in (FILE.parent / "heldout.jsonl").read_text().splitlines()]
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt")

    def answers(**how: Any) -> list[str]:
        ids = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=14,
            pad_token_id=0,
            **how,
        )
        return tokenizer.batch_decode(
            ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )

    def right(texts: list[str]) -> list[bool]:
        return [text[-2:] == row["answer"] for text, row in zip(texts, rows, strict=True)]

    torch.manual_seed(0)
    greedy, sampled = answers(do_sample=False), answers(do_sample=True, temperature=1.0, top_k=0)
    worked = [ok for text, ok in zip(sampled, right(sampled), strict=True) if text.startswith(":")]
    assert sum(right(greedy)) / len(rows) < 0.45
    assert 0.2 < len(worked) / len(rows) < 0.45
    assert sum(worked) / len(worked) >= 0.9
