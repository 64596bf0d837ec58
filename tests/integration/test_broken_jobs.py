"""A job with a wrong key ends every command that reads it in the same words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gcore_core import cli

JOB = """\
run: {steps: 2}
launcher: {use: core/inline}
cluster: {devices: 2}
controller: {use: core/sync, config: {prompts: 4}}
data: {use: data/hub, config: {path: rows.jsonl}}
evaluation: {every: 1, data: {use: data/hub, config: {path: rows.jsonl}}}
advantage: {use: algorithms/grpo, config: {group_size: 4}}
objective: {use: algorithms/ppo_clip}
filter: {use: core/varied}
checkpoint: {every: 1}
roles:
  policy: {use: torch, model: {path: org/name}, config: {learning_rate: 0.001}}
  rollout: {use: torch, config: {max_new_tokens: 4}}
rewards:
  length: {use: algorithms/overlong, config: {max_actions: 8, soft_actions: 2}}
"""
#: Config path -> a value that is wrong there: no such key, or another type.
WRONG = {
    "runn": {"steps": 2},
    "run.step": 2,
    "run.steps": "many",
    "cluster.device": 2,
    "controller.config.promts": 4,
    "data.confg": {},
    "data.config.pth": "rows.jsonl",
    "data.config.limit": "all",
    "data.config": "rows.jsonl",
    "data": "rows.jsonl",
    "evaluation.data.config.pth": "rows.jsonl",
    "evaluation.prompt": 3,
    "advantage.config.groupsize": 4,
    "objective.config.clip_lo": 0.1,
    "filter.config.rewards": "length",
    "checkpoint.evry": 1,
    "roles.policy.models": {},
    "roles.policy.config.learning_rat": 0.1,
    "roles.rollout.config.temperature": "warm",
    "roles.rollout": "torch",
    "roles": ["policy"],
    "rewards.length.wight": 2,
    "rewards.length.config.max_action": 8,
    "rewards.length.config": 8,
    "observers.log": {"use": "trackers/tensorboard", "config": {"diir": "a"}},
}
#: Every command that reads a job, in a directory where it is a run's, too.
COMMANDS = {
    "plan": "plan {file}",
    "config": "config {file}",
    "config --why": "config {file} --why run",
    "run": "run {file}",
    "resume": "resume {folder}",
    "shrink": "shrink {file} -o {folder}/small.yaml",
    "sim run": "sim run {file}",
    "nodes slurm": "nodes slurm {file} --nodes 1",
}
Said = Callable[[str], tuple[int, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Returns the exit code of a command, and what it printed as an error."""

    def run(words: str) -> tuple[int, str]:
        code = cli.main(words.split())
        return code, capsys.readouterr().err

    return run


def broken(folder: Path, path: str) -> Path:
    job = yaml.safe_load(JOB)
    *parents, key = path.split(".")
    node = job
    for name in parents:
        node = node.setdefault(name, {})
    node[key] = WRONG[path]
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    return file


@pytest.mark.protects
@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_key_or_type_is_told_by_every_command_as_check_tells_it(
    path: str, tmp_path: Path, said: Said
) -> None:
    file = broken(tmp_path, path)
    code, expected = said(f"check {file}")
    assert code == 2
    assert expected.startswith(path.removesuffix(f".{path.rpartition('.')[2]}"))
    for name, words in COMMANDS.items():
        assert said(words.format(file=file, folder=tmp_path)) == (code, expected), name
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.yaml"]
