"""What ``g-core check`` says of tokenizers and rows with which nothing could be sampled.

The looks' functions are called here as the helper process calls them, without one for each.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from gcore_language.tiny import save_model

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.factories import build, import_attribute
from gcore_core.contract.launching import NodeFacts
from gcore_core.contract.looking import Fact, Note
from gcore_core.run.preflight import check_files
from tests.support import broken_rows, broken_tokenizers
from tests.support.broken_rows import CHAT, TEXT

KEYS = ("data.config", "evaluation.data.config", "roles.", "rewards.")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("whole")
    save_model(directory, "llama")
    (directory / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return directory


def job(folder: Path, model: Path, data: dict[str, Any], **more: Any) -> Path:
    settings: dict[str, Any] = {
        "run": {"steps": 2},
        "launcher": {"use": "core/inline"},
        "controller": {"use": "core/sync", "config": {"prompts": 2}},
        "data": {"use": "core/jsonl", "config": data},
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": 2}},
        "objective": {"use": "algorithms/ppo_clip"},
        "roles": {
            "policy": {"use": "torch", "model": {"path": str(model)}},
            "rollout": {"use": "torch"},
        },
        "rewards": {"one": {"use": "core/function", "config": {"path": "one.py", "name": "one"}}},
        **more,
    }
    # It reads no field of the rows: nothing but the rows themselves is wrong.
    (folder / "one.py").write_text("def one(record):\n    return 1.0\n")
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def told(file: Path, *overrides: str, models: bool = True) -> tuple[list[str], list[str]]:
    """Returns problems and notes of a job's files.

    models: whether weights are looked at, too.
    """
    plan = load_plan(file, overrides)
    datasets = {}
    problems: list[str] = []
    for path in ("data", "evaluation.data"):
        if path in plan.provided:
            try:
                datasets[path] = build(plan.factory(path))
            except GcoreError as error:
                problems.append(f"{path}.config.path: {error.sentence()}.")
    checked = plan.plugins.check_files(plan.config, here=True, datasets=datasets)
    problems += checked.problems
    notes: list[str] = []
    for _, look in checked.looks:
        if not models and look.function == "gcore_language.model_look:problems":
            continue
        said = list(_said(look.function, dict(look.arguments)))
        notes += [text for text in said if isinstance(text, Note)]
        said = [text for text in said if not isinstance(text, Fact)]
        problems += [
            text if text.startswith(look.where) else f"{look.where}: {text}"
            for text in said
            if not isinstance(text, Note)
        ]
    return problems, notes


def _said(function: str, arguments: dict[str, Any]) -> Iterator[str]:
    arguments = json.loads(json.dumps(arguments))
    try:
        yield from import_attribute(function)(arguments)
    except GcoreError as error:
        yield f"{error.sentence()}."


def rows(folder: Path, *values: Any) -> dict[str, Any]:
    return broken_rows.write_rows(folder / "rows.jsonl", values, chat="messages" in values[0])


@pytest.mark.parametrize("row", [CHAT, TEXT], ids=["chat", "text"])
def test_nothing_is_wrong_with_a_whole_model_and_whole_rows(
    whole: Path, tmp_path: Path, row: dict[str, Any]
) -> None:
    assert told(job(tmp_path, whole, rows(tmp_path, row))) == ([], [])


@pytest.mark.parametrize("name", broken_tokenizers.BROKEN)
def test_a_broken_tokenizer_is_a_problem_with_its_key(
    whole: Path, tmp_path: Path, name: str
) -> None:
    broken = broken_tokenizers.BROKEN[name]
    model = shutil.copytree(whole, tmp_path / "model")
    broken.break_it(model, Random(name))
    problems, _ = told(job(tmp_path, model, rows(tmp_path, CHAT if broken.chat else TEXT)))
    assert problems
    assert all(problem.startswith(KEYS) for problem in problems)
    assert any(re.search(broken.says, problem) for problem in problems), problems
    assert not any("Traceback" in problem or "raised" in problem for problem in problems)


@pytest.mark.parametrize("content", ["{broken", "[1]", '{"eos_token_id": "x"}'])
def test_a_broken_generation_config_is_one_problem_that_names_the_file(
    whole: Path, tmp_path: Path, content: str
) -> None:
    """The look at the model and that at its tokenizer both meet it; ``look_at`` tells it once."""
    model = shutil.copytree(whole, tmp_path / "model")
    (model / "generation_config.json").write_text(content)
    problems, _ = told(job(tmp_path, model, rows(tmp_path, CHAT)))
    (problem,) = set(problems)
    assert problem.startswith("roles.policy.model.path: ")
    assert str(model / "generation_config.json") in problem
    assert "transformers cannot load" not in problem


@pytest.mark.parametrize("name", broken_rows.BROKEN)
@pytest.mark.parametrize("key", ["data", "evaluation.data"])
def test_a_broken_row_is_a_problem_with_its_key(
    whole: Path, tmp_path: Path, name: str, key: str
) -> None:
    broken = broken_rows.BROKEN[name]
    config, _ = broken.write(tmp_path / "broken.jsonl", Random(name + key))
    if key == "data":
        file = job(tmp_path, whole, config)
    else:
        evaluation = {"every": 1, "data": {"use": "core/jsonl", "config": config}}
        file = job(tmp_path, whole, rows(tmp_path, TEXT), evaluation=evaluation)
    problems, _ = told(file, models=False)
    assert problems
    assert all(problem.startswith(f"{key}.config") for problem in problems), problems
    assert any(re.search(broken.says, problem) for problem in problems), problems


LONG = {"prompt": "1+" * 80 + "="}  # 162 tokens, of 128 that the model takes


def test_prompts_that_are_too_long_are_counted_and_one_is_named(
    whole: Path, tmp_path: Path
) -> None:
    file = job(tmp_path, whole, rows(tmp_path, TEXT, LONG, LONG))
    problems, notes = told(file, models=False)
    assert problems == []
    said = "2 of 3 rows have more tokens than 128, which is what roles.rollout takes; row 1 has 162"
    assert notes == [f"data.config.path: {said}; they are left out."]
    (problem,), notes = told(file, "controller.config.too_long=error", models=False)
    assert said in problem and "controller.config.too_long: drop" in problem and not notes
    problems, notes = told(file, "roles.rollout.config.context_length=8", models=False)
    assert "3 of 3" not in f"{problems}{notes}", "7 tokens leave room for one"


def test_the_longest_prompt_and_the_longest_answer_are_counted(whole: Path, tmp_path: Path) -> None:
    plan = load_plan(job(tmp_path, whole, rows(tmp_path, TEXT, LONG)), [])
    nodes = [NodeFacts(name="agent.0", devices=(), host="")]
    seen = check_files(plan, nodes, say=lambda text: None)
    assert seen.facts == {"prompt_tokens": 128, "answer_tokens": 128}, "no longer than the model"


def test_a_job_all_of_whose_prompts_are_too_long_is_refused(whole: Path, tmp_path: Path) -> None:
    (problem,), notes = told(job(tmp_path, whole, rows(tmp_path, LONG)), models=False)
    assert (
        problem.startswith("data.config.path: 1 of 1 rows have more tokens than 128") and not notes
    )


def test_an_empty_prompt_is_refused_where_nothing_is_put_in_front_of_it(
    whole: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(whole, tmp_path / "model")
    content = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}))
    (problem,), _ = told(job(tmp_path, model, rows(tmp_path, TEXT, {"prompt": ""})), models=False)
    assert problem.startswith("data.config.path: row 1 cannot be answered by roles.rollout")
    assert problem.endswith("its prompt has no token.")


def test_ids_without_a_token_and_models_without_an_end_are_told(
    whole: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(whole, tmp_path / "model")
    broken_tokenizers.settings(model, "config.json", {"vocab_size": 160, "eos_token_id": None})
    broken_tokenizers.settings(model, "generation_config.json", {"eos_token_id": []})
    broken_tokenizers.settings(model, "tokenizer_config.json", {"eos_token": None})
    _, notes = told(job(tmp_path, model, rows(tmp_path, TEXT)), models=False)
    assert notes == [
        "no file names an id that ends an answer, so each goes on to max_new_tokens.",
        "138 of 160 ids are without a token; no answer is sampled with them.",
    ]


def test_a_chat_that_ends_with_its_answer_is_wrong_only_where_answers_are_sampled(
    whole: Path, tmp_path: Path
) -> None:
    data = rows(tmp_path, {"messages": [*CHAT["messages"], {"role": "assistant", "content": "2"}]})
    (problem,), _ = told(job(tmp_path, whole, data), models=False)
    assert problem == (
        "data.config.path: row 0: it ends with the assistant's answer; take it off (data/hub: "
        "last_answer: take), or train offline on it. [plugin torch]"
    )
    offline = {
        "controller": {"use": "offline/sft"},
        "objective": {"use": "offline/sft"},
        "roles": {
            "policy": {"use": "torch", "model": {"path": str(whole)}},
            "rollout": {"use": "offline"},
        },
        "rewards": {},
    }
    assert told(job(tmp_path, whole, data, **offline), models=False) == ([], [])


def test_a_template_that_refuses_a_row_with_its_answer_is_told_of_an_offline_run(
    whole: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(whole, tmp_path / "model")
    broken_tokenizers.BROKEN["template-raises"].break_it(model, Random(0))
    data = rows(tmp_path, {"messages": [*CHAT["messages"], {"role": "assistant", "content": "2"}]})
    offline = {
        "controller": {"use": "offline/sft"},
        "objective": {"use": "offline/sft"},
        "roles": {
            "policy": {"use": "torch", "model": {"path": str(model)}},
            "rollout": {"use": "offline"},
        },
        "rewards": {},
    }
    (problem,), _ = told(job(tmp_path, model, data, **offline), models=False)
    assert problem.startswith("data.config.path: row 0: the chat template refuses it: ")


def test_rows_of_a_table_that_no_template_could_write_are_told(whole: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    turns = [[{"role": "user", "content": "1"}], [{"role": "user", "content": None}]]
    parquet.write_table(pa.table({"messages": turns}), tmp_path / "rows.parquet")
    data = {"path": str(tmp_path / "rows.parquet"), "messages": "messages"}
    problems, _ = told(job(tmp_path, whole, data), "data.use=data/parquet", models=False)
    assert [problem.split(";")[0] for problem in problems] == [
        "data.config.path: row 1: turn 0 (user): its content is null"
    ]


SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ({}, ""),
        ({"system": "Judge it."}, "the chat template refuses it: no system"),
        ({"template": "{completion} {fields[sum]}"}, "row 0 of data: no field 'sum'"),
        ({"form": "text"}, ""),
    ],
)
def test_a_question_that_a_judge_could_not_be_asked_is_told(
    whole: Path, tmp_path: Path, judge: dict[str, Any], said: str
) -> None:
    model = shutil.copytree(whole, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(SYSTEM + template.read_text())
    roles = {
        "policy": {"use": "torch", "model": {"path": str(whole)}},
        "rollout": {"use": "torch"},
        "judge": {"use": "torch", "model": {"path": str(model)}},
    }
    rewards = {"quality": {"use": "genrm", "role": "judge", "config": judge}}
    file = job(tmp_path, whole, rows(tmp_path, TEXT), roles=roles, rewards=rewards)
    problems, _ = told(file, models=False)
    if not said:
        assert problems == []
        return
    (problem,) = problems
    assert problem.startswith("rewards.quality.config: ") and said in problem


def test_what_a_reward_model_cannot_read_is_told(whole: Path, tmp_path: Path) -> None:
    model = shutil.copytree(whole, tmp_path / "model")
    broken_tokenizers.BROKEN["template-missing"].break_it(model, Random(0))
    rewards = {"liked": {"use": "torch", "config": {"path": str(model)}}}
    file = job(tmp_path, whole, rows(tmp_path, CHAT), rewards=rewards)
    (problem,), _ = told(file, models=False)
    assert problem.startswith("data.config.path: row 0 cannot be read by rewards.liked")
    assert "has no chat template" in problem
    assert told(job(tmp_path, whole, rows(tmp_path, TEXT), rewards=rewards), models=False)[0] == []


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("\\n", ""),
        ("<eos>", ""),
        ("<pad>", "is a special token.*add its id, 0, to eos_token_id in generation_config.json"),
        ("1<pad>", "has a special token.*take what is before or behind that token"),
    ],
)
def test_a_stop_text_that_no_answer_can_have_is_refused(
    whole: Path, tmp_path: Path, stop: str, said: str
) -> None:
    """An answer's text is without special tokens. The end token ends an answer by itself."""
    file = job(tmp_path, whole, rows(tmp_path, TEXT))
    problems, _ = told(file, f"roles.rollout.config.stop={json.dumps([stop])}", models=False)
    assert bool(problems) == bool(said)
    for problem in problems:
        assert problem.startswith("roles.rollout.config.stop: ") and re.search(said, problem)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("<eos>", ""),
        ("+<eos>", ""),
        ("", ""),
        ("n", "ends a turn of the assistant with n,.*add its id, 20, to eos_token_id in gener"),
    ],
)
def test_a_turn_that_ends_with_no_end_of_an_answer_is_told(
    whole: Path, tmp_path: Path, end: str, said: str
) -> None:
    model = shutil.copytree(whole, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("{% endfor %}", end + "{% endfor %}"))
    _, notes = told(job(tmp_path, model, rows(tmp_path, TEXT)), models=False)
    assert bool(notes) == bool(said)
    assert all(re.search(said, note) for note in notes), notes


def test_a_variable_that_the_template_does_not_read_is_told(whole: Path, tmp_path: Path) -> None:
    model = shutil.copytree(whole, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(
        "{%- generation %}{% endgeneration -%}"
        "{% if enable_thinking is defined %}{% endif %}" + template.read_text()
    )
    key = "roles.rollout.config.chat_template_kwargs"
    file = job(tmp_path, model, rows(tmp_path, TEXT))
    assert told(file, f"{key}={{enable_thinking: false}}", models=False) == ([], [])
    problems, notes = told(file, f"{key}={{enable_thinkin: false}}", models=False)
    assert not problems
    assert notes == [
        f"{key}: the chat template reads no variable enable_thinkin (did you mean "
        "'enable_thinking'?); correct it, or leave it out."
    ]
