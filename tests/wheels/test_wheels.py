"""Wheels hold all that the program needs: they install and run where there is no checkout."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.wheels import REPOSITORY, build_wheels, make_venv, projects, run_outside

#: files of a package that are neither modules nor written by a tool
DATA = (".txt", ".tmpl", ".typed", ".md", ".json", ".yaml", ".html", ".j2")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution, in the words of a wheel's name -> its wheel."""
    files = build_wheels(tmp_path_factory.mktemp("built"))
    return {file.name.partition("-")[0]: file for file in files}


@pytest.fixture(scope="module")
def programs(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a venv with what requirements.txt names of this project."""
    text = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8")
    names = ["gcore_core", *(f"gcore_{name}" for name in re.findall(r"plugins/gcore-(\w+)", text))]
    assert len(names) == 9
    return make_venv(tmp_path_factory.mktemp("venv"), [wheels[name] for name in names])


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with the quickstart, which no wheel holds, and with a job of fakes."""
    shutil.copy(REPOSITORY / "recipes/quickstart.yaml", tmp_path)
    shutil.copytree(REPOSITORY / "recipes/quickstart", tmp_path / "quickstart")
    job = runs.job(
        run={"steps": 2},
        roles={"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
    )
    (tmp_path / "fake.py").write_text("from gcore_core.testing.fake import *\n")
    (tmp_path / "job.yaml").write_text(json.dumps({**job, "local": ["fake.py"]}))
    return tmp_path


def test_every_distribution_has_a_wheel_with_all_files_of_its_package(
    wheels: dict[str, Path],
) -> None:
    assert len(wheels) == len(projects())
    for project in projects():
        package = next(project.glob("gcore_*/__init__.py")).parent
        committed = {
            str(file.relative_to(project))
            for file in package.rglob("*")
            if file.suffix in (".py", *DATA) and "__pycache__" not in file.parts
        }
        held = set(zipfile.ZipFile(wheels[package.name]).namelist())
        assert committed - held == set(), package.name
        assert f"{package.name}/py.typed" in held


def test_no_wheel_holds_tests_or_recipes(wheels: dict[str, Path]) -> None:
    for file in wheels.values():
        roots = {name.partition("/")[0] for name in zipfile.ZipFile(file).namelist()}
        package = file.name.partition("-")[0]
        assert {root for root in roots if not root.endswith(".dist-info")} == {package}


def test_installed_plugins_equal_those_of_the_wheels(programs: Path, outside: Path) -> None:
    listing = run_outside(programs / "g-core", "plugins", directory=outside)
    for name in ("core", "torch", "algorithms", "report"):
        assert re.search(rf"^{name} +ok +gcore-{name} ", listing, re.M), listing
    where = run_outside(
        programs / "python",
        "-c",
        "import gcore_core, gcore_torch; print(gcore_core.__file__, gcore_torch.__file__)",
        directory=outside,
    )
    assert where.count(str(programs.parent)) == 2
    assert str(REPOSITORY) not in where


def test_the_quickstart_is_checked_and_a_job_runs_outside_the_checkout(
    programs: Path, outside: Path
) -> None:
    assert "roles.policy" in run_outside(
        programs / "g-core", "check", "quickstart.yaml", directory=outside
    )
    run_outside(programs / "g-core", "run", "job.yaml", directory=outside)
    rows = (outside / "runs/fake/001/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows][-1] == 2


def test_a_plugin_from_the_templates_is_tested_by_its_contracts(
    programs: Path, outside: Path
) -> None:
    run_outside(
        programs / "g-core", "plugins", "new", "mine", "--kind", "reward", directory=outside
    )
    assert list(outside.rglob("pyproject.toml"))
    table = run_outside(programs / "g-core", "conformance", "algorithms", directory=outside)
    assert re.search(r"^TestPlugin +plugin +\d+ +\d+ pass", table, re.M), table
    assert not re.search(r"\d+ fail\b", table), table
