"""Wheels hold all that README's commands need: they install and run where there is no checkout."""

from __future__ import annotations

import json
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from gcore_testing.scaffold import writing

from tests.support import runs
from tests.support.scaffolds import ANSWERS, fill_in
from tests.support.wheels import (
    REPOSITORY,
    build_wheel,
    install_wheel,
    make_editable,
    make_venv,
    projects,
    run_outside,
    wheel_of,
)

#: files of a package that are neither modules nor written by a tool
DATA = (".txt", ".tmpl", ".typed", ".md", ".json", ".yaml", ".html", ".j2")
#: package -> those that its wheel holds besides
MORE_PACKAGES = {"gcore_tools": ("gcore",)}
#: A job that trains in an environment that somebody else has written.
OUTSIDE = """\
run: {name: outside, steps: 3, seed: 3}
data: {use: core/jsonl, config: {path: rows.jsonl}}
environment: {use: outside, config: {turns: 2}}
advantage: {use: fake}
objective: {use: fake}
roles:
  policy: {use: fake}
  rollout: {use: fake}
rewards: {length: {use: core/function, config: {path: length.py, name: length}}}
local: [fake.py]
"""


@pytest.fixture(scope="module")
def programs(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a venv with what requirements.txt names, and nothing else."""
    lines = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = [
        line.replace("-e plugins/", "").replace("-e .", "gcore-core")
        for line in lines
        if not line.startswith(("#", "-c"))
    ]
    assert len(names) == 10 and "gcore-torch" in names
    return make_venv(tmp_path_factory.mktemp("venv"), wheels, names)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a job of fakes."""
    job = runs.job(
        run={"steps": 2},
        roles={"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
    )
    (tmp_path / "fake.py").write_text("from gcore_testing.fake import *\n")
    (tmp_path / "length.py").write_text("def length(record):\n    return len(record.text) % 3\n")
    (tmp_path / "job.yaml").write_text(json.dumps({**job, "local": ["fake.py"]}))
    return tmp_path


def test_every_distribution_has_a_wheel_with_all_files_of_its_package(
    wheels: Path,
) -> None:
    assert len(list(wheels.iterdir())) == len(projects())
    for project in projects():
        package = next(project.glob("gcore_*/__init__.py")).parent
        packages = [package, *(project / name for name in MORE_PACKAGES.get(package.name, ()))]
        committed = {
            str(file.relative_to(project))
            for one in packages
            for file in one.rglob("*")
            if file.suffix in (".py", *DATA) and "__pycache__" not in file.parts
        }
        held = set(zipfile.ZipFile(wheel_of(package.name, wheels)).namelist())
        assert committed - held == set(), package.name
        assert {f"{one.name}/py.typed" for one in packages} <= held


def test_the_recipes_are_in_a_wheel(wheels: Path) -> None:
    held = set(zipfile.ZipFile(wheel_of("gcore-tools", wheels)).namelist())
    recipes = REPOSITORY / "recipes"
    committed = {
        f"gcore_tools/jobs/recipes/{file.relative_to(recipes)}"
        for file in recipes.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert len(committed) > 25
    assert {name for name in held if name.startswith("gcore_tools/jobs/recipes/")} == committed


def test_no_wheel_holds_tests(wheels: Path) -> None:
    for file in wheels.iterdir():
        roots = {name.partition("/")[0] for name in zipfile.ZipFile(file).namelist()}
        package = file.name.partition("-")[0]
        packages = {package, *MORE_PACKAGES.get(package, ())}
        assert {root for root in roots if not root.endswith(".dist-info")} == packages


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


@pytest.mark.protects
def test_a_job_of_fakes_runs_with_the_core_and_the_test_kit_alone(
    wheels: Path, outside: Path, tmp_path: Path
) -> None:
    programs = make_venv(tmp_path / "venv", wheels, ["gcore-testing"])
    assert "train as a YAML file says" in run_outside(
        programs / "g-core", "--help", directory=outside
    )
    written = run_outside(programs / "g-core", "new", "mine", "--kind", "role", directory=outside)
    assert "lines to fill in:" in written
    run_outside(programs / "g-core", "run", "job.yaml", directory=outside)
    assert last_step(outside / "runs/fake/001") == 2


@pytest.mark.parametrize("slots", [1, 2])
def test_the_quickstart_is_copied_and_runs_with_what_requirements_txt_names(
    programs: Path, outside: Path, slots: int
) -> None:
    g_core = programs / "g-core"
    assert "quickstart " in run_outside(g_core, "recipes", directory=outside)
    run_outside(g_core, "recipes", "copy", "quickstart", directory=outside)
    job = [
        "recipes/quickstart.yaml",
        f"roles.policy.slots={slots}",
        "roles.policy.model.make.config.steps=2",
        "run.steps=1",
        "evaluation.every=0",
    ]
    checked = run_outside(g_core, "check", *job, directory=outside)
    assert "nothing wrong found" in checked
    run_outside(g_core, "run", *job, directory=outside)
    assert last_step(outside / "runs/quickstart/001") == 1


@pytest.mark.slow
def test_the_demo_runs_where_only_wheels_are(programs: Path, outside: Path) -> None:
    words = ["demo", "--steps", "4", "--kills", "1"]
    assert run_outside(programs / "g-core", *words, directory=outside).endswith("\nsame\n")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "reward" else pytest.mark.slow)
        for kind in writing.kinds()
    ],
)
def test_a_plugin_from_the_templates_is_tested_where_only_wheels_are(
    kind: str, wheels: Path, tmp_path: Path
) -> None:
    """Its own requirements are all that its tests need."""
    directory = writing.write("scaffolded", kind, tmp_path / "gcore-scaffolded").directory
    project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    programs = make_venv(tmp_path / "venv", wheels, [*needed, "setuptools"])
    make_editable(programs, directory)
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not TestWithTorch"]
    before = run_outside(programs / "python", *tests, directory=directory, code=1)
    assert "NotImplementedError" in before
    fill_in(directory, ANSWERS[kind])
    run_outside(programs / "python", *tests, directory=directory)


