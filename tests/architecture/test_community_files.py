"""Workflows call tox and nothing else; what they, the hooks and the guide name is there."""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
TOX = re.compile(r"tox run -e ([\w-]+)(?: -- --fresh)?")


def tox_environments() -> set[str]:
    """Every environment that tox.ini describes, with its factors expanded."""
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "tox.ini")
    sections = {name.partition(":")[2] for name in parser.sections() if ":" in name}
    return {
        name for section in sections for name in re.sub(r"[{}]", "", section).split(",") if name
    }


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_installs_tox_and_runs_environments_that_exist(workflow: Path) -> None:
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands[0] == "python -m pip install tox"
    named = [TOX.fullmatch(command) for command in commands[1:]]
    assert named and all(named)
    assert {match[1] for match in named if match} <= tox_environments()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_ends_by_itself(workflow: Path) -> None:
    described = yaml.safe_load(workflow.read_text())
    assert described["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in described["jobs"].values())
    assert all(
        job["strategy"]["matrix"]["python"] == ["3.11"] for job in described["jobs"].values()
    )


def test_there_is_a_workflow_for_each_of_four_environments() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "nightly", "quick"]


def test_commit_hooks_run_only_local_commands() -> None:
    described = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in described["repos"]] == ["local"]


def test_environments_that_the_guide_names_exist() -> None:
    named = set(TOX.findall((ROOT / "CONTRIBUTING.md").read_text()))
    assert {"quick", "docs"} <= named <= tox_environments()


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_a_distribution_says_where_it_ran(project: Path) -> None:
    classifiers = tomllib.loads(project.read_text())["project"]["classifiers"]
    assert "Operating System :: POSIX :: Linux" in classifiers
    versions = [line for line in classifiers if line.startswith("Programming Language :: Python")]
    assert versions == ["Programming Language :: Python :: 3.11"]
