"""What a step program says that it needs and calls decides what a job must and may have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.providers import ControllerProvider
from tests.support import runs

COUNTS = '''
"""A step program that only annotates: it needs no generation, rewards, advantage or objective."""
from gcore_core import hookimpl
from gcore_core.contract import providers as p


class Counts:
    def __init__(self, config, context):
        self._context = context

    async def run(self):
        context = self._context
        for step in range(context.facts.run.steps):
            await context.agree.barrier("step")
        with open(f"counted {context.facts.shard}", "w") as file:
            file.write(repr((context.replicas, context.scorers, context.chosen_advantage)))


@hookimpl
def gcore_controllers():
    yield p.ControllerProvider(
        summary="-", factory="counts:Counts", calls={"trainer": frozenset({"save"})},
        parts=frozenset(),
    )
'''


def job(directory: Path, *without: str, **changes: Any) -> Path:
    """A job of fakes under that program, without some sections."""
    whole = runs.job(controller={"use": "counts", "config": {}, "shards": 1}, **changes)
    whole["local"] = [str(runs.FAKE), "trouble.py", "counts.py"]
    for section in without:
        del whole[section]
    directory.mkdir(exist_ok=True)
    (directory / "counts.py").write_text(COUNTS)
    (directory / "trouble.py").write_text(runs.TROUBLE)
    file = directory / "job.yaml"
    file.write_text(json.dumps(whole))
    return file


def test_a_program_does_not_require_parts_it_does_not_use(tmp_path: Path) -> None:
    file = job(tmp_path, "rewards", "advantage", "objective", launcher={"use": "core/inline"})
    config = json.loads(file.read_text())
    del config["roles"]["rollout"]
    code, run = runs.finish(tmp_path, config)
    assert code == 0, run.output
    assert (tmp_path / "counted 0").read_text() == "([], [], None)"


def test_a_program_that_needs_a_part_refuses_a_job_without_it(tmp_path: Path) -> None:
    file = job(tmp_path, "rewards", "advantage", "objective")
    with pytest.raises(ConfigError) as caught:
        load_plan(file, ["controller.use=core/sync"])
    assert caught.value.facts["missing"] == ["advantage.use", "objective.use", "rewards.<name>"]


def test_a_part_that_nothing_would_call_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_plan(job(tmp_path))
    assert caught.value.facts["problems"] == [
        "roles.rollout: controller counts never calls this role (kind 'generator'); leave it out.",
        "rewards.letters: controller counts never calls this reward; leave it out.",
    ]


def test_a_program_that_uses_an_advantage_must_declare_it() -> None:
    from gcore_core.controllers.context import ControllerContext

    context = ControllerContext.__new__(ControllerContext)
    object.__setattr__(context, "chosen_advantage", None)
    with pytest.raises(ContractError, match='add "advantage" to parts'):
        _ = context.advantage


@pytest.mark.parametrize(
    ("calls", "parts", "problem"),
    [
        ({"trainer": {"fly"}}, set(), "calls: nobody can call 'fly' on kind 'trainer'"),
        ({"pilot": {"train"}}, set(), "calls: nobody can call 'train' on kind 'pilot'"),
        (
            {},
            {"wings"},
            "part 'wings' is none of advantage, generation, objective, rewards",
        ),
    ],
)
def test_a_description_may_name_only_existing_parts(
    calls: dict[str, set[str]], parts: set[str], problem: str
) -> None:
    spec = ControllerProvider(
        summary="-",
        factory="a:b",
        calls={kind: frozenset(verbs) for kind, verbs in calls.items()},
        parts=frozenset(parts),
    )
    assert spec.problems("mine") == [problem]