def test_an_environment_from_outside_is_installed_by_pip_and_named_in_ten_lines(
    wheels: Path, outside: Path, tmp_path: Path
) -> None:
    """It is a wheel of its own; three steps of a job train on it, and it keeps its contract."""
    directory = writing.write("outside", "environment", tmp_path / "source").directory
    fill_in(directory, ANSWERS["environment"])
    programs = make_venv(tmp_path / "venv", wheels, ["gcore-testing"])
    install_wheel(programs, build_wheel(directory, tmp_path / "built"))
    assert len(OUTSIDE.splitlines()) == 10
    (outside / "job.yaml").write_text(OUTSIDE)
    (outside / "rows.jsonl").write_text("".join(f'{{"prompt": "{row}"}}\n' for row in range(4)))
    listing = run_outside(programs / "g-core", "plugins", directory=outside)
    assert re.search(r"^outside +ok +gcore-outside ", listing, re.M), listing
    run_outside(programs / "g-core", "run", "job.yaml", directory=outside)
    assert last_step(outside / "runs/outside/001") == 3
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(directory / "tests")]
    run_outside(programs / "python", *tests, directory=directory)


def test_the_contracts_of_a_plugin_run_where_only_wheels_are(
    wheels: Path, outside: Path, tmp_path: Path
) -> None:
    programs = make_venv(tmp_path / "venv", wheels, ["gcore-testing", "gcore-sentinel"])
    table = run_outside(programs / "g-core", "conformance", "sentinel", directory=outside)
    assert re.search(r"^TestPlugin +plugin +\d+ +\d+ pass", table, re.M), table
    assert not re.search(r"\d+ fail\b", table), table


def last_step(run: Path) -> int:
    """The last step that a run has finished."""
    rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return int(json.loads(rows[-1])["step"])
