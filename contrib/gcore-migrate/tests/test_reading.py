"""Reading configurations: nothing of a script is run, and bad files have an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_migrate.commands import from_trl, from_verl, list_keys, rows_of
from gcore_migrate.reading import read_trl, read_verl
from gcore_migrate.shell import assignments, options, words_of
from gcore_migrate.trl import RULES as OF_TRL
from gcore_migrate.verl import RULES as OF_VERL

from gcore_core.contract.errors import ConfigError
from tests.support import made_pages


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("n=3\ntrain a.b=$n", "3"),
        ("n=3\ntrain a.b=${n}", "3"),
        ("train a.b=${n:-4}", "4"),
        ('base=${DATA:-"${PLACE:-/data}"}\ntrain a.b=$base/x', "/data/x"),
        ("n=3\ntrain a.b=$((n * 2 + 1))", "7"),
        ("n=3\ntrain a.b=$(( ${n} * 2 ))", "6"),
        ("train \\\n  a.b=5  # a comment\n", "5"),
        ('many=(\n  a.b=6\n  c.d=7\n)\ntrain "${many[@]}"', "6"),
        ("train a.b=1 a.b=2", "2"),
        ("train +a.b='left'", "left"),
        ("train a.b=$(rm -rf /)", "$(rm"),
        ("export P=$P:/one\nexport P=$P:/two\ntrain a.b=$P", "$P:/one:/two"),
        ("one=$other\nother=5\ntrain a.b=$one", "$other"),
    ],
)
def test_a_value_is_found_in_a_script_that_is_not_run(script: str, value: str) -> None:
    assert assignments(words_of(script))["a.b"] == value


def test_an_option_without_a_value_is_true_and_one_with_several_a_list() -> None:
    found = options(words_of("trl grpo --bf16 --lora-target-modules q_proj v_proj --lr=1e-5"))
    assert found == {"bf16": True, "lora_target_modules": ["q_proj", "v_proj"], "lr": "1e-5"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("$HERE/x", "${oc.env:HERE}/x"),
        ("${HERE}/x", "${oc.env:HERE}/x"),
        ("${HERE:-$THERE/data}/x", "${oc.env:HERE,${oc.env:THERE}/data}/x"),
        ("${HERE:-${THERE}/data}/x", "${oc.env:HERE,${oc.env:THERE}/data}/x"),
    ],
)
def test_a_variable_of_the_environment_is_asked_for_with_its_default(
    said: str, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"train data.train_files={said}\n")
    assert read_verl(file) == {"data.train_files": expected}


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("0012", "0012"),
        ("yes", "yes"),
        ("1e-6", 1e-6),
        ("1_000", 1000),
        ("True", True),
        ("07", "07"),
    ],
)
def test_a_word_means_what_hydra_takes_it_for(said: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"train trainer.experiment_name={said}\n")
    assert read_verl(file) == {"trainer.experiment_name": value}


def test_a_negative_number_is_the_value_of_its_option() -> None:
    found = options(words_of("trl grpo --max_steps -1 --bf16 -q --min_p -.5"))
    assert found == {"max_steps": "-1", "bf16": True, "min_p": "-.5"}


def test_a_python_script_is_parsed_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "raise SystemExit('it was run')\n"
        "args = GRPOConfig(num_generations=4, learning_rate=1e-5, top_k=LATER)\n"
        "GRPOTrainer(model='Qwen/Qwen3-0.6B', args=args)\n"
    )
    kind, given = read_trl(file)
    assert kind == "grpo"
    assert given == {
        "num_generations": 4,
        "learning_rate": 1e-5,
        "top_k": "LATER",
        "model_name_or_path": "Qwen/Qwen3-0.6B",
    }


def test_a_tree_of_yaml_has_dotted_keys(tmp_path: Path) -> None:
    file = tmp_path / "ppo.yaml"
    file.write_text("data: {train_batch_size: 8}\ntrainer: {nnodes: 1}\n")
    assert read_verl(file) == {"data.train_batch_size": 8, "trainer.nnodes": 1}


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("lost.yaml", None, "cannot be read"),
        ("bad.yaml", "a: [", "no YAML"),
        ("list.yaml", "- 1\n", "has no keys"),
        ("empty.sh", "echo hello\n", "are in it"),
        ("job.toml", "a = 1\n", "is not read"),
    ],
)
def test_a_file_without_settings_is_refused(
    name: str, text: str | None, what: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    for read in (read_verl, read_trl):
        with pytest.raises(ConfigError, match=what):
            read(file)


def test_a_python_script_without_a_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    with pytest.raises(ConfigError, match="it makes none of GRPOConfig"):
        read_trl(tmp_path / "a.py")
    (tmp_path / "b.py").write_text("print(\n")
    with pytest.raises(ConfigError, match="no Python"):
        read_trl(tmp_path / "b.py")


def test_a_job_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text("python -m verl.trainer.main_ppo data.train_files=a.parquet trainer.logger=x\n")
    job = tmp_path / "job.yaml"
    assert from_verl([str(file), "--to", str(job)]) == 0
    said = capsys.readouterr().err
    assert "1 of 2 keys taken over" in said
    assert "to do: roles.policy.model.path" in said
    assert "#   trainer.logger=x: " in job.read_text()
    with pytest.raises(ConfigError, match="there is a file already"):
        from_verl([str(file), "--to", str(job)])
    with pytest.raises(ConfigError, match="--to: .* cannot be written: No such file or directory"):
        from_verl([str(file), "--to", str(tmp_path / "gone" / "job.yaml")])


def test_a_kind_that_the_file_does_not_say_must_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: Qwen/Qwen2.5-0.5B\nlearning_rate: 0.0001\n")
    with pytest.raises(ConfigError, match="which trainer it is for"):
        from_trl([str(file)])
    assert from_trl([str(file), "--kind", "sft"]) == 0
    job: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    assert job["controller"]["use"] == "offline/sft"
    assert job["roles"]["policy"]["config"]["learning_rate"] == 0.0001


def test_every_known_key_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for name, rules in (("verl", OF_VERL), ("trl", OF_TRL)):
        assert list_keys([name]) == 0
        printed = capsys.readouterr().out
        assert all(key in printed for key, _ in rows_of(rules))


def test_the_page_has_what_the_rules_say() -> None:
    page = made_pages.page("reference/migration.md")
    for rules in (OF_VERL, OF_TRL):
        for key, here in rows_of(rules):
            assert f"| `{key}` | {here} |" in page, json.dumps([key, here])
